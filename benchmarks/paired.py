"""Compare kvsieve with stock vLLM in one run, by turns. See docs/benchmarks.md.

python benchmarks/paired.py [--quick] [--only decode,host] [--repeats N] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pairing import decode, host, overhead, policies, prune, scoring, throughput
from pairing.arm import BenchmarkError, Lab, prepare_environment
from pairing.progress import clocked
from pairing.tables import print_host, print_summary
from pairing.workload import FULL, POOLS, QUICK, Options, read_shape
from rich.console import Console

from kvsieve.reports.provenance import provenance, source_hash

# Measurements that share arms follow one another.
MEASUREMENTS = (
    "decode",
    "scoring",
    "policies",
    "overhead",
    "throughput",
    "prune",
    "prune-throughput",
    "host",
)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; exits with a message if it makes no sense."""
    parser = argparse.ArgumentParser(
        description="Compare kvsieve with stock vLLM, by turns, and report ratios.",
        epilog="What is measured and how: docs/benchmarks.md.",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: proves that it works")
    parser.add_argument(
        "--only",
        type=_names,
        default=MEASUREMENTS,
        metavar="NAMES",
        help=f"measurements, separated by commas: {', '.join(MEASUREMENTS)} (default: all)",
    )
    parser.add_argument(
        "--repeats", type=parse_positive, metavar="N", help="repeats of a measurement"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every raw figure to FILE")
    parser.add_argument("--model", metavar="FOLDER", help="model (default: the demonstration's)")
    parser.add_argument(
        "--budget", type=parse_positive, default=256, metavar="TOKENS", help="budget (default: 256)"
    )
    parser.add_argument(
        "--pool",
        choices=POOLS,
        help="with throughput: one pool only (default: both)",
    )
    parser.add_argument(
        "--policies",
        type=lambda text: tuple(text.split(",")),
        default=policies.DEFAULT_POLICIES,
        metavar="NAMES",
        help="with policies: whose costs to measure beside SnapKV, separated by commas",
    )
    parser.add_argument(
        "--calibration",
        type=lambda text: str(Path(text).resolve()),
        metavar="FILE",
        help="with prune: layers that `kvsieve calibrate` found (default: the authors', scaled)",
    )
    parser.add_argument(
        "--threads",
        type=parse_positive,
        default=1,
        metavar="N",
        help="threads of an arm (default: 1; with more, waiting counts as CPU time)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed (default: 0)")
    parser.add_argument(
        "--profile", action="store_true", help="with host: profile it, into the JSON file"
    )
    return parser.parse_args(argv)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in MEASUREMENTS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no measurement is called {unknown[0]!r}; there are {', '.join(MEASUREMENTS)}"
        )
    return tuple(name for name in MEASUREMENTS if name in names)


def parse_positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def resolve(arguments: argparse.Namespace, console: Console) -> Options:
    """The options that the measurements take."""
    sizes = QUICK if arguments.quick else FULL
    if arguments.repeats:
        sizes = dataclasses.replace(sizes, repeats=dict.fromkeys(sizes.repeats, arguments.repeats))
    if arguments.model:
        model = arguments.model
    else:
        from kvsieve.demo.model import ensure_demo_model

        model = str(ensure_demo_model(console))
    return Options(
        model=model,
        shape=read_shape(model),
        sizes=sizes,
        budget=arguments.budget,
        seed=arguments.seed,
        profile=arguments.profile,
        pools=(arguments.pool,) if arguments.pool else POOLS,
        policies=arguments.policies,
        calibration=arguments.calibration,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurements; returns the exit status."""
    arguments = parse_arguments(argv)
    progress = Console(stderr=True, highlight=False)
    began = time.monotonic()
    say = clocked(progress, began)

    prepare_environment(arguments.threads)
    options = resolve(arguments, progress)
    birth = {**provenance(seed=arguments.seed), "threads_per_arm": arguments.threads}
    scratch = Path(tempfile.mkdtemp(prefix="kvsieve-bench-"))
    say(f"logs of the arms: {scratch}")
    if (others := os.getloadavg()[0]) > 0.5:
        say(f"load average {others:.1f}: other processes are running; read ratios, not seconds")
    lab = Lab(scratch, say)
    measurements: dict[str, Callable[[], dict[str, Any]]] = {
        "decode": lambda: decode.measure(lab, options),
        "scoring": lambda: scoring.measure(lab, options),
        "policies": lambda: policies.measure(lab, options),
        "overhead": lambda: overhead.measure(lab, options),
        "throughput": lambda: throughput.measure(lab, options),
        "prune": lambda: prune.measure_ttft(lab, options),
        "prune-throughput": lambda: prune.measure_throughput(lab, options),
        "host": lambda: host.measure(lab, options, scratch),
    }
    results: dict[str, Any] = {}
    try:
        for name in arguments.only:
            results[name] = measurements[name]()
            _write(arguments.json, birth, options, results, lab)
    except BenchmarkError as error:
        say(f"stopped, and nothing is reported of this measurement: {error}")
        return 1
    finally:
        lab.close()
    birth["source_changed_meanwhile"] = source_hash() != birth["source_sha256"]
    birth["machine"]["load_average_after"] = os.getloadavg()
    _write(arguments.json, birth, options, results, lab)
    _report(Console(width=None if os.isatty(1) else 160), results, birth, arguments.quick)
    return 0


def _write(
    path: Path | None, birth: dict[str, Any], options: Options, results: dict[str, Any], lab: Lab
) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "provenance": birth,
        "options": dataclasses.asdict(options),
        "idle_cpu_share": lab.idle_shares,
        "results": results,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _report(console: Console, results: dict[str, Any], birth: dict[str, Any], quick: bool) -> None:
    for name, result in results.items():
        if name == "host":
            print_host(console, result)
        print_summary(console, name, result)
    console.print(
        f"{birth['date']}, commit {birth['commit'][:12]}"
        f"{' with uncommitted changes' if birth['uncommitted'] else ''},"
        f" {birth['machine']['cpu']}, {birth['threads_per_arm']} thread(s) per arm."
        " Ratios are sieved/stock unless a row says otherwise.",
        soft_wrap=True,
    )
    if birth["source_changed_meanwhile"]:
        console.print("The source changed while this ran: do not quote it.")
    if quick:
        console.print("--quick proves that the benchmark works; its sizes are too small to quote.")


if __name__ == "__main__":
    raise SystemExit(main())
