"""The benchmark of selection layers: parameters from traces, and what its summary says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selection.choice import choose, peak_layer, rescaled, settled_layer
from selection.engine import Journal, SelectionError
from selection.page import selection_page
from selection.plan import ALONE, FULL, Plan, asl_job, fixed_jobs
from selection.summary import ALL, chosen_parameters, summarize

from kvsieve.core.pruning import parse_prune
from kvsieve.evals.item import Item
from kvsieve.pruning import LayerChoice, PruneOptions, prune_settings

PLAN = Plan(
    tasks=("easy", "hard"),
    length=512,
    count=2,
    calibration_count=2,
    budgets=("10%",),
    fixed_layers=(11, 18),
    others=("gemfilter@12",),
    target_layer=18,
    max_layer=26,
    seed=0,
)
LAYERS = range(7, 29)

variances = st.lists(
    st.floats(min_value=0.01, max_value=100.0), min_size=len(LAYERS), max_size=len(LAYERS)
)


def falling(settles: int) -> dict[int, float]:
    """A trace that rises to layer 14 and falls below a half of that at `settles`."""
    return {layer: 0.5 if layer < 14 else 1.0 if layer < settles else 0.4 for layer in LAYERS} | {
        14: 1.0
    }


def record(split: str, method: str, task: str, index: int, **values: Any) -> dict[str, Any]:
    return {
        "split": split,
        "method": method,
        "budget": "full" if method == FULL else "10%",
        "task": task,
        "item": f"{task}/{index}",
        "prompt_tokens": 500,
        "kept_tokens": 50,
        "computed_share": 1.0,
        "score": 1.0,
        "layer": None,
        "reason": None,
        "relative_variance": None,
        **values,
    }


def records() -> list[dict[str, Any]]:
    """Ranks of easy prompts settle at 16 and of hard ones at 20; at 11 hard ones are missed."""
    found = []
    for task, layer in (("easy", 16), ("hard", 20)):
        trace = {str(number): value for number, value in falling(layer).items()}
        for index in range(2):
            found += [
                record("calibration", ALONE, task, index, relative_variance=trace, score=None),
                record("results", ALONE, task, index, relative_variance=trace),
                record("results", FULL, task, index),
                record(
                    *("results", "fixed@11", task, index),
                    layer=11,
                    computed_share=0.4,
                    score=float(task == "easy"),
                ),
                record("results", "fixed@18", task, index, layer=18, computed_share=0.64),
                record(
                    *("results", "asl", task, index),
                    layer=layer,
                    reason="threshold",
                    computed_share=0.57 if task == "easy" else 0.71,
                ),
            ]
    return found


@given(variances, st.floats(min_value=0, max_value=1), st.integers(16, 28))
def test_a_trace_tells_the_layer_that_the_engine_chooses(
    values: list[float], threshold: float, max_layer: int
) -> None:
    trace = rescaled(dict(zip(LAYERS, values, strict=True)), 14)
    prune = parse_prune("asl@14")
    assert prune is not None
    options = PruneOptions(threshold=threshold, max_layer=max_layer)
    choice = LayerChoice(prune_settings(prune, options, 30), 500, 50)

    for layer, value in trace.items():
        if not choice.is_decided:
            choice.judge(layer, value)

    layer, is_settled = settled_layer(trace, threshold, max_layer)
    assert (choice.layer, choice.reason) == (layer, "threshold" if is_settled else "deepest")


@given(st.lists(variances, min_size=1, max_size=4), st.integers(15, 26))
def test_no_other_threshold_comes_nearer_to_the_wanted_layer(
    rows: list[list[float]], target: int
) -> None:
    traces = [dict(zip(LAYERS, values, strict=True)) for values in rows]

    chosen = choose(traces, 14, target, 26)

    def mean_layer(threshold: float) -> float:
        layers = [settled_layer(rescaled(one, 14), threshold, 26)[0] for one in traces]
        return sum(layers) / len(layers)

    assert chosen.mean_layer == mean_layer(chosen.threshold)
    distances = [abs(mean_layer(step / 100) - target) for step in range(1, 101)]
    assert abs(chosen.mean_layer - target) == min(distances)


def test_the_first_judged_layer_is_the_peak_of_the_prompts_together() -> None:
    large = {7: 500.0, 8: 1000.0, 9: 900.0}
    small = {7: 0.1, 8: 0.2, 9: 1.0}

    # A prompt whose variances are large numbers does not outvote the other.
    assert peak_layer([large, small]) == 9


def test_parameters_come_from_calibration_prompts_alone() -> None:
    chosen = chosen_parameters(records(), PLAN)["10%"]

    assert chosen.first_layer == 14
    # Above 0.4 and not above 1, every prompt settles where its trace falls: 18 on average.
    assert chosen.threshold == pytest.approx(0.41)
    assert (chosen.mean_layer, chosen.settled) == (18.0, 1.0)
    results = [one for one in records() if one["split"] == "results"]
    assert chosen_parameters(results, PLAN) == {}


def test_the_summary_holds_asl_against_every_fixed_layer() -> None:
    found = summarize(records(), PLAN, chosen_parameters(records(), PLAN))["budgets"]["10%"]

    rows = {(row["task"], row["method"]): row for row in found["rows"]}
    assert rows["hard", "fixed@11"]["score"] == 0.0
    assert rows[ALL, "fixed@11"]["score"] == 0.5
    assert rows[ALL, FULL]["n"] == 4
    assert [one["against"] for one in found["compared"]] == ["fixed@11", "fixed@18"]
    first, same_cost = found["compared"]
    assert (first["won"], first["lost"], first["score"]) == (2, 0, 0.5)
    assert (same_cost["score"], same_cost["computed_share"]) == (0.0, 0.0)
    assert found["layers"]["easy"]["mean"] == 16
    assert found["predicted"] == {"n": 4, "same": 4}


@pytest.mark.parametrize("missing", [(), ("asl",), ("asl", "fixed@11", "fixed@18", FULL)])
def test_a_page_is_made_of_what_there_is(missing: tuple[str, ...]) -> None:
    part = [one for one in records() if one["method"] not in missing]

    page = selection_page(summarize(part, PLAN, {}), ["One."], {})

    assert "<svg" in page


def test_a_summary_of_nothing_is_empty() -> None:
    found = summarize([], PLAN, {})["budgets"]["10%"]

    assert found["rows"] == found["compared"] == []


def test_a_journal_knows_what_it_has_and_whose_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, {"seed": 1})
    journal.begin({"date": "today"})
    journal.add(records()[0])

    again = Journal(path, {"seed": 1})
    assert (again.records, again.runs) == ([records()[0]], [{"date": "today"}])
    with pytest.raises(SelectionError, match="of other settings"):
        Journal(path, {"seed": 2})


def test_a_journal_refuses_results_of_another_threshold(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", {})
    items = [Item(f"easy/{index}", "easy", (1, 2)) for index in range(2)]
    journal.add(record("results", "asl", "easy", 0, prune_options={"threshold": 0.5}))

    assert journal.lacks(asl_job("10%"), items, {"threshold": 0.5}) == items[1:]
    assert journal.lacks(asl_job("25%"), items, {"threshold": 0.4}) == items
    with pytest.raises(SelectionError, match="other tasks or budgets"):
        journal.lacks(asl_job("10%"), items, {"threshold": 0.4})


def test_the_layer_that_costs_as_much_as_asl_is_run_first() -> None:
    jobs = fixed_jobs(replace(PLAN, fixed_layers=(7, 18, 22)))

    assert [job.method for job in jobs] == [
        *("fixed@18", FULL, "fixed@22", "fixed@7", "gemfilter@12")
    ]
    assert jobs[0].request == {"kv_budget": "10%", "kv_prune": "fastkv@18"}


def test_an_experiment_knows_how_many_requests_it_has() -> None:
    # Per task: full KV, and for each budget calibration, budget alone, ASL, two layers, GemFilter.
    assert PLAN.num_requests == 2 * (2 + 2 + 5 * 2)
