"""Where prompts are pruned: ASL's layer by task, and its accuracy against fixed layers.

python benchmarks/selection_layer.py [--quick] [--json FILE] [--html FILE]
python benchmarks/selection_layer.py --minutes 0 --json FILE --html FILE   # what the journal has

ASL (arXiv 2601.07667) prunes a prompt at the layer where the ranks of its tokens have settled.
Three questions are asked on tasks of rising difficulty: does rank variance by layer differ between
tasks, where does ASL prune each prompt, and does that answer more than a fixed layer of equal cost?

An engine whose threshold is 0 judges every layer and prunes nothing: it gives the variances, and
the accuracy of the budget alone. First judged layer (the peak of the variance) and threshold are
taken from calibration prompts, which no result uses, and without a look at any answer: with that
threshold ASL prunes after --target-layer on average. Fixed layers score tokens as ASL does, so
that they differ from it in the layer alone.

Every request is noted in the journal, and a later run goes on from there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from selection import plan as plans
from selection.engine import Journal, SelectionError, run_jobs
from selection.page import selection_page
from selection.plan import Plan
from selection.summary import ALL, chosen_parameters, summarize

from kvsieve.demo.model import ensure_demo_model
from kvsieve.evals.item import Item
from kvsieve.evals.prompts import PromptMaker
from kvsieve.reports.files import check_report_files, write_report
from kvsieve.reports.provenance import provenance, source_hash

FULL = Plan(
    tasks=("niah", "niah_essay", "niah_multikey"),
    length=1024,
    count=8,
    calibration_count=4,
    budgets=("25%",),
    fixed_layers=(7, 11, 14, 18, 22),
    others=("gemfilter@12",),
    target_layer=18,
    max_layer=26,
    seed=11,
)
QUICK = replace(FULL, length=256, count=1, calibration_count=1, fixed_layers=(18,), others=())

RUN_KEYS = ("date", "argv", "commit", "uncommitted", "source_sha256", "versions", "machine")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; exits with a message if it makes no sense."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: proves that it works")
    parser.add_argument("--model", metavar="FOLDER", help="model (default: the demonstration's)")
    parser.add_argument("--tasks", help=f"comma-separated (default: {','.join(FULL.tasks)})")
    parser.add_argument("--count", type=int, help=f"prompts of a task (default: {FULL.count})")
    parser.add_argument("--budgets", help=f"comma-separated (default: {','.join(FULL.budgets)})")
    parser.add_argument("--seed", type=int, help=f"of the prompts (default: {FULL.seed})")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="default: in build/")
    parser.add_argument(
        "--minutes", type=float, default=600.0, help="start no engine after that; 0: run nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every record")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the journal lacks, then show what it has; returns the exit status."""
    arguments = parse_arguments(argv)
    check_report_files(arguments.html, arguments.json)
    # One thread: threads that wait at a barrier spin, and would be counted.
    os.environ["OMP_NUM_THREADS"] = "1"
    console = Console(width=120, highlight=False)
    plan = _plan(arguments)
    birth = provenance(seed=plan.seed)
    name = f"selection-layer{'-quick' if arguments.quick else ''}.jsonl"
    journal = Journal(arguments.journal or Path("build") / name, _settings(plan))
    model = arguments.model or str(ensure_demo_model(console))
    deadline = time.monotonic() + 60 * arguments.minutes
    if arguments.minutes > 0:
        journal.begin({key: birth[key] for key in RUN_KEYS})
        _run(plan, model, journal, deadline)
    chosen = chosen_parameters(journal.records, plan)
    summary = summarize(journal.records, plan, chosen)
    birth |= {
        "model": Path(model).name,
        "plan": asdict(plan),
        "complete": len(journal.records) == plan.num_requests,
        "source_changed_meanwhile": source_hash() != birth["source_sha256"],
    }
    sentences = in_words(summary)
    console.print("\n".join(sentences))
    data = {
        "provenance": birth,
        "runs": journal.runs,
        **summary,
        "records": journal.records,
    }
    write_report(
        arguments.html,
        arguments.json,
        page=selection_page(summary, sentences, birth) if arguments.html else "",
        data=data,
    )
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    plan = QUICK if arguments.quick else FULL
    changes: dict[str, Any] = {
        key: value for key in ("count", "seed") if (value := getattr(arguments, key)) is not None
    }
    for key in ("tasks", "budgets"):
        if given := getattr(arguments, key):
            changes[key] = tuple(given.split(","))
    return replace(plan, **changes)


def _settings(plan: Plan) -> dict[str, Any]:
    """What a journal's records depend on: methods, budgets and tasks may be added to them later."""
    # Depths of needles follow from the count, and the names of prompts from the depths.
    keys = ("length", "count", "calibration_count", "target_layer", "max_layer", "seed")
    return {key: getattr(plan, key) for key in keys}


def _run(plan: Plan, model: str, journal: Journal, deadline: float) -> None:
    """Every engine in turn, as long as there is time."""
    maker = PromptMaker(model, chat=False)
    results, calibration = plan.items(maker, "results"), plan.items(maker, "calibration")

    def serve(settings: dict[str, Any], *work: tuple[plans.Job, list[Item]]) -> None:
        if time.monotonic() < deadline:
            run_jobs(model, settings, plan.max_model_len, work, journal, _say)

    first, *_ = plan.budgets
    judging = plans.judging_settings(first)
    serve(
        judging,
        *((plans.judging_job("calibration", budget), calibration) for budget in plan.budgets),
    )
    for budget, chosen in chosen_parameters(journal.records, plan).items():
        settings = plans.asl_settings(budget, chosen.first_layer, chosen.threshold, plan.max_layer)
        serve(settings, (plans.asl_job(budget), results))
    serve(plans.fixed_settings(first), *((job, results) for job in plans.fixed_jobs(plan)))
    serve(judging, *((plans.judging_job("results", budget), results) for budget in plan.budgets))


def _say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def in_words(summary: dict[str, Any]) -> list[str]:
    """A few sentences per budget: parameters, layers by task, ASL against the fixed layers."""
    lines = []
    for budget, found in summary["budgets"].items():
        chosen = found["chosen"]
        if chosen:
            lines.append(
                f"{budget} kept: judged from layer {chosen['first_layer']} on, threshold"
                f" {chosen['threshold']:g}; on the calibration prompts that is layer"
                f" {chosen['mean_layer']:.1f} on average, and {100 * chosen['settled']:.0f}% of"
                " them settle."
            )
        if found["layers"]:
            lines.append(
                "ASL's mean layer: "
                + ", ".join(f"{task} {one['mean']:.1f}" for task, one in found["layers"].items())
                + "."
            )
        scores = [
            f"{row['method']} {100 * row['score']:.0f}% (work {100 * row['computed_share']:.0f}%)"
            for row in found["rows"]
            if row["task"] == ALL
        ]
        if scores:
            lines.append(f"Answered rightly, {budget} kept: {', '.join(scores)}.")
    return lines or ["The journal has no result yet."]


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except SelectionError as error:
        raise SystemExit(f"stopped: {error}") from None
