"""Layer plans and the grouping that vLLM makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve import BudgetRule, ConfigError
from kvsieve.core.plan import (
    MAX_DEFAULT_GROUPS,
    default_full_count,
    group_layers,
    make_plan,
    request_cost,
)


@pytest.mark.parametrize(
    ("full", "sieved", "groups", "padding"),
    # Seen on vLLM 0.32 unless marked: 3 of 30, 4 of 30, 3 of 32, 4 of 32, 8 of 80, 0 of 30.
    [(3, 27, 10, 0), (4, 26, 8, 2), (3, 29, 11, 1), (4, 28, 8, 0), (8, 72, 10, 0), (0, 30, 1, 0)],
)
def test_grouping_follows_vllm(full: int, sieved: int, groups: int, padding: int) -> None:
    grouping = group_layers(full, sieved)

    assert (grouping.num_groups, grouping.padding_layers) == (groups, padding)


@pytest.mark.parametrize(
    ("layers", "expected"), [(1, 0), (2, 1), (24, 3), (28, 4), (30, 3), (32, 4), (40, 4), (80, 8)]
)
def test_the_default_divides_the_layers(layers: int, expected: int) -> None:
    count = default_full_count(layers)

    assert count == expected
    assert not count or layers % count == 0


@given(st.integers(2, 200), st.integers(0, 200))
def test_the_default_bounds_the_groups(layers: int, untouched: int) -> None:
    count = default_full_count(layers, untouched)

    assert 0 <= count < layers
    if count:
        assert group_layers(count, layers - count, untouched).num_groups <= MAX_DEFAULT_GROUPS


def test_layers_are_named_or_counted() -> None:
    layers = tuple(range(6))

    assert make_plan(layers, (), 2).full == (0, 1)
    assert make_plan(layers, (), (1, 5)).full == (1, 5)
    assert make_plan(layers, (), (1, 5)).sieved == (0, 2, 3, 4)
    assert make_plan((2, 5), (0, 1, 3, 4), 1).full == (2,)


@pytest.mark.parametrize(
    ("sievable", "full_layers", "words"),
    [
        ((), None, "no full-attention layer"),
        ((0, 1), 2, "not one layer"),
        ((0, 1), 9, "not one layer"),
        ((0, 1), (0, 7), r"layers \[7\]"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(
    sievable: tuple[int, ...], full_layers: object, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(sievable, (), full_layers)


def test_the_cost_of_a_request() -> None:
    plan = make_plan(tuple(range(30)), (), 3)
    rule = BudgetRule(tokens=256)
    full = request_cost(plan, None, 2991, 0, 32, page_bytes=10)
    sieved = request_cost(plan, rule, 2991, 0, 32, page_bytes=10)

    # 94 blocks of prompt; 85 of them lie before the start at 2720.
    assert (full.blocks, full.bytes) == (94, 94 * 30 * 10)
    assert (sieved.blocks, sieved.bytes) == (94 + 9 * 9, (94 + 9 * 9) * 3 * 10)
    assert request_cost(plan, rule, 200, 0, 32, 10).bytes == 7 * 30 * 10
