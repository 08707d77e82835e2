from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.core.errors import ConfigError
from kvsieve.inspect.ranks import (
    RankSettings,
    calibrated_l_min,
    num_ranked_tokens,
    pick_layer,
    resolve_layers,
    stability,
    top_overlap,
    variance_curve,
    window_ranks,
)
from kvsieve.pruning.ranks import rank_variance


def random_ranks(seed: int, layers: int, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(n, generator=generator) + 1 for _ in range(layers)]
    return torch.stack(orders).float()


def variance_by_hand(ranks: list[list[float]], num_ranked: int) -> float:
    union = {j for row in ranks for j, rank in enumerate(row) if rank <= num_ranked}
    return statistics.fmean(statistics.pvariance([row[j] for row in ranks]) for j in union)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(2, 40))
def test_variance_is_that_of_the_definition(seed: int, layers: int, n: int) -> None:
    ranks = random_ranks(seed, layers, n)
    num_ranked = seed % n + 1

    found = float(rank_variance(ranks, num_ranked))

    assert found == pytest.approx(variance_by_hand(ranks.tolist(), num_ranked))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 40), st.sampled_from([1, 3, 7]))
def test_ranks_are_those_of_pooled_sums(seed: int, heads: int, n: int, pool: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few values, so that there are ties.
    mass = torch.randint(0, 3, (heads, n), generator=generator).float()

    ranks = window_ranks(mass, pool)

    half = pool // 2
    padded = F.pad(mass, (half, half))
    means = [[float(row[j : j + pool].sum()) / pool for j in range(n)] for row in padded]
    scores = [round(sum(head[j] for head in means), 4) for j in range(n)]
    assert sorted(ranks.tolist()) == list(range(1, n + 1))
    if pool == 1:
        # Sums of whole numbers tie exactly: the later position is better.
        order = sorted(range(n), key=lambda j: (-scores[j], -j))
        assert [order.index(j) + 1 for j in range(n)] == ranks.tolist()
    by_rank = [scores[int((ranks == r).nonzero())] for r in range(1, n + 1)]
    assert all(a >= b - 1e-3 for a, b in pairwise(by_rank))


def test_layers_that_agree_have_no_variance() -> None:
    ranks = random_ranks(1, 1, 30).expand(5, -1)

    assert rank_variance(ranks, 10) == 0
    assert top_overlap(ranks, 10) == [1.0] * 4
    assert pick_layer([None, 0.0, 0.0], 1, 0.3) is None


def test_overlap_counts_what_is_shared() -> None:
    ranks = torch.tensor([[1.0, 2, 3, 4], [4.0, 1, 2, 3], [3.0, 4, 1, 2]])

    assert top_overlap(ranks, 2) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("variance", "l_min", "tau", "picked"),
    [
        ([None, 10.0, 8.0, 2.9, 0.1], 1, 0.3, 3),
        # Strictly below: a variance that equals tau times the first does not trigger.
        ([None, 10.0, 3.0, 2.0], 1, 0.3, 3),
        # A dip before l_min does not count, nor do values after the first trigger.
        ([9.0, 0.1, 50.0, 20.0, 14.0, 60.0], 2, 0.3, 4),
        ([10.0, 9.0, 8.0], 0, 0.3, None),
        # With tau above 1 the first layer itself is below it.
        ([10.0, 9.0], 0, 1.5, 0),
    ],
)
def test_pick(variance: list[float | None], l_min: int, tau: float, picked: int | None) -> None:
    assert pick_layer(variance, l_min, tau) == picked


def test_picked_layer_and_peak_on_ranks_that_stir_and_settle() -> None:
    n, layers = 200, list(range(20))
    base = random_ranks(0, 1, n)[0]
    # Layers 0-3 agree, 4-11 are at odds, 12-19 agree again.
    stirred = random_ranks(1, 8, n)
    ranks = torch.stack([base] * 4 + list(stirred) + [base] * 8)

    found = stability(ranks, layers, RankSettings(l_min=3, l_obs=4, select_k=42), window=32)

    assert found.num_ranked == 10
    assert found.variance[:3] == (None, None, None) and found.variance[3] == 0
    assert found.picked is None and found.relative[4] is None, "nothing to fall from at layer 3"
    assert found.peak in range(6, 13)
    assert found.picked_from_peak in range(12, 16)
    assert found.variance[15] == 0 and found.overlap[-1] == 1
    again = stability(
        ranks, layers, RankSettings(l_min=found.peak, l_obs=4, select_k=42), window=32
    )
    assert again.picked == again.picked_from_peak == found.picked_from_peak
    assert again.relative[found.peak] == 1 and again.relative[found.peak - 1] is None
    assert calibrated_l_min([found, again]) == found.peak


def test_long_prompt_does_not_drown_the_others() -> None:
    settings_ = RankSettings(l_min=2, l_obs=2, select_k=20)
    layers = list(range(6))

    def peaking_at(layer: int, n: int) -> torch.Tensor:
        ranks = torch.arange(1.0, n + 1).repeat(6, 1)
        ranks[layer] = ranks[layer].flip(0)
        ranks[layer - 1] = ranks[0]
        return ranks

    short = [stability(peaking_at(4, 60), layers, settings_, 4) for _ in range(2)]
    long = stability(peaking_at(2, 6000), layers, settings_, 4)

    assert calibrated_l_min([*short, long]) in (4, 5)
    assert calibrated_l_min([long]) in (2, 3)


@given(st.integers(1, 120))
def test_defaults_fit_every_depth(depth: int) -> None:
    layers = list(range(depth))

    l_min, l_obs = resolve_layers(RankSettings(), layers)

    assert 1 <= l_obs <= depth
    assert l_obs - 1 <= l_min < depth
    assert len(variance_curve(random_ranks(0, depth, 8), l_obs, 3)) == depth


def test_defaults_at_the_authors_depth_are_the_authors() -> None:
    assert resolve_layers(RankSettings(), range(32)) == (10, 8)


def test_layers_are_named_by_number() -> None:
    assert resolve_layers(RankSettings(l_min=11, l_obs=2), [2, 5, 8, 11]) == (3, 2)


@pytest.mark.parametrize(
    ("settings_", "reason"),
    [
        (RankSettings(l_min=4, l_obs=8), "7 is the lowest"),
        (RankSettings(l_min=30), "l_min must be a full-attention layer"),
        (RankSettings(l_obs=1), "l_obs must be between 2"),
        (RankSettings(l_obs=31), "l_obs must be between 2"),
    ],
)
def test_settings_that_do_not_fit(settings_: RankSettings, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve_layers(settings_, list(range(30)))


@given(st.integers(33, 200_000), st.one_of(st.none(), st.integers(1, 300_000)))
def test_ranked_tokens_are_candidates(n: int, select_k: int | None) -> None:
    ranked = num_ranked_tokens(RankSettings(select_k=select_k), n, 32)

    assert 1 <= ranked <= n - 32
