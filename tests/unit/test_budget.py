"""Budgets and the start of the kept region, as properties over all inputs."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvsieve.core.budget import BudgetRule, sieve_start, smallest_budget, stored_tokens

lengths = st.integers(1, 200_000)
budgets = st.integers(1, 20_000)
blocks = st.sampled_from([1, 16, 32, 48, 128])


@given(lengths, budgets, blocks)
def test_stored_tokens_are_the_budget_and_less_than_a_block_more(
    prompt: int, budget: int, block: int
) -> None:
    stored = stored_tokens(prompt, budget, block)

    assert stored + sieve_start(prompt, budget, block) == prompt
    if prompt < budget + block:
        assert stored == prompt
    else:
        assert budget <= stored < budget + block


@given(lengths, budgets, blocks)
def test_the_start_is_block_aligned_and_inside_the_prompt(
    prompt: int, budget: int, block: int
) -> None:
    start = sieve_start(prompt, budget, block)

    assert start % block == 0
    assert 0 <= start < prompt


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [(1, 0), (255, 0), (256, 0), (287, 0), (288, 32), (289, 32), (2991, 2720)],
)
def test_the_start_at_the_edges(prompt: int, expected: int) -> None:
    assert sieve_start(prompt, 256, 32) == expected


@example(prompt=11_750, percent=14, floor=1, ceiling=5000)
@given(lengths, st.integers(1, 100), st.integers(1, 500), st.integers(500, 5000))
def test_a_share_stays_between_its_bounds(
    prompt: int, percent: int, floor: int, ceiling: int
) -> None:
    rule = BudgetRule(share=percent / 100, min_tokens=floor, max_tokens=ceiling)
    budget = rule.tokens_for(prompt)

    assert floor <= budget <= ceiling
    assert rule.smallest <= budget
    if floor < budget < ceiling:
        assert budget == -(-prompt * percent // 100)


def test_bounds_move_a_budget_to_the_nearest_that_they_allow() -> None:
    rule = BudgetRule(tokens=200, min_tokens=100, max_tokens=300)

    assert [rule.within_bounds(budget) for budget in (1, 100, 250, 300, 999)] == [
        100,
        100,
        250,
        300,
        300,
    ]
    assert BudgetRule(tokens=200).within_bounds(10**6) == 10**6


def test_a_rule_takes_tokens_or_a_share() -> None:
    with pytest.raises(ValueError, match="either tokens or share"):
        BudgetRule()
    with pytest.raises(ValueError, match="either tokens or share"):
        BudgetRule(tokens=1, share=0.5)


def test_the_smallest_budget_holds_window_sinks_and_a_block() -> None:
    assert smallest_budget(32, 4, 32) == 68
