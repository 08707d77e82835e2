"""The steps of a policy on plain tensors: definitions, ties, broken numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsieve.policies import Policy, protect, select_positions, smooth
from kvsieve.policies.reduce import (
    max_of_group,
    mean_of_all,
    mean_of_group,
    sum_of_group,
    weigh_heads,
)
from tests.unit.policy_parts import Shape, make_tensors

NAN, INF = float("nan"), float("inf")


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_that_are_none_rank_last_and_infinities_first(dtype: torch.dtype) -> None:
    scores = torch.tensor([[NAN, 0.0, INF, -INF, 3e38]], dtype=dtype)

    assert select_positions(scores, 3).tolist() == [[1, 2, 4]]
    assert select_positions(torch.full((1, 4), NAN, dtype=dtype), 2).tolist() == [[2, 3]]


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


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_a_broken_number_stays_where_it_is(pooling: str) -> None:
    scores = torch.tensor([[1.0, 2.0, NAN, 4.0, 5.0]])

    pooled = smooth(scores, pooling, 3)

    assert pooled.isnan().tolist() == [[False, False, True, False, False]]
    expected = [2.0, 2.0, 5.0, 5.0] if pooling == "max" else [1.0, 1.0, 3.0, 3.0]
    assert pooled[~pooled.isnan()].tolist() == pytest.approx(expected)


def test_query_heads_are_smoothed_one_by_one() -> None:
    scores = torch.tensor([[[3.0, 0.0, 0.0], [0.0, 0.0, 5.0]]])

    assert smooth(scores, "max", 3).tolist() == [[[3.0, 3.0, 0.0], [0.0, 5.0, 5.0]]]


def test_heads_are_reduced_within_their_group() -> None:
    scores = torch.arange(12.0).view(2, 3, 2)

    assert mean_of_group(scores, 1).tolist() == [[2.0, 3.0], [8.0, 9.0]]
    assert sum_of_group(scores, 1).tolist() == [[6.0, 9.0], [24.0, 27.0]]
    assert max_of_group(scores, 1).tolist() == [[4.0, 5.0], [10.0, 11.0]]
    assert mean_of_all(scores, 1).tolist() == [[5.0, 6.0], [5.0, 6.0]]


def test_weights_are_shares_of_their_group_and_a_group_without_any_counts_alike() -> None:
    scores = torch.tensor([[[8.0], [4.0]], [[INF], [4.0]], [[6.0], [2.0]]])
    weights = torch.tensor([[3.0, 1.0], [0.0, 2.0], [0.0, 0.0]])

    assert weigh_heads(scores, weights).tolist() == [[[6.0], [1.0]], [[0.0], [4.0]], [[3.0], [1.0]]]


def test_protection_changes_a_copy() -> None:
    scores = torch.zeros(1, 6)

    assert protect(scores, 2)[0].tolist() == [INF, INF, 0.0, 0.0, 0.0, 0.0]
    assert not scores.any()


def test_smoothing_carries_infinite_scores_to_neighbours_and_nothing_else() -> None:
    scores = torch.tensor([[1.0, 1.0, 1.0, INF, 1.0, 1.0, NAN, 1.0]])

    for pooling in ("avg", "max"):
        pooled = smooth(scores, pooling, 3)[0]
        assert pooled.isposinf().nonzero().flatten().tolist() == [2, 3, 4]
        assert pooled.isnan().nonzero().flatten().tolist() == [6]


def test_infinite_scores_do_not_push_out_protected_tokens() -> None:
    scores = torch.tensor([[0.0, 1.0, INF, INF, INF, NAN]])

    assert select_positions(protect(scores, 2), 3).tolist() == [[0, 1, 4]]
    assert protect(scores, 1)[0, 5].isnan()


def test_spans_are_protected_and_may_reach_beyond_the_candidates() -> None:
    forced = protect(torch.zeros(2, 8), 1, [(2, 4), (6, 20)])

    assert forced.isinf().tolist() == [[True, False, True, True, False, False, True, True]] * 2


@pytest.mark.parametrize(
    ("num_recent", "num_keep", "recent"),
    [
        (3, None, [5, 6, 7]),
        (3, 9, [5, 6, 7]),
        (3, 5, [6, 7]),
        (3, 3, []),
        (-2, 5, []),
        (9, None, None),
    ],
)
def test_recent_tokens_take_what_sinks_and_spans_leave(
    num_recent: int, num_keep: int | None, recent: list[int] | None
) -> None:
    forced = protect(torch.zeros(1, 8), 1, [(2, 4)], num_recent, num_keep)

    expected = set(range(8)) if recent is None else {0, 2, 3, *recent}
    assert set(forced.isinf()[0].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize(("share", "keep"), [(0.5, 40), (0.5, 41), (0.3, 50), (1.0, 20)])
def test_a_share_of_the_budget_goes_to_the_last_tokens(share: float, keep: int) -> None:
    def early(evidence: object) -> torch.Tensor:
        return -torch.arange(100.0).expand(1, 1, -1)

    policy = Policy("early", early, num_recent_tokens=1, recent_share=share)

    chosen = policy.choose(make_tensors(Shape(100, 1, 1)).evidence(policy), keep)[0].tolist()

    last = int(share * keep)
    assert chosen == [*range(keep - last), *range(100 - last, 100)]


def test_smoothing_does_not_reach_into_recent_tokens() -> None:
    def peak(evidence: object) -> torch.Tensor:
        scores = torch.zeros(1, 1, 50)
        scores[..., 45] = 1.0
        scores[..., 10] = 0.5
        return scores

    policy = Policy("peak", peak, num_recent_tokens=5, pool_size=7)

    chosen = policy.choose(make_tensors(Shape(50, 1, 1)).evidence(policy), 12)[0].tolist()

    assert chosen == [*range(7, 14), *range(45, 50)]


@pytest.mark.parametrize("pools_heads", [False, True])
def test_heads_are_smoothed_before_or_after_they_are_reduced(pools_heads: bool) -> None:
    def two_heads(evidence: object) -> torch.Tensor:
        return torch.tensor([[[4.0, 0.0, 0.0, 0.0], [0.0, 4.0, 0.0, 0.0]]])

    policy = Policy("two", two_heads, num_recent_tokens=0, pool_size=3, pools_heads=pools_heads)

    scores = policy.candidate_scores(make_tensors(Shape(4, 1, 2)).evidence(policy), 2)

    assert scores.tolist() == [[4.0, 4.0, 2.0, 0.0] if pools_heads else [2.0, 2.0, 2.0, 0.0]]
