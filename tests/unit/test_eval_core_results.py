"""From records to results, to the page, and to two evaluations side by side."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.core.errors import ConfigError
from kvsieve.evals.compare import (
    compare_results,
    comparison_page,
    comparison_table,
    load_results,
    verdict,
)
from kvsieve.evals.report import distribution_table, page, result_table, summary, task_table
from kvsieve.evals.results import EvalResults, Interval, TaskResult, recommend
from tests.unit.eval_parts import answers, results_of

ONES, HALF, NONE = [1.0] * 30, [1.0, 0.0] * 15, [0.0] * 30


def niah(policy: str = "snapkv", **budgets: list[float]) -> list[Any]:
    scores = {"full": ONES} | {f"{name[1:]}%": found for name, found in budgets.items()}
    return answers("niah", scores, policy=policy)


def of(results: EvalResults, task: str, setting: str) -> TaskResult:
    (found,) = [one for one in results.of(task) if one.setting == setting]
    return found


def test_full_kv_counts_once_with_two_policies() -> None:
    records = niah(s50=ONES) + answers(
        "niah", {"full": [0.0, *ONES[1:]], "50%": HALF}, policy="random"
    )
    found = results_of(records)
    assert [one.setting for one in found.of("niah")] == ["full", "snapkv 50%", "random 50%"]
    assert of(found, "all", "full").score.count == 30
    # One of the two servers answered one question otherwise, and each policy is judged by its own.
    assert (found.full_answers, found.disagreeing) == (30, 1)
    assert of(found, "niah", "random 50%").difference.value == pytest.approx((15 - 29) / 30)
    assert "29 of 30 answers with full KV were the same" in summary(found)[-1]


def test_full_kv_agrees_with_itself_by_definition() -> None:
    found = results_of(answers("fidelity", {"full": HALF, "25%": [0.9] * 30}, forced=True))
    for task in ("fidelity", "all"):
        assert of(found, task, "full").score.value == 1.0
    assert of(found, "fidelity", "full").score.low == 1.0
    sieved = of(found, "fidelity", "snapkv 25%")
    assert sieved.score.value == pytest.approx(0.9)
    assert sieved.difference.value == pytest.approx(-0.1)
    assert sieved.perplexity_ratio.value == pytest.approx(math.e)
    assert sieved.kl.value == pytest.approx(0.1 * sum(range(1, 31)) / 30)
    assert sieved.kl.low <= sieved.kl.value <= sieved.kl.high
    assert len(distribution_table(found.tasks).rows) == 1


def test_probabilities_beyond_all_floats_have_results() -> None:
    records = answers("recall", {"full": HALF, "25%": NONE}, forced=True)
    records = [record.model_copy(update={"nll": 9999.0, "kl": 9999.0}) for record in records]
    assert math.isfinite(of(results_of(records), "recall", "snapkv 25%").kl.value)


def test_a_task_that_full_kv_cannot_do_is_left_out_of_all() -> None:
    records = niah(s50=ONES) + answers("kv", {"full": NONE, "50%": NONE})
    found = results_of(records, tolerance=0.2)
    assert found.beyond_the_model == ["kv"]
    assert of(found, "all", "snapkv 50%").score.count == 30
    said = " ".join(summary(found))
    assert "not clearly above the floor on kv" in said and "Take snapkv 50%" in said


def test_a_floor_is_heeded() -> None:
    records = niah(s50=ONES) + answers("mmlu", {"full": [1.0, *[0.0] * 3] * 8, "50%": [0.0] * 32})
    assert results_of(records).beyond_the_model == []
    found = results_of(records, floors={"mmlu": 0.25, "other": 0.1})
    assert found.beyond_the_model == ["mmlu"] and found.floors == {"mmlu": 0.25}


def test_recall_is_above_what_is_guessed_without_having_read() -> None:
    guessed = answers("fidelity", {"full": [0.3, 0.4] * 15, "25%": [0.3, 0.4] * 15}, forced=True)
    weak = answers("recall", {"full": [0.3, 0.4] * 15, "25%": [0.3, 0.4] * 15}, forced=True)
    able = answers("recall", {"full": [0.9, 0.95] * 15, "25%": [0.3, 0.4] * 15}, forced=True)
    assert results_of(guessed + weak).beyond_the_model == ["recall"]
    found = results_of(guessed + able)
    assert found.beyond_the_model == []
    assert found.floors["recall"] == pytest.approx(0.35)
    rows = {row[0]: row[2] for row in task_table(found).rows}
    assert rows == {"fidelity": None, "recall": "35%"}
    assert "recall" not in results_of(able).floors


def test_nothing_is_said_where_no_task_can_be_done() -> None:
    found = results_of(answers("kv", {"full": NONE, "50%": NONE}))
    assert found.recommended is None and found.of("all") == []
    assert "No task is left to judge a setting by." in summary(found)
    assert "<svg" in page(found)


def result(setting: str, low: float, kv_share: float, sieved_share: float = 1.0) -> TaskResult:
    interval = Interval(value=0.0, low=low, high=0.1, count=9)
    full = setting == "full"
    return TaskResult(
        task="all",
        setting=setting,
        policy="snapkv",
        kv_budget=setting,
        score=interval,
        difference=None if full else interval,
        prompt_tokens=100,
        kv_share=kv_share,
        sieved_share=sieved_share,
    )


def test_the_least_memory_within_the_tolerance_is_taken() -> None:
    some = [result("full", 0, 1), result("a", -0.05, 0.5), result("b", -0.05, 0.3)]
    assert recommend([*some, result("c", -0.051, 0.1)], 0.05) == "b"
    assert recommend(some[:1], 0.05) is None
    assert recommend([result("idle", 0.0, 1.0, sieved_share=0)], 1.0) is None


@given(
    st.lists(
        st.tuples(st.floats(-1, 0.1), st.floats(0.01, 1), st.sampled_from([0.0, 0.5, 1.0])),
        max_size=6,
    ),
    st.floats(0, 1),
)
def test_no_setting_within_the_tolerance_holds_less(
    drawn: list[tuple[float, float, float]], tolerance: float
) -> None:
    made = [result(str(index), *facts) for index, facts in enumerate(drawn)]
    fitting = [one for one in made if one.difference.low >= -tolerance and one.sieved_share > 0]
    taken = recommend(made, tolerance)
    assert (taken is None) == (not fitting)
    if taken is not None:
        (chosen,) = [one for one in made if one.setting == taken]
        assert chosen in fitting and chosen.kv_share == min(one.kv_share for one in fitting)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12))
def test_intervals_hold_their_means(pairs: list[tuple[float, float]]) -> None:
    full, sieved = map(list, zip(*pairs, strict=True))
    found = results_of(answers("niah", {"full": full, "25%": sieved}))
    for one in found.tasks:
        for interval in (one.score, one.difference):
            if interval is not None:
                assert interval.low <= interval.value <= interval.high
                assert interval.count == len(pairs)
        assert one.score.low >= 0 and one.score.high <= 1


def test_the_summary_says_what_a_mean_hides() -> None:
    records = niah(s50=ONES)
    for name in "abcdefgh":
        records += answers(name, {"full": ONES, "50%": ONES})
    records += answers("second", {"full": ONES, "50%": [1.0] * 24 + [0.0] * 6})
    found = results_of(records)
    assert found.recommended == "snapkv 50%"
    assert any("largest loss is on second: -20.0 points" in one for one in summary(found))
    half_idle = [
        record.model_copy(update={"sieved": record.sieved and index % 2 == 0})
        for index, record in enumerate(niah(s50=ONES))
    ]
    said = summary(results_of(half_idle, tolerance=0.2))
    assert any("50% of its requests fit the budget" in one for one in said)


def test_an_idle_setting_is_named() -> None:
    records = [record.model_copy(update={"sieved": False}) for record in niah(s50=ONES)]
    said = " ".join(summary(results_of(records)))
    assert said.startswith("snapkv 50% sieved nothing")


def test_cut_prompts_are_counted_once() -> None:
    tags = [{"truncated": 1}] * 30
    records = answers("longbench/x", {"full": ONES, "50%": ONES}, tags=tags)
    records += answers("longbench/x", {"full": ONES, "50%": ONES}, tags=tags, policy="random")
    assert any(one.startswith("30 prompts from files lost") for one in summary(results_of(records)))


DEPTHS = [{"length": 100, "depth": depth / 29} for depth in range(30)]
ODD = {
    "one task": niah(s50=HALF),
    "one example": answers("niah", {"full": [1.0], "50%": [0.0]}),
    "depths": answers("niah", {"full": ONES, "50%": HALF}, tags=DEPTHS),
    "one depth": answers("niah", {"full": ONES, "50%": HALF}, tags=[{"depth": 0.5}] * 30),
    "forced": answers("fidelity", {"full": ONES, "50%": HALF}, forced=True),
    "from a file": answers("longbench/gov_report_with_a_long_name", {"full": HALF, "50%": NONE}),
    "ten budgets": niah(**{f"s{share}": HALF for share in range(5, 55, 5)}),
    "tokens": answers("niah", {"full": ONES, 256: HALF, 1024: ONES}),
    "two policies": niah(s50=HALF) + niah("streaming_llm", s50=HALF),
    "nothing doable": answers("kv", {"full": NONE, "50%": NONE}),
    "markup": answers("<b>&[red]</b>", {"full": ONES, "50%": HALF}),
    "many tasks": [
        record
        for index in range(20)
        for record in answers(f"t{index}", {"full": ONES, "50%": HALF})
    ],
}


@pytest.mark.parametrize("case", ODD)
def test_every_page_renders(case: str) -> None:
    found = results_of(ODD[case])
    shown = page(found)
    assert "<svg" in shown and "Evaluation of m" in shown and "<b>&[" not in shown
    assert not re.search(r"(src|href)=.https?:", shown)
    assert "nan" not in re.sub(r"<[^>]*>", " ", shown).lower().split()
    assert ("Where in the prompt" in shown) == (case == "depths")
    assert len(result_table(found.tasks).rows) == len(found.tasks)
    assert json.loads(found.model_dump_json())["kind"] == "eval"


def test_a_long_name_of_a_model_is_no_title() -> None:
    run = {"model": "/very" * 40 + "/Model-7B", "prompts": {"chat": True}}
    shown = page(results_of(niah(s50=HALF), run=run))
    assert "<title>Evaluation of Model-7B</title>" in shown and "chat template" in shown


def save(path: Path, results: EvalResults) -> Path:
    path.write_text(results.model_dump_json())
    return path


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    found = results_of(niah(s50=HALF))
    assert load_results(save(tmp_path / "a.json", found)) == found


def test_a_file_against_itself_has_not_changed() -> None:
    found = results_of(niah(s50=HALF) + niah("random", s50=NONE))
    comparison = compare_results(found, found)
    assert verdict(comparison) == ["Nothing changed beyond what chance explains."]
    assert comparison.differing == [] and comparison.only_in_one == []
    assert all(change.change.value == 0 for change in comparison.changes)
    assert "Two evaluations of m" in comparison_page(comparison, found, found)


def test_a_change_is_told_from_chance() -> None:
    before, after = results_of(niah(s50=ONES, s25=HALF)), results_of(niah(s50=NONE, s25=HALF))
    said = verdict(compare_results(before, after))
    assert said == ["Clearly worse: niah with snapkv 50%, all with snapkv 50%."]
    assert "Clearly better" in verdict(compare_results(after, before))[0]


def test_what_differs_between_runs_is_said() -> None:
    before = results_of(niah(s50=HALF))
    run = {"model": "/models/n", "prompts": {"chat": True, "template": "t" * 500}, "seed": 1}
    birth = {"commit": "cd", "machine": {"cpu": "B"}, "versions": {"torch": "3"}}
    after = results_of(niah(s50=HALF), run=run, provenance=birth)
    differing = compare_results(before, after).differing
    for part in (
        "model: /models/m before, /models/n after",
        "prompts chat: false before, true after",
        "seed: 0 before, 1 after",
        "commit: ab before, cd after",
        "machine cpu: A before, B after",
        "versions torch: 2 before, 3 after",
    ):
        assert part in differing
    assert all(len(one) < 300 for one in differing)


def test_examples_that_only_share_a_name_are_not_paired() -> None:
    before = results_of(niah(s50=ONES))
    other_seed = [
        record.model_copy(update={"item_sha256": f"{index}"})
        for index, record in enumerate(niah(s50=NONE))
    ]
    comparison = compare_results(before, results_of(other_seed))
    assert all(change.change is None for change in comparison.changes)
    assert "no example in common" in verdict(comparison)[0]
    assert {row[-1] for row in comparison_table(comparison).rows} == {0}


def test_two_runs_that_overlap_in_part_are_compared_where_they_do() -> None:
    before = results_of(niah(s50=ONES) + answers("kv", {"full": ONES, "50%": ONES}))
    after = results_of(answers("niah", {"full": ONES[:10], "50%": NONE[:10], "25%": NONE[:10]}))
    comparison = compare_results(before, after)
    changed = {(c.task, c.setting): c.change for c in comparison.changes}
    assert changed["niah", "snapkv 50%"].count == changed["all", "snapkv 50%"].count == 10
    assert changed["niah", "snapkv 50%"].value == -1
    assert "kv, full" in comparison.only_in_one and "niah, snapkv 25%" in comparison.only_in_one
    assert "Only one of the two has" in comparison_page(comparison, before, after)
    with pytest.raises(ConfigError, match="no task and setting in common"):
        compare_results(results_of(answers("kv", {"full": NONE, 64: NONE})), after)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "cannot read"),
        (b"\xff\xfe", "cannot read"),
        (b"[" * 100_000, "cannot read"),
        (b"[]", "is no result of kvsieve eval"),
        (b'{"kind": "kvsieve bench", "schema_version": 1}', "(kind: 'kvsieve bench')"),
        (b'{"kind": "eval", "schema_version": 0}', "has layout 0, and this kvsieve reads 1"),
        (b'{"kind": "eval"}', "has layout None"),
        (b'{"kind": "eval", "schema_version": 1, "run": {}}', "is damaged: provenance"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_results(tmp_path / "a.json")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            load_results(path)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    content = json.loads(results_of(niah(s50=HALF)).model_dump_json())
    del content["records"][3]["score"]
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"is damaged: records\.3\.score"):
        load_results(tmp_path / "a.json")


def test_a_run_without_its_facts_can_be_compared() -> None:
    bare = results_of(niah(s50=HALF), run={}, provenance={"machine": "unknown"})
    comparison = compare_results(bare, bare)
    assert "Two evaluations of a model" in comparison_page(comparison, bare, bare)


def test_of_many_comparisons_some_differ_by_chance() -> None:
    many = {f"s{share}": ONES for share in range(5, 100, 5)}
    before, after = results_of(niah(**many)), results_of(niah(**{**many, "s50": NONE}))
    worse, by_chance = verdict(compare_results(before, after))
    assert worse.startswith("Clearly worse") and "Of 40 comparisons about 2" in by_chance
