"""One prompt, two servers, one table: stock vLLM beside a sieved server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvsieve.demo.document import EXPECTED, QUESTION, demo_prompt, is_correct
from kvsieve.demo.errors import DemoError
from kvsieve.demo.measure import Measured, measure, num_layers
from kvsieve.demo.model import MODEL_NAME, ensure_demo_model
from kvsieve.policies import parse_settings
from kvsieve.serving.server import ServerSpec, running

FULL = "full"
SIEVED = "sieved"

KV_CACHE_BYTES = 1 << 30

BLOCK_SIZE = 32
"""The CPU's default of 128 would round a budget of 256 up to 383 tokens."""

SERVE_FLAGS = (
    # No compilation: it takes longer than the demonstration.
    "--enforce-eager",
    # Most CPUs lack fast bfloat16, and equal numbers make the answers comparable.
    "--dtype=float32",
    "--max-model-len=4096",
    "--max-num-seqs=4",
    f"--kv-cache-memory-bytes={KV_CACHE_BYTES}",
    f"--block-size={BLOCK_SIZE}",
    "--disable-uvicorn-access-log",
)
"""What both servers are started with; they differ in the sieve and in nothing else."""


def run_demo(
    console: Console,
    *,
    budget: int = 256,
    port: int | None = None,
    json_path: Path | None = None,
    log_console: Console | None = None,
) -> dict[str, Any]:
    """Ask one question about a long document, with the full KV cache and with a sieved one.

    Starts a stock vLLM server, asks, stops it; then the same with `kvsieve serve`. Both
    servers listen on the loopback interface only.

    Args:
        console: Gets the answers and the table; a console on stdout.
        budget: Tokens that a sieved layer keeps per KV head.
        port: The port for both servers, one after the other; None for any free one.
        json_path: Where to write the returned results as JSON too.
        log_console: Gets progress; a console on stderr by default.

    Returns:
        The results, as plain JSON values: `question`, `expected`, `budget`, and for
        "full" and "sieved" what was measured.

    Raises:
        ConfigError: The budget is too small.
        DemoError: The model could not be made, or the sieved server did not prove that it
            sieved.
        ServerError: A server failed.
    """
    # The server refuses it too, but only after the first half of the demonstration.
    parse_settings({"budget": budget}).budget_rule(BLOCK_SIZE)
    log = log_console or Console(stderr=True)
    model = ensure_demo_model(log)
    prompt = demo_prompt()
    console.print(f"A question about a report of some 3,000 tokens: [bold]{QUESTION}[/bold]\n")
    log.print("Two servers are started one after the other; this takes about two minutes.")

    measured = {}
    for name, tokens in ((FULL, None), (SIEVED, budget)):
        settings = None if tokens is None else {"budget": tokens}
        spec = ServerSpec(name, str(model), settings, SERVE_FLAGS)
        with running(spec, port=port, console=log) as server:
            log.print(f"The {name} server is up after {server.start_seconds:.0f} s")
            title = "full KV cache" if tokens is None else f"sieved to {tokens} tokens"
            console.print(f"[bold]{title}[/bold]: ", end="")
            measured[name] = measure(server, model, prompt, _live(console))
            console.print("\n")
    _check_proof(measured[SIEVED])

    console.print(_table(measured[FULL], measured[SIEVED], num_layers(model)))
    results: dict[str, Any] = {
        "model": MODEL_NAME,
        "question": QUESTION,
        "expected": list(EXPECTED),
        "budget": budget,
        **{name: _as_dict(one) for name, one in measured.items()},
    }
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=2) + "\n")
        log.print(f"Results: {json_path}", soft_wrap=True)
    return results


def _live(console: Console) -> Callable[[str], None]:
    """A function that prints a piece of text as it comes, as it is."""
    return lambda piece: console.print(Text(piece), end="", soft_wrap=True)


def _check_proof(sieved: Measured) -> None:
    """Refuse to show a table about a sieve that did nothing.

    Raises:
        DemoError: The response carries no proof, or the proof says that nothing was sieved.
    """
    if sieved.proof is None:
        raise DemoError(
            "the sieved server answered without kv_transfer_params['kvsieve'], so nothing"
            " shows that it sieved. Is the kvsieve plugin installed in this environment?"
            " `kvsieve doctor` tells"
        )
    if not sieved.proof.get("sieved"):
        raise DemoError(
            f"the sieved server says that it kept the whole prompt of"
            f" {sieved.answer.prompt_tokens} tokens: {sieved.proof}. Give a smaller budget"
        )


def _as_dict(one: Measured) -> dict[str, Any]:
    """One server's results as plain JSON values."""
    memory = one.memory
    return {
        **asdict(one),
        "memory": {
            **asdict(memory),
            "bytes_before": memory.bytes_before,
            "bytes_after": memory.bytes_after,
        },
        "correct": is_correct(one.answer.text),
        "repeated_equals_streamed": one.repeated.strip() == one.answer.text,
    }


def _table(full: Measured, sieved: Measured, layers: int) -> Table:
    """The results side by side."""
    proof = sieved.proof or {}
    counts = proof.get("layers", {})
    table = Table(
        title=f"{MODEL_NAME}, one request",
        caption="One run of each: the times vary. Blocks differ in size, so compare MiB: a prompt"
        " is read into a full cache, and what is not needed is given back before the answer. One"
        " request alone gains memory; a batch of them also gains speed (docs/benchmarks.md).",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("")
    table.add_column("full", overflow="fold")
    table.add_column(f"sieved ({proof.get('policy', '?')})", overflow="fold")

    def row(name: str, left: object, right: object) -> None:
        table.add_row(name, Text(str(left)), Text(str(right)))

    row("prompt tokens", f"{full.answer.prompt_tokens:,}", f"{sieved.answer.prompt_tokens:,}")
    # Stock vLLM keeps every token in every layer; the sieved numbers are the worker's count.
    kept = [
        f"{tokens:,} in {counts.get(name, '?')} {name} layers"
        for name, tokens in proof.get("stored_tokens", {}).items()
    ]
    stored = f"{full.answer.prompt_tokens:,} in {layers} layers"
    row("stored of them", stored, "\n".join(kept))
    row("KV blocks, peak", *(_blocks(m, before=True) for m in (full, sieved)))
    row("KV blocks, answering", *(_blocks(m, before=False) for m in (full, sieved)))
    row("blocks given back", "-", f"{proof.get('blocks_freed', 0):,}")
    row("KV memory, peak", *(_mib(m.memory.bytes_before) for m in (full, sieved)))
    row("KV memory, answering", *(_mib(m.memory.bytes_after) for m in (full, sieved)))
    row("time to first token", *(f"{m.answer.ttft_s:.2f} s" for m in (full, sieved)))
    row("time per output token", *(f"{m.answer.tpot_s * 1e3:.0f} ms" for m in (full, sieved)))
    row("answer", full.answer.text, sieved.answer.text)
    row("correct", *("yes" if is_correct(m.answer.text) else "NO" for m in (full, sieved)))
    return table


def _blocks(one: Measured, *, before: bool) -> str:
    """Blocks held, with the size of one: the two servers' blocks differ in it."""
    memory = one.memory
    held = memory.blocks_before if before else memory.blocks_after
    return f"{held:,} of {memory.bytes_per_block / 2**10:,.0f} KiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
