"""What is protected: read, counted and given room."""

from __future__ import annotations

import functools
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvsieve.core.budget import BudgetRule, stored_tokens
from kvsieve.core.config import SieveConfig
from kvsieve.core.plan import LayerPlan
from kvsieve.core.protection import (
    MAX_SPANS,
    Protection,
    check_room,
    count_protected,
    known_spans,
    merged,
    parse_protection,
    smallest_stored,
)
from kvsieve.core.tiers import make_tiers
from kvsieve.core.treatment import treat

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


def positions(spans: Any) -> set[int]:
    return {position for begin, end in spans for position in range(begin, end)}


@pytest.mark.parametrize(
    ("wish", "spans", "roles"),
    [
        ("0:120", ((0, 120),), ()),
        (" 300:340 , 0 : 120 ", ((0, 120), (300, 340)), ()),
        ("0:9,5:20,20:21", ((0, 21),), ()),
        (["0:120", "300:340"], ((0, 120), (300, 340)), ()),
        ([[0, 120], (300, 340)], ((0, 120), (300, 340)), ()),
        ("system", (), ("system",)),
        ("system, developer,system", (), ("system", "developer")),
        (["system", "developer"], (), ("system", "developer")),
        ("system,500:600", ((500, 600),), ("system",)),
        ("none", (), ()),
        (" None ", (), ()),
        (["none"], (), ()),
    ],
)
def test_a_wish_is_read(wish: Any, spans: Any, roles: Any) -> None:
    assert parse_protection(wish) == Protection(spans, roles)


@pytest.mark.parametrize(
    "wish",
    [
        *["", " ", ",", "0:120,", "0-120", "120", "5:5", "9:3", "-1:5", "0:-5", "1.5:3", "0:1:2"],
        *[":", "0:", ":5", "0:12345678901", "none,system", "system none", "sys tem", "\x00", "é"],
        *["\u0661:\u0662", "a" * 33, "9" * 10_000, "x" * 10_000, "0:5;1:2"],
        *[[], [0, 120], [[0]], [[0, 1, 2]], [[0, 1.5]], [[True, 5]], [[0, 10**10]], [["0", "5"]]],
        *[[[-1, 5]], [[5, 5]], [None], {"roles": ["system"]}, 5, 0.5, True, b"0:5", [["system"]]],
    ],
)
def test_any_other_wish_is_refused_in_few_words(wish: Any) -> None:
    with pytest.raises(ValueError, match="kv_protect") as refusal:
        parse_protection(wish)
    assert len(str(refusal.value)) < 500


def test_the_number_of_spans_is_limited() -> None:
    spans = [f"{3 * index}:{3 * index + 1}" for index in range(MAX_SPANS + 1)]

    assert len(parse_protection(spans[:-1]).spans) == MAX_SPANS
    for wish in (spans, ",".join(spans)):
        with pytest.raises(ValueError, match=f"has {MAX_SPANS + 1} spans, and may have"):
            parse_protection(wish)


@given(
    st.recursive(
        st.one_of(st.integers(), st.floats(), st.text(), st.none(), st.booleans()),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=6,
    )
)
def test_whatever_is_wished_for_is_read_or_refused(wish: Any) -> None:
    try:
        protection = parse_protection(wish)
    except ValueError as error:
        protection, refusal = Protection(), str(error)
    else:
        refusal = "kv_protect"
    assert "kv_protect" in refusal and len(refusal) < 500
    assert all(0 <= begin < end < 10**10 for begin, end in protection.spans)


def test_roles_and_positions_beyond_the_prompt_reach_no_engine() -> None:
    assert known_spans(None, 10) == ()
    assert known_spans("none", 10) == ()
    assert known_spans([[0, 10]], 10) == ((0, 10),)
    with pytest.raises(ValueError, match="8:11 leaves the prompt, which has 10 tokens"):
        known_spans("0:2,8:11", 10)
    with pytest.raises(ValueError, match="role 'system'"):
        known_spans("system", 10)


@given(SPANS)
def test_a_union_holds_the_same_positions_in_order(spans: list[tuple[int, int]]) -> None:
    union = merged(spans)

    assert positions(union) == positions(spans)
    assert all(begin < end for begin, end in union)
    # A position lies between neighbours, or they would be one.
    assert all(a[1] < b[0] for a, b in pairwise(union))


@given(SPANS, st.integers(0, 80), st.integers(0, 80), st.integers(60, 90))
def test_each_protected_position_counts_once(
    spans: list[tuple[int, int]], sinks: int, recent: int, prompt_tokens: int
) -> None:
    always = positions(spans)
    always |= {p for p in range(prompt_tokens) if p < sinks or p >= prompt_tokens - recent}

    assert count_protected(prompt_tokens, merged(spans), sinks, recent) == len(always)


@given(st.integers(1, 900), st.integers(1, 900), st.integers(1, 900), st.sampled_from([16, 32]))
def test_there_is_room_or_the_least_budget_is_named(
    prompt_tokens: int, num_protected: int, budget: int, block_size: int
) -> None:
    num_protected = min(num_protected, prompt_tokens)

    def stored(kv_budget: int | None) -> int:
        return stored_tokens(prompt_tokens, kv_budget or budget, block_size)

    try:
        check_room(prompt_tokens, num_protected, stored)
    except ValueError as error:
        assert num_protected > stored(None)
        sentence = str(error)
    else:
        assert num_protected <= stored(None)
        return
    least = next(b for b in range(1, prompt_tokens + 1) if stored(b) >= num_protected)
    assert f"{num_protected} of the prompt's {prompt_tokens} tokens" in sentence
    assert f"stores {stored(None)} " in sentence
    assert f"raise kv_budget to at least {least}," in sentence


def test_what_to_do_without_room_depends_on_who_decided() -> None:
    def stored(kv_budget: int | None) -> int:
        return kv_budget or 100

    with pytest.raises(ValueError, match=r"kv_budget to at least 300, or protect fewer tokens$"):
        check_room(1000, 300, stored, max_budget=300)
    with pytest.raises(ValueError, match="max_budget of 299 is below the 300 needed"):
        check_room(1000, 300, stored, max_budget=299)
    with pytest.raises(ValueError, match=r"^this server protects messages of system.*'none'"):
        check_room(1000, 300, stored, operators_roles=("system",))
    check_room(1000, 300, lambda kv_budget: 2000)


def test_no_budget_is_named_where_none_is_enough() -> None:
    with pytest.raises(ValueError, match=r"protect fewer tokens \(no kv_budget is enough\)$"):
        check_room(1000, 300, lambda kv_budget: 299, max_budget=2000)


@given(
    layer_budgets=st.sampled_from(
        ["uniform", "pyramid", {"0-3": 390, "4-9": 160}, {"0-3": "50%", "4-9": "3%"}]
    ),
    mean=st.sampled_from([{}, {"budget": 300}, {"budget": "10%"}, {"budget": "60%"}]),
    bounds=st.sampled_from([{}, {"min_budget": 150}, {"max_budget": 400}, {"max_budget": 900}]),
    wanted=st.none() | st.integers(150, 2000) | st.sampled_from(["10%", "50%"]),
    prompt_tokens=st.integers(1, 5000),
    num_protected=st.integers(1, 5000),
    block_size=st.sampled_from([16, 32]),
)
def test_a_request_that_follows_the_advice_has_room(
    layer_budgets: Any,
    mean: dict[str, Any],
    bounds: dict[str, int],
    wanted: Any,
    prompt_tokens: int,
    num_protected: int,
    block_size: int,
) -> None:
    assume(mean or isinstance(layer_budgets, dict))
    assume(not isinstance(wanted, int) or wanted <= bounds.get("max_budget", wanted))
    config = SieveConfig.parse({"layer_budgets": layer_budgets, **mean, **bounds})
    num_protected = min(num_protected, prompt_tokens)

    def check(kv_budget: Any) -> None:
        own = treat("sieve", config, kv_budget, block_size).budget
        check_room(
            prompt_tokens,
            num_protected,
            functools.partial(smallest_stored, config, own, prompt_tokens, block_size),
            max_budget=config.max_budget,
        )

    try:
        check(wanted)
    except ValueError as error:
        sentence = str(error)
    else:
        return
    if advice := re.search("raise kv_budget to at least ([0-9]+)", sentence):
        check(int(advice[1]))
    else:
        assert "protect fewer tokens (the operator's max_budget" in sentence


LAYER_BUDGETS: list[dict[str, Any]] = [
    {"budget": 256},
    {"budget": "10%"},
    {"budget": 256, "layer_budgets": "pyramid"},
    {"layer_budgets": {"2-5": 200, "6-13": "20%"}},
    {"budget": 300, "layer_budgets": {"2-5": 200, "6-13": 600}},
]


@pytest.mark.parametrize("settings", LAYER_BUDGETS)
@pytest.mark.parametrize("requested", [None, 150, 700])
@pytest.mark.parametrize("prompt_tokens", [60, 400, 3000])
def test_no_tier_stores_less_than_the_smallest(
    settings: dict[str, Any], requested: int | None, prompt_tokens: int
) -> None:
    config = SieveConfig(**settings)
    rule = None if requested is None else BudgetRule(tokens=requested)
    tiers = make_tiers(config, LayerPlan((0, 1), tuple(range(2, 14))), 32)
    of_tiers = [
        stored_tokens(prompt_tokens, tier.rule.tokens_for(prompt_tokens, rule), 32)
        for tier in tiers
    ]

    smallest = smallest_stored(config, rule, prompt_tokens, 32)

    if config.layer_budgets == "pyramid":
        assert smallest <= min(of_tiers)
    else:
        assert smallest == min(of_tiers)
    assert smallest_stored(config, None, prompt_tokens, 32, requested) == smallest
