"""Results: ratios, tables, sentences, the page, notes, and two of them side by side."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from kvsieve.bench.compare import compare, load_result
from kvsieve.bench.notes import notes_on
from kvsieve.bench.page import render, thin
from kvsieve.bench.run import describe_model
from kvsieve.bench.schema import BenchResult, PoolSample
from kvsieve.bench.screen import print_result
from kvsieve.bench.sentences import sentences
from kvsieve.bench.tables import answer, ratio_text
from kvsieve.core.errors import KvsieveError
from tests.unit.bench_results import SIEVED, STOCK, record, result, run


def shown(of: BenchResult) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    print_result(console, of)
    return console.export_text()


def test_a_ratio_is_of_a_pair_and_its_median_over_pairs() -> None:
    ratios = result(ttfts=(0.25, 0.5, 1.0)).workloads[0].ratios["budget-128"]["ttft_p50"]
    assert (ratios.median, ratios.min, ratios.max) == pytest.approx((1.0, 0.5, 2.0))
    assert ratios.repeats == 3 and ratios.low is None
    five = result(ttfts=(0.4, 0.45, 0.5, 0.55, 0.6)).workloads[0].ratios["budget-128"]["ttft_p50"]
    assert five.low is not None and five.low < five.median < (five.high or 0)


def test_what_was_not_measured_has_no_ratio() -> None:
    ratios = result().workloads[0].ratios["budget-128"]
    assert "goodput_per_s" not in ratios and "preemptions" not in ratios
    assert set(ratios) >= {"output_tokens_per_s", "tpot_p50", "kv_peak_mib", "running_max"}
    # The 99th percentile of a few requests is the slowest of them.
    assert "tpot_p99" not in ratios


def test_the_screen_shows_ratios_values_proof_and_sweep() -> None:
    text = shown(result())
    for part in (
        "mixed, arm/stock: median (min .. max) of the ratios of 3 repeats",
        "TTFT p50",
        "1.00 (0.50 .. 1.50)",
        "output tokens per CPU second",
        "what the responses say the sieve did",
        "34.0%",
        "not reached even at 1",
        "at least 2 (the limit)",
        "2 too long",
    ):
        assert part in text, part
    assert "[0." in shown(result(ttfts=(0.4, 0.45, 0.5, 0.55, 0.6)))


def test_the_sentences_say_what_it_saves() -> None:
    one, two = sentences(result())
    assert one.startswith(
        "mixed, budget-128 as a multiple of stock (3 repeats, median (min .. max)): "
    )
    assert "median TTFT 1.00 (0.50 .. 1.50)" in one
    assert "stock not reached even at 1; budget-128 at least 2 (the limit)" in two


def test_one_repeat_has_no_spread() -> None:
    made = result(ttfts=(0.25,))
    assert ratio_text(made.workloads[0].ratios["budget-128"]["ttft_p50"]) == "0.50"
    assert "ratio of one pair" in shown(made) and "(one repeat)" in sentences(made)[0]


def test_an_unfinished_sweep_is_no_answer() -> None:
    sweep = result().workloads[0].sweep
    assert sweep is not None
    assert answer(sweep.model_copy(update={"highest": {}}), "stock") == "not finished"


def test_the_page_holds_its_figures() -> None:
    page = render(result())
    assert page.count("<svg") == 4
    for part in ("Throughput", "Time to first token", "KV blocks over time", "clients at once"):
        assert part in page
    assert not re.search(r"(src|href)=.https?:", page)


def test_a_page_needs_no_samples_and_no_pool_size() -> None:
    made = result()
    repeats = [
        repeat.model_copy(
            update={
                "arms": {
                    name: arm.model_copy(update={"samples": ()})
                    for name, arm in repeat.arms.items()
                }
            }
        )
        for repeat in made.workloads[0].repeats
    ]
    workload = made.workloads[0].model_copy(update={"repeats": tuple(repeats), "sweep": None})
    arms = tuple(arm.model_copy(update={"pool_bytes": None}) for arm in made.arms)
    changed = made.model_copy(update={"workloads": (workload,), "arms": arms})
    assert "% of the pool" in render(changed)
    assert any("over before /metrics was looked at" in note for note in notes_on(changed))


def test_thinning_keeps_the_peak() -> None:
    samples = [PoolSample(at_s=n, kv_usage=n == 777, running=1, waiting=0) for n in range(1000)]
    kept = thin(samples, 150)
    assert len(kept) <= 150 and max(each.kv_usage for each in kept) == 1
    assert [each.at_s for each in kept] == sorted(each.at_s for each in kept)
    assert thin(samples[:10], 150) == samples[:10]


def test_notes_say_what_figures_do_not() -> None:
    made = result()
    assert notes_on(made) == ()
    arms = (record(STOCK).model_copy(update={"block_size": 128, "pool_bytes": 1}), record(SIEVED))
    busy = run(STOCK, others_cpu_s=1.0)
    late = busy.model_copy(
        update={"requests": (busy.requests[0].model_copy(update={"late_s": 0.4}),)}
    )
    proof = run(SIEVED).sieve
    assert proof is not None
    some = run(SIEVED).model_copy(update={"sieve": proof.model_copy(update={"sieved": 3})})
    none = run(SIEVED).model_copy(
        update={"sieve": proof.model_copy(update={"sieved": 0, "expected": 0})}
    )
    for sieved, said in (
        (some, "the ratios understate the sieve"),
        (none, "nothing that it saves"),
    ):
        repeat = (
            made.workloads[0]
            .repeats[0]
            .model_copy(update={"arms": {"stock": late, "budget-128": sieved}})
        )
        workload = made.workloads[0].model_copy(update={"repeats": (repeat,)})
        text = "\n".join(notes_on(made.model_copy(update={"arms": arms, "workloads": (workload,)})))
        for part in ("different block sizes", "differ in size", "took up to 22%", "0.4 s", said):
            assert part in text


def write(path: Path, of: BenchResult) -> Path:
    path.write_text(of.model_dump_json())
    return path


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    made = result()
    assert load_result(write(tmp_path / "a.json", made)) == made


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is no result of `kvsieve bench --json`"),
        ('{"kind": "kvsieve bench", "schema_version": 2}', "has schema version 2"),
        ('{"kind": "kvsieve bench", "schema_version": 1}', "is damaged: complete"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(KvsieveError, match=re.escape(said)):
        load_result(tmp_path / "a.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvsieveError, match="cannot read"):
        load_result(tmp_path / "a.json")


OTHER_MACHINE = {"machine": {"cpu": "B", "cores": 2}}


def test_two_runs_on_one_machine_stand_side_by_side_and_are_not_divided() -> None:
    a, b = result(), result(ttfts=(0.5, 0.5, 0.5), flags=("--dtype", "bfloat16"))
    found = compare(a, b)
    assert not found.refused
    assert any(said.startswith("flags of vLLM: ") for said in found.differences)
    assert [table.columns[0] for table in found.tables] == ["ratio to stock", "measured", "arm"]
    row = next(row for row in found.tables[0].rows if row[0] == "TTFT p50")
    assert row[1:] == ("1.00 (0.50 .. 1.50)", "1.00 (1.00 .. 1.00)")


def test_seconds_of_two_machines_are_not_set_side_by_side() -> None:
    found = compare(result(), result(provenance=OTHER_MACHINE))
    assert "machine, cpu: A in A, B in B" in found.differences
    assert any("machines differ" in said for said in found.refused)
    assert [table.columns[0] for table in found.tables] == ["ratio to stock", "arm"]


def load(**changes: object) -> object:
    return result().load.model_copy(update=changes)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (result(complete=False), "B is incomplete (the stock server was killed by signal 9)"),
        (
            result(model=result().model.model_copy(update={"config_sha256": "cd"})),
            "the model is /models/m in A and /models/m in B",
        ),
        (result(resource="gpu"), "A was measured on a CPU and B on a GPU"),
        (result(load=load(concurrency=4)), "concurrency 2 in A and 4 in B"),
        (result(workload="long-prompt"), "mixed is in one of them only"),
    ],
)
def test_what_cannot_be_compared_is_refused(other: BenchResult, said: str) -> None:
    with pytest.raises(KvsieveError, match=re.escape(said)):
        compare(result(), other)


def test_other_lengths_are_refused() -> None:
    made = result()
    changed = made.workloads[0].model_copy(update={"prompt_tokens": (1, 2, 3)})
    with pytest.raises(KvsieveError, match="mixed has other lengths"):
        compare(made, made.model_copy(update={"workloads": (changed,)}))


def test_a_model_is_known_by_its_configuration(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": 8}))
    a, b = (describe_model(str(tmp_path / name)) for name in "ab")
    assert a.config_sha256 == b.config_sha256 and a.name != b.name
    assert describe_model("org/name").config_sha256 is None
    other = result(model=b)
    assert compare(result(model=a), other).tables


def test_an_incomplete_result_has_no_ratio() -> None:
    made = result(complete=False)
    assert not made.workloads[0].ratios
    assert all(not repeat.ratios for repeat in made.workloads[0].repeats)
    assert len(made.workloads[0].repeats) == 3
