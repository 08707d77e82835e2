"""The sieve's counters: nothing is lost or counted twice between scheduler and /metrics."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve.core.counters import GAUGES, SieveCounters
from kvsieve.core.pruning import PrunedPrompt

shares = st.lists(st.floats(0, 1), min_size=3, max_size=3)
pruned = st.builds(
    PrunedPrompt,
    method=st.sampled_from(["asl", "fastkv"]),
    layer=st.none() | st.integers(0, 40),
    reason=st.sampled_from(["fixed", "threshold", "never"]),
    kept_tokens=st.integers(1, 100),
    computed_share=st.floats(0, 2),
    # What can be added in any order.
    seconds_saved=st.integers(0, 40).map(lambda quarters: quarters / 4),
)
rows = st.fixed_dictionaries(
    {
        "prompt_tokens": st.integers(100, 10_000),
        "stored_tokens": st.integers(1, 100),
        "num_layers": st.integers(1, 100),
        "seconds": st.floats(0, 10),
        "mode": st.sampled_from(["sieve", "shadow"]),
        "mass_lost": shares,
        "layers": st.just([3, 4, 7]),
        "pruned": st.none() | pruned,
    }
)
events = st.one_of(
    st.tuples(st.just("request"), st.sampled_from(["sieve", "shadow", "full"])),
    st.tuples(st.just("row"), rows),
    st.tuples(st.just("freed"), st.integers(0, 50)),
    st.tuples(
        st.just("held"), st.fixed_dictionaries({"full": st.integers(0), "sieved": st.integers(0)})
    ),
    st.tuples(st.just("mode"), st.sampled_from(["sieve", "shadow", "full"])),
    st.tuples(st.just("take"), st.none()),
)


def count(counters: SieveCounters, kind: str, value: Any) -> None:
    match kind:
        case "request":
            counters.add_request(value)
        case "row":
            counters.add_row(**value)
        case "freed":
            counters.freed_blocks += value
        case "held":
            counters.blocks_held = value
        case "mode":
            counters.mode = value


def as_sent(handed_over: dict[str, Any]) -> SieveCounters:
    return SieveCounters.from_dict(json.loads(json.dumps(handed_over)))


def row(**changes: Any) -> dict[str, Any]:
    whole = {"prompt_tokens": 1000, "stored_tokens": 300, "num_layers": 2, "seconds": 0.5}
    return {**whole, "mode": "sieve", "mass_lost": (0.1, 0.3), "layers": (1, 2), **changes}


@given(st.lists(events, max_size=40))
def test_what_is_handed_over_adds_up_to_what_was_counted(happened: list[tuple[str, Any]]) -> None:
    counted, sent, received = SieveCounters(), SieveCounters(), SieveCounters()
    for kind, value in [*happened, ("take", None)]:
        count(counted, kind, value)
        count(sent, kind, value)
        if kind == "take" and (handed_over := sent.take()) is not None:
            received.merge(as_sent(handed_over))

    assert received.compaction_seconds == pytest.approx(counted.compaction_seconds)
    received.compaction_seconds = counted.compaction_seconds
    assert received == counted
    assert sent.take() is None


@given(st.lists(rows, min_size=1))
def test_prompt_is_kept_and_dropped(sieved: list[dict[str, Any]]) -> None:
    counters = SieveCounters()
    for each in sieved:
        counters.add_row(**each)

    assert counters.prompt_tokens == counters.kept_tokens + counters.dropped_tokens
    assert counters.sieved_requests == sum(each["mode"] == "sieve" for each in sieved)
    assert sum(map(len, counters.attention_mass_lost.values())) == len(sieved)


def test_a_row_counts_its_prompt_once_and_every_layer() -> None:
    counters = SieveCounters()
    counters.add_row(**row())

    assert counters.take() == {
        "sieved_requests": 1,
        "prompt_tokens": 1000,
        "kept_tokens": 300,
        "dropped_tokens": 700,
        "compactions": 2,
        "compaction_seconds": {"sieve": 0.5},
        "attention_mass_lost": {"sieve": [0.2]},
        "layer_mass_lost": {"sieve": {"1": [0.1], "2": [0.3]}},
    }


def test_a_shadow_row_drops_nothing() -> None:
    counters = SieveCounters()
    counters.add_row(**row(mode="shadow"))

    assert counters.take() == {
        "shadow_dropped_tokens": 700,
        "compaction_seconds": {"shadow": 0.5},
        "attention_mass_lost": {"shadow": [0.2]},
        "layer_mass_lost": {"shadow": {"1": [0.1], "2": [0.3]}},
    }


def test_a_request_that_is_sieved_again_is_counted_once_and_its_work_twice() -> None:
    once, twice = SieveCounters(), SieveCounters()
    once.add_row(**row())
    twice.add_row(**row())
    twice.add_row(**row(), again=True)

    expected = {**once.as_dict(), "compactions": 4, "compaction_seconds": {"sieve": 1.0}}
    assert twice.as_dict() == expected


def a_pruned_row(layer: int | None, reason: str) -> dict[str, Any]:
    return row(pruned=PrunedPrompt("asl", layer, reason, 300, 0.5, seconds_saved=0.25))


def test_pruned_prompts_are_counted_by_method_and_reason() -> None:
    counters = SieveCounters()
    counters.add_row(**a_pruned_row(12, "threshold"))
    counters.add_row(**a_pruned_row(14, "threshold"))
    counters.add_row(**a_pruned_row(None, "never"))
    counters.add_row(**a_pruned_row(14, "threshold"), again=True)
    taken = counters.take()

    assert taken["pruned_requests"] == {"asl/threshold": 2, "asl/never": 1}
    assert taken["prune_layers"] == {"asl": [12, 14]}
    assert taken["prune_seconds_saved"] == 0.75


def test_a_share_that_is_no_number_is_left_out() -> None:
    counters = SieveCounters()
    counters.add_row(**row(mass_lost=(math.nan, 0.3)))
    counters.add_row(**row(mass_lost=(math.nan, math.inf)))

    assert counters.attention_mass_lost == {"sieve": [0.3]}
    assert counters.layer_mass_lost == {"sieve": {"2": [0.3]}}


def test_a_row_without_shares_is_counted() -> None:
    counters = SieveCounters()
    counters.add_row(**row(mass_lost=(), layers=()))

    assert counters.sieved_requests == 1
    assert counters.attention_mass_lost == {}


def test_every_share_needs_its_layer() -> None:
    with pytest.raises(ValueError, match="zip"):
        SieveCounters().add_row(**row(layers=(1,)))


def test_a_gauge_is_handed_over_when_it_changes() -> None:
    counters = SieveCounters(blocks_held={"full": 0, "sieved": 0}, pool_blocks=0, mode="sieve")

    # Zero is a value, and the first hand-over tells it.
    assert counters.take() == {
        "blocks_held": {"full": 0, "sieved": 0},
        "pool_blocks": 0,
        "mode": "sieve",
    }
    assert counters.take() is None
    counters.blocks_held["sieved"] = 4
    assert counters.take() == {"blocks_held": {"full": 0, "sieved": 4}}
    counters.blocks_held = {"full": 0, "sieved": 4}
    assert counters.take() is None


def test_what_was_handed_over_is_not_counted_into() -> None:
    counters = SieveCounters(blocks_held={"full": 1})
    counters.add_request("sieve")
    counters.add_row(**row())
    taken = counters.take()
    before = json.dumps(taken)

    counters.add_request("sieve")
    counters.add_row(**row())
    counters.blocks_held["full"] = 2

    assert json.dumps(taken) == before


def test_merge_keeps_a_gauge_that_the_other_does_not_know() -> None:
    counters = SieveCounters(blocks_held={"full": 3}, pool_blocks=9, mode="shadow")

    counters.merge(SieveCounters())

    assert [getattr(counters, name) for name in GAUGES] == [{"full": 3}, 9, "shadow"]


def test_an_unknown_counter_is_named() -> None:
    with pytest.raises(TypeError, match="unknown counters: _handed_over, nonsense"):
        SieveCounters.from_dict({"nonsense": 1, "_handed_over": {}, "mode": "sieve"})
