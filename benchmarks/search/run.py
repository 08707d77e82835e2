"""Every candidate on every case, appended to a journal that a later run goes on from."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from search.model import Captured, FullPass, SearchModel
from search.prompts import Case
from search.scores import Features, counts, gather, kept
from search.spec import Spec

BATCH_TOKENS = 256
"""Tokens of one continuation pass, over all its candidates."""


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Records of cases that are there already."""
    return [record for record in _lines(path) if "split" in record]


def read_runs(path: Path) -> list[dict[str, Any]]:
    """What was run, oldest first."""
    return [record["run"] for record in _lines(path) if "run" in record]


def note_run(path: Path, run: Mapping[str, Any]) -> None:
    """Note in the journal what is about to run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.write(json.dumps({"run": run}) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_cases(
    model: SearchModel,
    cases: Iterable[Case],
    candidates: Mapping[str, Spec],
    shares: Sequence[float],
    journal: Path,
    *,
    split: str,
    kept_passes: Path | None = None,
    until: float | None = None,
) -> None:
    """Judge every candidate at every share on every case.

    Args:
        model: The model.
        cases: What to read.
        candidates: By name. A name always means the same spec in one journal.
        shares: Of all the tokens of all layers, how many may be stored.
        journal: JSON lines; what it has already is not done again.
        split: "search/aware" and the like, for the records.
        kept_passes: Folder that keeps full passes, for a later run with other candidates.
        until: `time.monotonic()` after which no new case is begun.
    """
    done = {
        (record["split"], record["case"], record["candidate"], record["share"])
        for record in read_journal(journal)
    }
    begun = time.monotonic()
    for number, case in enumerate(cases):
        if until is not None and time.monotonic() > until:
            print(f"out of time after {number} cases", file=sys.stderr)
            return
        wanted = [
            (name, share)
            for share in shares
            for name in candidates
            if (split, case.case_id, name, share) not in done
        ]
        skip = (split, case.case_id, "full", 1.0) in done
        if not wanted or (skip and (split, case.case_id, "missed", 1.0) in done):
            continue
        captured = _full_pass(model, case, kept_passes)
        records = _judge(model, case, captured, candidates, wanted)
        if skip:
            records = [record for record in records if record["share"] < 1]
        with journal.open("a") as out:
            for record in records:
                out.write(json.dumps({"split": split, **record}) + "\n")
        if number % 10 == 0:
            spent = time.monotonic() - begun
            print(f"{split} {case.case_id} {spent:.0f} s", file=sys.stderr, flush=True)


def _full_pass(model: SearchModel, case: Case, folder: Path | None) -> Captured:
    if folder is None:
        return model.full_pass(case.ids, case.judged_from).until(case.cut)
    path = folder / f"{case.sha256[:24]}.pt"
    if path.exists():
        return FullPass(**torch.load(path)).until(case.cut)
    found = model.full_pass(case.ids, case.judged_from)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(vars(found), path)
    return found.until(case.cut)


def _judge(
    model: SearchModel,
    case: Case,
    captured: Captured,
    candidates: Mapping[str, Spec],
    wanted: Sequence[tuple[str, float]],
) -> list[dict[str, Any]]:
    # The token at the cut is predicted by the full pass, whatever is kept.
    skipped = int(case.judged_from == case.cut)
    truth = torch.tensor(case.ids[case.judged_from :])
    full = captured.logits
    right = full.argmax(dim=-1) == truth
    base = {"case": case.case_id, "task": case.task, "length": case.cut}
    records: list[dict[str, Any]] = [
        {
            **base,
            "candidate": "full",
            "share": 1.0,
            "hit": int(right.all()),
            "accuracy": round(float(right[skipped:].float().mean()), 4),
        }
    ]
    if case.task.startswith("niah") and not bool(right.all()):
        return [*records, {**base, "candidate": "missed", "share": 1.0}]
    truth, full = truth[skipped:], full[skipped:]
    reference = full.log_softmax(dim=-1)
    features = Features(model, captured)
    ids = case.ids[case.cut : -1]
    size = max(1, BATCH_TOKENS // len(ids))
    todo = []
    for name, share in wanted:
        stored = counts(candidates[name], model.num_layers, case.cut, share)
        if stored:
            todo.append((name, share, stored))
        else:
            records.append({**base, "candidate": name, "share": share, "stored": None})
    for start in range(0, len(todo), size):
        batch = todo[start : start + size]
        caches = [
            gather(captured, kept(features, candidates[name], stored)) for name, _, stored in batch
        ]
        logits = model.go_on(ids, case.cut, len(truth), caches)
        for (name, share, stored), found in zip(batch, logits, strict=True):
            log_probs = found.log_softmax(dim=-1)
            divergence = (reference.exp() * (reference - log_probs)).sum(dim=-1)
            best = found.argmax(dim=-1)
            records.append(
                {
                    **base,
                    "candidate": name,
                    "share": share,
                    "stored": round(sum(stored) / len(stored) / case.cut, 4),
                    "hit": int((best == truth).all()),
                    "accuracy": round(float((best == truth).float().mean()), 4),
                    "agree": round(float((best == full.argmax(dim=-1)).float().mean()), 4),
                    "kl": round(float(divergence.mean()), 5),
                }
            )
    return records
