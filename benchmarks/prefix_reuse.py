"""What prefix caching saves with a sieve, against stock vLLM, by turns.

python benchmarks/prefix_reuse.py [--workload chat] [--repeats N] [--budget 256] [--json FILE]

Three engines, each in a process of its own and all with prefix caching on: stock, sieved, and
sieved with a budget that every prompt fits (the control). They take turns within a workload, in
alternating order. Measured are CPU seconds of the engine's process, the prompt tokens that vLLM
did not find in its cache, and the time to the first token (in CPU seconds too: an arm stands still
while another has its turn). Times to the first token are of requests that could hit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paired import parse_positive
from pairing import reuse
from pairing.arm import BenchmarkError, Lab, prepare_environment
from pairing.progress import clocked
from pairing.tables import print_summary
from pairing.workload import FULL, Options, read_shape
from rich.console import Console
from rich.table import Table

from kvsieve.reports.provenance import provenance, source_hash


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; exits with a message if it makes no sense."""
    parser = argparse.ArgumentParser(
        description="What prefix caching saves with a sieve, against stock vLLM, by turns.",
        epilog="chat: ten turns, 600 to 3,000 tokens. shared: 50 tails of a 2,000-token prefix,"
        " 8 at a time. resent: prompts just over the budget, again with other last tokens.",
    )
    parser.add_argument(
        "--workload",
        action="append",
        choices=tuple(reuse.WORKLOADS),
        help="a workload; may be repeated (default: all)",
    )
    parser.add_argument("--repeats", type=parse_positive, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--budget", type=parse_positive, default=256, metavar="TOKENS", help="default: 256"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every raw figure to FILE")
    parser.add_argument("--model", metavar="FOLDER", help="model (default: the demonstration's)")
    parser.add_argument("--threads", type=parse_positive, default=1, metavar="N", help="default: 1")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the gate")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the workloads; returns the exit status."""
    arguments = parse_arguments(argv)
    progress = Console(stderr=True, highlight=False)
    began = time.monotonic()
    say = clocked(progress, began)

    prepare_environment(arguments.threads)
    options = _options(arguments, progress)
    birth = {**provenance(seed=arguments.seed), "threads_per_arm": arguments.threads}
    scratch = Path(tempfile.mkdtemp(prefix="kvsieve-bench-"))
    say(f"logs of the arms: {scratch}")
    lab = Lab(scratch, say)
    results: dict[str, Any] = {}
    try:
        for workload in arguments.workload or reuse.WORKLOADS:
            results[workload] = reuse.measure(lab, options, workload, arguments.repeats)
    except BenchmarkError as error:
        say(f"stopped: {error}")
        return 1
    finally:
        lab.close()
    birth["source_changed_meanwhile"] = source_hash() != birth["source_sha256"]
    birth["machine"]["load_average_after"] = os.getloadavg()
    birth["wall_s"] = time.monotonic() - began
    if arguments.json:
        _write(arguments.json, birth, options, results, lab)
    console = Console(width=None if os.isatty(1) else 160)
    print_results(console, results)
    console.print(
        f"{birth['date']}, commit {birth['commit'][:12]}, {birth['machine']['cpu']},"
        f" {arguments.threads} thread(s) per arm, budget {arguments.budget},"
        f" {birth['wall_s']:.0f} s.",
        soft_wrap=True,
    )
    if birth["source_changed_meanwhile"]:
        console.print("The source changed while this ran: do not quote it.")
    return 0


def _options(arguments: argparse.Namespace, console: Console) -> Options:
    if arguments.model:
        model = arguments.model
    else:
        from kvsieve.demo.model import ensure_demo_model

        model = str(ensure_demo_model(console))
    return Options(
        model=model,
        shape=read_shape(model),
        sizes=FULL,
        budget=arguments.budget,
        seed=arguments.seed,
        profile=False,
    )


def _write(
    path: Path, birth: dict[str, Any], options: Options, results: dict[str, Any], lab: Lab
) -> None:
    content = {
        "provenance": birth,
        "options": {
            **{
                key: value
                for key, value in dataclasses.asdict(options).items()
                if key in ("shape", "budget", "seed")
            },
            "model": Path(options.model).name,
        },
        "idle_cpu_share": lab.idle_shares,
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def print_results(console: Console, results: dict[str, Any]) -> None:
    """Per workload: what each arm did, the chat's turns, and ratios with their spread."""
    for workload, result in results.items():
        _print_totals(console, workload, result)
        if workload == "chat":
            _print_turns(console, result)
        print_summary(console, f"{workload}, ratios to stock", result)


def _print_totals(console: Console, workload: str, result: dict[str, Any]) -> None:
    table = Table(title=f"{workload}, medians of the repeats", title_justify="left")
    columns = (
        ("requests", "requests", "{:.0f}"),
        ("prompt tokens", "prompt_tokens", "{:,.0f}"),
        ("cached", "cached_tokens", "{:,.0f}"),
        ("computed", "computed_tokens", "{:,.0f}"),
        ("scheduled", "scheduled_prefill_tokens", "{:,.0f}"),
        ("CPU s", "cpu_s", "{:.1f}"),
        ("prefill CPU s", "prefill_cpu_s", "{:.1f}"),
        ("TTFT p50, CPU s", "ttft_p50_cpu_s", "{:.2f}"),
        ("preempted", "preempted", "{:.0f}"),
    )
    table.add_column("arm")
    for title, _, _ in columns:
        table.add_column(title, justify="right")
    for arm in result["arms"]:
        totals = [repeat["totals"][arm] for repeat in result["repeats"]]
        table.add_row(
            arm,
            *(
                form.format(statistics.median(total[key] for total in totals))
                for _, key, form in columns
            ),
        )
    console.print(table)


def _print_turns(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="chat, turn by turn (first repeat)", title_justify="left")
    table.add_column("turn")
    arms = list(result["arms"])
    for column in ("prompt", "computed", "TTFT, CPU s"):
        for arm in arms:
            table.add_column(f"{column}\n{arm}", justify="right")
    turns = result["repeats"][0]["turns"]
    for number in range(len(turns[arms[0]])):
        row = [turns[arm][number] for arm in arms]
        table.add_row(
            row[0]["label"],
            *(f"{turn['prompt_tokens']:,}" for turn in row),
            *(f"{turn['computed_tokens']:,}" for turn in row),
            *(f"{turn['ttft_cpu_s'][0]:.2f}" for turn in row),
        )
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
