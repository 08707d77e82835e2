"""lm-eval and `vllm bench serve` as docs/evaluation.md runs them, against `kvsieve serve`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.lm_eval_task.make_documents import FILE, rows
from tests.engine.server import Server, free_port

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/evaluation.md").read_text()
FLAGS = [
    *[
        "--policy",
        "snapkv",
        "--full-layers",
        "3",
        "--budget",
        "256",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "8192",
    ],
    *["--kv-cache-memory-bytes", "600M", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"],
]


@pytest.fixture(scope="module")
def server(real_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "kvsieve", "serve", real_model, *FLAGS, "--port", str(port)]
    with Server(command, port, tmp_path_factory.mktemp("server") / "log") as server:
        yield server
    assert server.exit_status == 0, server.log.read_text()[-2000:]


def run_from_guide(
    kind: str, server: Server, model: str, more: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the guide's command of a kind: as written, but for the server's address and the model.

    Args:
        kind: What follows `sh` where its code block opens.
        server: The server it is to use.
        model: The model's folder.
        more: Arguments to add; lm-eval and vLLM let the last one of a name win.
        environment: Variables to set.
    """
    (block,) = re.findall(rf"^```sh {kind}\n(.*?)^```", GUIDE, flags=re.MULTILINE | re.DOTALL)
    command = block.replace("http://127.0.0.1:8000", server.url).rstrip()
    # The guide's replacement for a wheel whose `vllm` command does not work.
    (code,) = re.findall(r"`(python -c [^`]*soaking[^`]*)`", GUIDE)
    command = command.replace("vllm bench serve", code)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        f"{command} {more}",
        shell=True,
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": path,
            "MODEL": model,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=600,
    )


def counters(server: Server) -> dict[str, float]:
    """Requests by mode, and how many were sieved, from `/metrics`."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    found = {
        mode: float(value)
        for mode, value in re.findall(
            r'^kvsieve_requests_total\{.*mode="(\w+)".*\} (\S+)$', text, flags=re.MULTILINE
        )
    }
    (sieved,) = re.findall(r"^kvsieve_sieved_requests_total\{.*\} (\S+)$", text, flags=re.MULTILINE)
    return {**found, "sieved": float(sieved)}


def test_the_documents_are_what_the_script_writes() -> None:
    assert [json.loads(line) for line in FILE.read_text().splitlines()] == rows()


def test_lm_eval_compares_budgets_on_one_server(
    server: Server, real_model: str, tmp_path: Path
) -> None:
    before = counters(server)

    done = run_from_guide(
        "lm-eval", server, real_model, f"--output_path {tmp_path}", HF_DATASETS_CACHE=str(tmp_path)
    )

    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    (file,) = tmp_path.glob("*/results_*.json")
    results = json.loads(file.read_text())["results"]
    full, own, least = (
        results[f"kvsieve_logbook{task}"]["exact_match,number"] for task in ("_full", "", "_128")
    )
    # Full KV gets 12 of 12, a budget of 256 eleven and one of 128 two: rounding may move one.
    assert full >= 0.9
    assert 0.5 <= own <= full
    assert least <= 0.5
    after = counters(server)
    gained = {name: after[name] - before[name] for name in after}
    # The budgets reached the server: lm-eval can lose them (see logbook_128.yaml).
    assert gained == {"full": 12, "sieve": 24, "shadow": 0, "sieved": 24}


def test_log_likelihoods_see_nothing_of_a_sieve(server: Server, real_model: str) -> None:
    row = rows()[0]
    prompt = f"{row['logbook']}\n\nQuestion: {row['question']}\nAnswer: {row['opening']}"

    def score(budget: int | str) -> dict[str, Any]:
        # The body of lm-eval's requests for log-likelihoods, with more tokens after the prompt.
        body = {"model": real_model, "prompt": prompt, "echo": True, "logprobs": 1, "seed": 1234}
        body |= {"max_tokens": 4, "temperature": 0, "vllm_xargs": {"kv_budget": budget}}
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()
        return {
            "logprobs": response["choices"][0]["logprobs"]["token_logprobs"],
            "sieved": response["kv_transfer_params"]["kvsieve"]["sieved"],
            "prompt_tokens": response["usage"]["prompt_tokens"],
        }

    full, sieved = score("full"), score(68)

    assert (full["sieved"], sieved["sieved"]) == (False, True)
    length = full["prompt_tokens"]
    # Every token of the prompt and the first one generated; the sieve acts on those after it.
    assert sieved["logprobs"][: length + 1] == full["logprobs"][: length + 1]
    assert sieved["logprobs"][length + 1 :] != full["logprobs"][length + 1 :]


@pytest.mark.long
def test_vllm_bench_serve_asks_for_a_budget(server: Server, real_model: str) -> None:
    before = counters(server)

    done = run_from_guide("bench", server, real_model, "--num-prompts 4 --disable-tqdm")

    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert re.search(r"Successful requests:\s+4\b", done.stdout), done.stdout[-3000:]
    assert counters(server)["sieved"] - before["sieved"] == 4
