"""Which policy keeps most, at equal storage: an offline search on a real model.

python benchmarks/policy_search.py --kind aware --grid aware --lengths 1024,2048 --count 11
python benchmarks/policy_search.py --held-out --text FILE --candidate 'mine=pool=max:21'
python benchmarks/policy_search.py --tables --json FILE      # what the journal has, nothing is run

A case is read once with full KV. Then every candidate chooses what each layer and KV head keeps,
and one teacher-forced pass over what follows tells whether the answer would have been said
(every token of it is the most probable one) and how far the distributions are from full KV's.
"aware": the question is part of what is compressed. "agnostic": it comes afterwards.

Storage is counted over all layers: a share of 25% with 3 of 30 layers full leaves 16.7% to the
others. Candidates store whole blocks of 32 tokens, as kvsieve does, and never more than their
share; the published methods store to the token.

Candidates are chosen on cases of `kvsieve eval`'s tasks, and compared on held-out ones: other
sentences, another haystack (--text), other lengths and seeds. Needles that full KV misses are
counted and asked of no candidate.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from search import candidates as grids
from search.model import SearchModel
from search.prompts import Case, held_out_cases, plain_text, search_cases, text_cases
from search.run import note_run, read_journal, read_runs, run_cases
from search.summary import compare, full_kv, results_of, summarize, table

from kvsieve.demo.model import ensure_demo_model
from kvsieve.evals.passages import DOCUMENT
from kvsieve.evals.prompts import PromptMaker
from kvsieve.reports.provenance import provenance


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; exits with a message if it makes no sense."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", metavar="FOLDER", help="model (default: the demonstration's)")
    parser.add_argument("--kind", choices=("aware", "agnostic"), default="aware")
    parser.add_argument("--held-out", action="store_true", help="held-out cases; needs --text")
    parser.add_argument(
        "--grid",
        choices=sorted(grids.GRIDS),
        action="append",
        help="candidates; may be repeated",
    )
    parser.add_argument(
        "--candidate",
        action="append",
        default=[],
        metavar="NAME=SPEC",
        help="one more candidate",
    )
    parser.add_argument("--cases", choices=("needles", "text"), default="needles")
    parser.add_argument("--lengths", default="1024", help="tokens, comma-separated; default: 1024")
    parser.add_argument("--count", type=int, default=11, help="cases of a task; default: 11")
    parser.add_argument("--seed", type=int, default=5, help="default: 5")
    parser.add_argument(
        "--open",
        action="store_true",
        help="the answer's first words are no part of the prompt",
    )
    parser.add_argument("--chat", action="store_true", help="wrap needles in the chat template")
    parser.add_argument("--shares", default="0.25,0.125", help="default: 0.25,0.125")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="real text (default: the package's, short)",
    )
    parser.add_argument(
        "--journal",
        type=Path,
        default=Path("build/policy-search.jsonl"),
        metavar="FILE",
    )
    parser.add_argument("--passes", type=Path, metavar="FOLDER", help="keep full passes here")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no case after that")
    parser.add_argument("--tables", action="store_true", help="only show what the journal has")
    parser.add_argument(
        "--against",
        action="append",
        metavar="PEER",
        help="compare the finalists with these, paired",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write summary and provenance")
    arguments = parser.parse_args(argv)
    if arguments.held_out and not arguments.text and not arguments.tables:
        parser.error("--held-out needs a text that the search has not seen: --text FILE")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked, then show the journal."""
    arguments = parse_arguments(argv)
    console = Console(width=180)
    birth = provenance(seed=arguments.seed)
    model = arguments.model or str(ensure_demo_model(console))
    split = f"{'held-out' if arguments.held_out else 'search'}/{arguments.kind}"
    if not arguments.tables:
        torch.set_num_threads(1)
        note_run(
            arguments.journal,
            {key: birth[key] for key in ("date", "argv", "commit", "source_sha256", "machine")},
        )
        _run(arguments, model, split)
    records = read_journal(arguments.journal)
    summary = {}
    for name in sorted({record["split"] for record in records}):
        summary[name] = _summary(records, name, arguments.against or [])
        console.print(table(summary[name]["candidates"], name))
        console.print(f"full KV: {summary[name]['full']}")
        for comparison in summary[name]["compared"]:
            console.print(comparison)
    if arguments.json:
        specs = {name: spec for grid in grids.GRIDS.values() for name, spec in grid.items()}
        page = {
            "provenance": birth,
            "model": Path(model).name,
            "runs": read_runs(arguments.journal),
            "specs": specs,
            "splits": summary,
        }
        arguments.json.write_text(json.dumps(page, separators=(",", ":")) + "\n")
    return 0


def _run(arguments: argparse.Namespace, model: str, split: str) -> None:
    chosen: dict[str, str] = {}
    for grid in arguments.grid or ():
        chosen |= grids.GRIDS[grid]
    chosen |= dict(text.split("=", 1) for text in arguments.candidate)
    run_cases(
        SearchModel(model),
        _cases(arguments, PromptMaker(model, arguments.chat)),
        grids.parsed(chosen or grids.PEERS),
        [float(share) for share in arguments.shares.split(",")],
        arguments.journal,
        split=split,
        kept_passes=arguments.passes,
        until=time.monotonic() + 60 * arguments.minutes,
    )


def _cases(arguments: argparse.Namespace, maker: PromptMaker) -> list[Case]:
    text = plain_text(arguments.text or DOCUMENT)
    asked = "question" if arguments.open else "prefix"
    common: dict[str, Any] = {
        "lengths": [int(length) for length in arguments.lengths.split(",")],
        "count": arguments.count,
        "seed": arguments.seed,
        "when": "context" if arguments.kind == "agnostic" else asked,
    }
    if arguments.cases == "text":
        return list(text_cases(maker, text, **common))
    if arguments.held_out:
        return list(held_out_cases(maker, text, **common))
    return list(search_cases(maker, **common))


def _summary(records: list[dict[str, Any]], split: str, peers: Sequence[str]) -> dict[str, Any]:
    results = results_of(records, split)
    cases = sorted({record["case"] for record in records if record["split"] == split})
    compared = [
        comparison
        for share in sorted({share for _, share in results}, reverse=True)
        for peer in peers
        for name in sorted({*grids.FINAL_AWARE, *grids.FINAL_AGNOSTIC} - {peer})
        if (comparison := compare(results, name, peer, share))
    ]
    return {
        "cases": len(cases),
        "cases_sha256": hashlib.sha256("\n".join(cases).encode()).hexdigest()[:16],
        "full": full_kv(records, split),
        "candidates": summarize(results),
        "compared": compared,
    }


if __name__ == "__main__":
    raise SystemExit(main())
