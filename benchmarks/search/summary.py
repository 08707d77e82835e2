"""From a journal to means per candidate, paired differences, and a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table
from scipy.stats import binomtest

from kvsieve.evals.statistics import paired_difference

NEEDLES = ("niah", "niah_essay", "niah_multikey")
RESAMPLES = 9_999

Records = Iterable[Mapping[str, Any]]
Results = dict[tuple[str, float], dict[str, Mapping[str, Any]]]
"""By candidate and share, then by case."""


def results_of(records: Records, split: str) -> Results:
    """The judged records of a split."""
    found: Results = defaultdict(dict)
    for record in records:
        if record["split"] == split and record.get("stored") is not None:
            found[record["candidate"], record["share"]][record["case"]] = record
    return dict(found)


def full_kv(records: Records, split: str) -> dict[str, dict[str, int]]:
    """Right answers of full KV, of all cases: only those are asked of the candidates."""
    counts: dict[str, dict[str, int]] = {}
    for record in records:
        if record["split"] == split and record["candidate"] == "full":
            count = counts.setdefault(record["task"], {"right": 0, "of": 0})
            count["right"] += record["hit"]
            count["of"] += 1
    return counts


def summarize(results: Results) -> list[dict[str, Any]]:
    """One row per candidate and share: hits of needles, KL and agreement per task."""
    rows = []
    for (candidate, share), cases in results.items():
        row: dict[str, Any] = {"candidate": candidate, "share": share, "tasks": {}}
        tasks = sorted({record["task"] for record in cases.values()})
        for task in tasks:
            part = [record for record in cases.values() if record["task"] == task]
            row["tasks"][task] = {
                "n": len(part),
                "hits": sum(record["hit"] for record in part),
                "accuracy": _mean(part, "accuracy"),
                "agree": _mean(part, "agree"),
                "kl": _mean(part, "kl"),
                "stored": _mean(part, "stored"),
            }
        needles = [record for record in cases.values() if record["task"] in NEEDLES]
        row["hits"], row["n"] = sum(record["hit"] for record in needles), len(needles)
        row["accuracy"], row["kl"] = _mean(needles, "accuracy"), _mean(needles, "kl")
        rows.append(row)
    return rows


def compare(results: Results, first: str, second: str, share: float) -> dict[str, Any] | None:
    """Paired differences of two candidates on the cases that both have.

    Returns:
        Of needles the difference of hits with its 95% interval and the exact McNemar p, and of
        each kind of case the difference of KL with a bootstrap interval (negative: `first` is
        nearer to full KV); None if no case is shared.
    """
    ours, theirs = results.get((first, share), {}), results.get((second, share), {})
    both = sorted(set(ours) & set(theirs))
    if not both:
        return None
    pairs = [(ours[case], theirs[case]) for case in both]
    needles = [pair for pair in pairs if pair[0]["task"] in NEEDLES]
    found: dict[str, Any] = {"first": first, "second": second, "share": share}
    if needles:
        found["hits"] = _hits(needles)
    for task in ("needles", "text", "recall"):
        part = needles if task == "needles" else [p for p in pairs if p[0]["task"] == task]
        if part:
            found[f"kl_{task}"] = _difference([a["kl"] - b["kl"] for a, b in part])
    recall = [a["accuracy"] - b["accuracy"] for a, b in pairs if a["task"] == "recall"]
    if recall:
        found["recall"] = _difference(recall)
    return found


def _hits(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    ours, theirs = [p[0]["hit"] for p in pairs], [p[1]["hit"] for p in pairs]
    estimate = paired_difference(ours, theirs)
    won = sum(a > b for a, b in zip(ours, theirs, strict=True))
    lost = sum(a < b for a, b in zip(ours, theirs, strict=True))
    p = binomtest(won, won + lost).pvalue if won + lost else 1.0
    return {
        "n": len(pairs),
        "first": sum(ours),
        "second": sum(theirs),
        "difference": round(estimate.value, 4),
        "low": round(estimate.low, 4),
        "high": round(estimate.high, 4),
        "won": won,
        "lost": lost,
        "mcnemar_p": float(f"{p:.3g}"),
    }


def _difference(values: Sequence[float]) -> dict[str, Any]:
    """Mean with a 95% percentile bootstrap over cases."""
    array = np.asarray(values)
    rng = np.random.default_rng(0)
    means = array[rng.integers(0, len(array), (RESAMPLES, len(array)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return {
        "n": len(array),
        "difference": round(float(array.mean()), 5),
        "low": round(float(low), 5),
        "high": round(float(high), 5),
    }


def _mean(part: Sequence[Mapping[str, Any]], key: str) -> float | None:
    if not part:
        return None
    return round(sum(float(record[key]) for record in part) / len(part), 5)


def table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Candidates, best first by hits over all shares; per share hits, KL and recall."""
    shares = sorted({row["share"] for row in rows}, reverse=True)
    by_key = {(row["candidate"], row["share"]): row for row in rows}
    names = {row["candidate"] for row in rows}
    order = sorted(
        names,
        key=lambda name: (
            -sum(_rate(by_key.get((name, share))) for share in shares),
            name,
        ),
    )
    shown = Table(title=title)
    shown.add_column("candidate")
    for share in shares:
        for column in (f"{100 * share:g}%: hits", "KL", "text KL", "text same", "recall"):
            shown.add_column(column, justify="right")
    for name in order:
        cells = []
        for share in shares:
            row = by_key.get((name, share), {"tasks": {}, "n": 0})
            tasks = row["tasks"]
            cells += [
                f"{row['hits']}/{row['n']}" if row["n"] else "",
                _number(row.get("kl")),
                _number(tasks.get("text", {}).get("kl")),
                _number(tasks.get("text", {}).get("agree")),
                _number(tasks.get("recall", {}).get("accuracy")),
            ]
        shown.add_row(name, *cells)
    return shown


def _rate(row: Mapping[str, Any] | None) -> float:
    return row["hits"] / row["n"] if row and row["n"] else 0.0


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
