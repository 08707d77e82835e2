"""From records to what the page and the documentation show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import numpy as np

from kvsieve.evals.statistics import mean as mean_with_interval
from kvsieve.evals.statistics import paired_difference
from selection.choice import Chosen, choose, peak_layer, read_trace, rescaled, settled_layer
from selection.plan import ALONE, FULL, Plan, fixed_name

Records = Sequence[Mapping[str, Any]]

ALL = "all tasks"


def chosen_parameters(records: Records, plan: Plan) -> dict[str, Chosen]:
    """ASL's parameters by budget, from the calibration's prompts; {} if they are not there yet.

    The first judged layer is the peak of the variance over all budgets: it belongs to the model.
    """
    found = {
        budget: [
            read_trace(record["relative_variance"])
            for record in _of(records, split="calibration", method=ALONE, budget=budget)
        ]
        for budget in plan.budgets
    }
    if not all(found.values()):
        return {}
    first = peak_layer([trace for traces in found.values() for trace in traces])
    return {
        budget: choose(traces, first, plan.target_layer, plan.max_layer)
        for budget, traces in found.items()
    }


def summarize(records: Records, plan: Plan, chosen: Mapping[str, Chosen]) -> dict[str, Any]:
    """Everything that is shown, as JSON values, by budget where it has one."""
    results = _of(records, split="results")
    budgets = {}
    for budget in plan.budgets:
        part = [*_of(results, method=FULL), *_of(results, budget=budget)]
        first = chosen[budget].first_layer if budget in chosen else min(plan.fixed_layers)
        # What a variance is does not depend on the parameters that a split was used for.
        judged = _of(records, method=ALONE, budget=budget)
        budgets[budget] = {
            "chosen": vars(chosen[budget]) if budget in chosen else None,
            "variance": {
                task: variance_curve(_of(judged, task=task), first)
                for task in plan.tasks
                if _of(judged, task=task)
            },
            "layers": layers_by_task(part, plan.tasks),
            "rows": [
                row(part, task, method)
                for task in (*plan.tasks, ALL)
                for method in _methods(part)
                if task == ALL or _of(part, task=task, method=method)
            ],
            "compared": compare(part, plan.fixed_layers),
            "predicted": _predicted(part, chosen.get(budget), plan.max_layer),
        }
    return {"budgets": budgets}


def variance_curve(records: Records, first_layer: int) -> dict[str, Any]:
    """Rank variance by layer over that at the first judged one: median and quartiles of prompts."""
    traces = []
    for record in records:
        trace = read_trace(record["relative_variance"])
        scale = trace[first_layer]
        traces.append({layer: value / scale for layer, value in trace.items()})
    layers = sorted(traces[0])
    values = np.array([[trace[layer] for layer in layers] for trace in traces])
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), axis=0).round(4).tolist()
    return {"n": len(values), "layers": layers, "median": middle, "low": low, "high": high}


def layers_by_task(records: Records, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Where ASL pruned the prompts of each task, and why."""
    found = {}
    for task in tasks:
        part = _of(records, task=task, method="asl")
        if part:
            layers = sorted(record["layer"] for record in part)
            found[task] = {
                "layers": layers,
                "mean": round(mean(layers), 2),
                "reasons": dict(Counter(record["reason"] for record in part)),
            }
    return found


def row(records: Records, task: str, method: str) -> dict[str, Any]:
    """Score and cost of a method on a task, or on all of them."""
    part = _of(records, method=method) if task == ALL else _of(records, task=task, method=method)
    score = mean_with_interval([record["score"] for record in part])
    return {
        "task": task,
        "method": method,
        "n": len(part),
        "score": round(score.value, 4),
        "low": round(score.low, 4),
        "high": round(score.high, 4),
        "computed_share": round(mean(record["computed_share"] for record in part), 4),
        "kept_share": round(
            mean(record["kept_tokens"] / record["prompt_tokens"] for record in part), 4
        ),
    }


def compare(records: Records, fixed_layers: Sequence[int]) -> list[dict[str, Any]]:
    """ASL less each fixed layer, prompt by prompt, on the prompts that both have."""
    ours = {record["item"]: record for record in _of(records, method="asl")}
    found = []
    for layer in sorted(fixed_layers):
        theirs = {record["item"]: record for record in _of(records, method=fixed_name(layer))}
        both = sorted(ours.keys() & theirs.keys())
        if not both:
            continue
        score = paired_difference(
            [ours[item]["score"] for item in both], [theirs[item]["score"] for item in both]
        )
        share = mean(ours[item]["computed_share"] - theirs[item]["computed_share"] for item in both)
        found.append(
            {
                "against": fixed_name(layer),
                "n": len(both),
                "score": round(score.value, 4),
                "low": round(score.low, 4),
                "high": round(score.high, 4),
                "won": sum(ours[item]["score"] > theirs[item]["score"] for item in both),
                "lost": sum(ours[item]["score"] < theirs[item]["score"] for item in both),
                "computed_share": round(share, 4),
            }
        )
    return found


def _predicted(records: Records, chosen: Chosen | None, max_layer: int) -> dict[str, int] | None:
    """Prompts that ASL pruned where the judging engine's trace says."""
    if chosen is None:
        return None
    traces = {
        record["item"]: rescaled(read_trace(record["relative_variance"]), chosen.first_layer)
        for record in _of(records, method=ALONE)
    }
    pruned = [record for record in _of(records, method="asl") if record["item"] in traces]
    as_said = [
        record["layer"] == settled_layer(traces[record["item"]], chosen.threshold, max_layer)[0]
        for record in pruned
    ]
    return {"n": len(pruned), "same": sum(as_said)}


def _methods(records: Records) -> list[str]:
    """Names of the methods there are: full KV first, then alone, fixed layers, ASL, others."""

    def place(method: str) -> tuple[int, int, str]:
        name, _, layer = method.partition("@")
        order = (FULL, ALONE, "fixed", "asl")
        at = order.index(name) if name in order else len(order)
        return at, int(layer or 0), name

    return sorted({record["method"] for record in records}, key=place)


def _of(records: Records, **wanted: str) -> list[Mapping[str, Any]]:
    return [record for record in records if all(record[key] == one for key, one in wanted.items())]
