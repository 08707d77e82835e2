from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.inspect.concentration import concentration, tokens_holding


def brute_force(mass: list[float], share: float) -> int:
    held, total = 0.0, sum(mass)
    for count, value in enumerate(sorted(mass, reverse=True), 1):
        held += value
        if held >= share * total * (1 - 1e-9):
            return count
    raise AssertionError("the whole mass holds any share of it")


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 10), min_size=30, max_size=30), min_size=1, max_size=4),
    st.floats(0.01, 1),
)
def test_counts_are_those_of_a_loop(rows: list[list[float]], share: float) -> None:
    mass = torch.tensor(rows, dtype=torch.float64) + 1e-3

    expected = [brute_force(row, share) for row in mass.tolist()]

    assert tokens_holding(mass, share).tolist() == expected


def test_one_token_can_hold_all() -> None:
    mass = torch.zeros(3, 50)
    mass[torch.arange(3), torch.tensor([4, 49, 0])] = 32.0

    spread = concentration(mass)[0.99]

    assert (spread.mean, spread.std, spread.min, spread.max) == (1, 0, 1, 1)


def test_even_attention_needs_every_share_of_the_tokens() -> None:
    spreads = concentration(torch.full((2, 200), 0.25), (0.5, 0.9, 1.0))

    assert [spread.mean for spread in spreads.values()] == [100, 180, 200]


def test_spread_is_over_heads() -> None:
    mass = torch.zeros(2, 10)
    mass[0, 0] = 1
    mass[1, :9] = 1

    spread = concentration(mass, (1.0,))[1.0]

    assert (spread.mean, spread.std, spread.min, spread.max) == (5, 4, 1, 9)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000))
def test_more_mass_needs_no_fewer_tokens(seed: int) -> None:
    mass = torch.rand(3, 40, generator=torch.Generator().manual_seed(seed)) ** 4

    spreads = list(concentration(mass).values())

    assert [s.mean for s in spreads] == sorted(s.mean for s in spreads)
    assert all(s.min <= s.mean <= s.max for s in spreads)
