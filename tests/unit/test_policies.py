"""The steps of a policy on plain tensors: invariants, ties, broken numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve import SieveConfig
from kvsieve.policies import (
    policy_from_config,
    protect_sinks,
    reduce_heads,
    select_positions,
    smooth,
    snapkv,
)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(0, 300), st.integers(0, 10_000), st.data())
def test_selection_is_what_sorting_would_give(
    heads: int, positions: int, seed: int, data: st.DataObject
) -> None:
    keep = data.draw(st.integers(0, positions))
    generator = torch.Generator().manual_seed(seed)
    # Few distinct values, so that ties are common.
    scores = torch.randint(0, 5, (heads, positions), generator=generator).float()

    chosen = select_positions(scores, keep)

    expected = [
        sorted(sorted(range(positions), key=lambda i: (-row[i], -i))[:keep])
        for row in scores.tolist()
    ]
    assert chosen.tolist() == expected


def test_ties_go_to_the_higher_position() -> None:
    assert select_positions(torch.tensor([[1.0, 2.0, 1.0, 1.0]]), 3).tolist() == [[1, 2, 3]]


def test_numbers_that_are_none_rank_last_and_infinities_first() -> None:
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([[nan, 0.0, inf, -inf, 3e38]])

    assert select_positions(scores, 3).tolist() == [[1, 2, 4]]
    assert select_positions(torch.full((1, 4), nan), 2).tolist() == [[2, 3]]


def test_selection_refuses_more_than_there_is() -> None:
    with pytest.raises(ValueError, match=r"\[0, 3\], got 4"):
        select_positions(torch.zeros(1, 3), 4)


@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("width", [1, 3, 7, 21])
@pytest.mark.parametrize("positions", [0, 1, 2, 63, 100])
def test_smoothing_against_its_definition(pooling: str, width: int, positions: int) -> None:
    scores = torch.rand(2, positions, generator=torch.Generator().manual_seed(positions))

    pooled = smooth(scores, pooling, width)

    for head in range(2):
        for position in range(positions):
            near = [
                float(scores[head, i]) if 0 <= i < positions else None
                for i in range(position - width // 2, position + width // 2 + 1)
            ]
            inside = [value for value in near if value is not None]
            expected = max(inside) if pooling == "max" else sum(inside) / width
            assert float(pooled[head, position]) == pytest.approx(expected, abs=1e-6)


def test_heads_are_reduced_within_their_group() -> None:
    scores = torch.arange(12.0).view(2, 3, 2)

    assert reduce_heads(scores, "mean").tolist() == [[2.0, 3.0], [8.0, 9.0]]
    assert reduce_heads(scores, "max").tolist() == [[4.0, 5.0], [10.0, 11.0]]


def test_protection_changes_a_copy() -> None:
    scores = torch.zeros(1, 6)

    assert protect_sinks(scores, 2)[0, :3].tolist() == [float("inf"), float("inf"), 0.0]
    assert not scores.any()


@pytest.mark.parametrize("keep", [4, 5, 20, 63])
def test_sinks_are_kept_in_every_head(keep: int) -> None:
    scores = torch.rand(3, 2, 63, generator=torch.Generator().manual_seed(0))

    chosen = snapkv().select(scores, keep)

    assert chosen.shape == (3, keep)
    assert chosen[:, :4].tolist() == [[0, 1, 2, 3]] * 3
    assert (chosen.diff(dim=1) > 0).all()


def test_selection_does_not_depend_on_the_order_of_heads() -> None:
    scores = torch.rand(4, 3, 100, generator=torch.Generator().manual_seed(1))
    order = torch.tensor([2, 0, 3, 1])

    assert torch.equal(snapkv().select(scores, 30)[order], snapkv().select(scores[order], 30))


def test_the_configuration_reaches_the_policy() -> None:
    config = SieveConfig.parse(
        {"observation_window": 16, "pool_size": 5, "pooling": "avg", "num_sink_tokens": 1}
    )

    assert policy_from_config(config) == snapkv(
        observation_window=16, pool_size=5, pooling="avg", num_sink_tokens=1
    )


@pytest.mark.parametrize("policy", ["snapkv", "streaming_llm", "random"])
@given(num_heads=st.integers(1, 4), n=st.integers(5, 200), data=st.data())
def test_every_policy_keeps_sinks_and_repeats_itself(
    policy: str, num_heads: int, n: int, data: st.DataObject
) -> None:
    keep = data.draw(st.integers(4, n))
    scores = torch.rand(num_heads, 3, n, generator=torch.Generator().manual_seed(n))
    chosen = policy_from_config(SieveConfig(policy=policy)).select(scores, keep)

    assert chosen.shape == (num_heads, keep)
    assert chosen[:, :4].tolist() == [[0, 1, 2, 3]] * num_heads
    assert (chosen.diff(dim=1) > 0).all() and int(chosen.max()) < n
    again = policy_from_config(SieveConfig(policy=policy)).select(scores, keep)
    assert torch.equal(chosen, again)


def test_streaming_llm_keeps_the_end() -> None:
    chosen = policy_from_config(SieveConfig(policy="streaming_llm")).select(torch.rand(2, 3, 50), 9)

    assert chosen.tolist() == [[0, 1, 2, 3, 45, 46, 47, 48, 49]] * 2


def test_the_random_baseline_looks_at_no_score() -> None:
    policy = policy_from_config(SieveConfig(policy="random"))
    one, other = (policy.select(torch.rand(2, 3, 500), 100) for _ in range(2))

    assert torch.equal(one, other)
    assert not torch.equal(one[0], one[1])
    # Spread over the whole prompt: chance of fewer than 10 in a half is nil.
    assert 10 < int((one < 250).sum(dim=1).min()) < 90
