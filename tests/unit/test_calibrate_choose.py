"""The rules that make layers and a threshold of curves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.calibrate.choose import (
    adaptive_choice,
    choose,
    computed_share,
    deepest_layer,
    earliest_close,
    last_worthwhile,
    lowest_relative,
    pruned_at,
    settings_of,
)
from kvsieve.calibrate.measure import PromptCurves
from kvsieve.inspect.ranks import Stability, calibrated_l_min, peak_index
from kvsieve.pruning import PRUNE_METHODS

ASL, FASTKV, GEMFILTER = (PRUNE_METHODS[name] for name in ("asl", "fastkv", "gemfilter"))


def curves(
    variance: list[float],
    fastkv: dict[int, float],
    gemfilter: dict[int, float] | None = None,
    l_obs: int = 2,
    squared_norm: float = 1.0,
) -> PromptCurves:
    """A prompt with these curves; `variance` begins at layer `l_obs - 1`."""
    whole = [None] * (l_obs - 1) + variance
    return PromptCurves(
        name="planted",
        num_tokens=1000,
        num_keep=250,
        stability=Stability(
            layers=tuple(range(len(whole))),
            num_ranked=218,
            l_obs=l_obs,
            l_min=l_obs - 1,
            tau=0.3,
            variance=tuple(whole),
            relative=(),
            picked=None,
            peak=0,
            picked_from_peak=None,
            overlap=(),
        ),
        squared_norm=squared_norm,
        distances={"fastkv": fastkv, "gemfilter": gemfilter or fastkv},
    )


@pytest.mark.parametrize(
    ("curve", "peak"),
    [
        ([1, 2, 5, 3], 2),
        # A fall at the beginning is no peak, however high it begins.
        ([9, 4, 2, 6, 8, 3], 4),
        # What is left after the fall is ripples.
        ([9, 4, 2, 1, 2, 1], 0),
        ([9, 8, 7], 0),
        ([0, 0, 0], 0),
        ([4], 0),
        # Of two that it rises to, the higher one.
        ([9, 1, 5, 2, 7, 6], 4),
    ],
)
def test_peak_is_what_the_variance_rises_to(curve: list[float], peak: int) -> None:
    assert peak_index(curve) == peak


def test_prompts_count_alike_and_the_peak_is_bounded() -> None:
    small = curves([1.0, 2, 8, 3, 2, 2, 2], {0: 1.0}).stability
    large = curves([1e6, 2e6, 3e6, 5e6, 9e6, 1e6, 9.9e6], {0: 1.0}).stability

    assert calibrated_l_min([small, small, large]) == 3
    assert calibrated_l_min([large]) == 7
    assert calibrated_l_min([large], highest=6) == 5


@pytest.mark.parametrize(
    ("distances", "layer"),
    [
        ({0: 5.0, 2: 1.09, 4: 1.0}, 2),
        ({0: 5.0, 2: 1.11, 4: 1.0}, 4),
        ({0: 0.0, 2: 1.0}, 0),
        ({3: 0.0, 5: 0.0}, 3),
    ],
)
def test_earliest_layer_near_the_best_is_taken(distances: dict[int, float], layer: int) -> None:
    assert earliest_close(distances) == layer


def test_shares_are_those_of_counted_token_layers() -> None:
    # FastKV's own numbers: 16 of 32 layers full, a fifth goes on: 0.6.
    assert computed_share(FASTKV, 15, 32, 0.2) == pytest.approx(0.6)
    # GemFilter: 14 of 32 layers on all tokens, then all layers on a tenth.
    assert computed_share(GEMFILTER, 13, 32, 0.1) == pytest.approx(14 / 32 + 0.1)
    assert computed_share(ASL, 29, 30, 0.25) == 1


@given(st.integers(4, 100), st.floats(0.01, 0.99))
def test_beyond_the_last_worthwhile_layer_nothing_is_saved(n: int, kept: float) -> None:
    for method in (ASL, GEMFILTER):
        layer = last_worthwhile(method, n, kept)
        assert layer == n - 1 or 1 - computed_share(method, layer, n, kept) < 0.1
        assert layer == 0 or 1 - computed_share(method, layer - 1, n, kept) >= 0.1


RISING = [1.0, 2, 3, 4, 8, 6, 5, 4, 3, 2, 1]  # peaks at layer 5 of 12


@pytest.mark.parametrize(
    ("fastkv", "kept", "layer", "because"),
    [
        ({0: 9.0, 4: 5.0, 8: 1.0}, 0.25, 8, "close"),
        # 12 layers, 70% kept: after layer 7 less than a tenth is left.
        ({0: 9.0, 4: 5.0, 8: 1.0}, 0.7, 7, "saving"),
        ({0: 9.0, 4: 1.0, 8: 1.0}, 0.25, 6, "peak"),
    ],
)
def test_deepest_layer(fastkv: dict[int, float], kept: float, layer: int, because: str) -> None:
    found = deepest_layer(ASL, [curves(RISING, fastkv)], 12, kept, peak=5)

    assert (found.layer, found.because) == (layer, because)


def test_half_of_the_prompts_settle_before_the_deepest_layer() -> None:
    falls = [[4.0, 8, 8 * low, 8, 8, 8, 8] for low in (0.1, 0.2, 0.4, 0.6)]
    each = [curves(fall, {0: 9.0, 4: 1.0}) for fall in falls]

    found = adaptive_choice(ASL, each, num_layers=8, kept_share=0.25)

    assert (found.layer, found.max_layer) == (2, 4)
    assert found.threshold == pytest.approx(0.3)
    served = settings_of("asl", found, 8)
    assert [pruned_at(served, one) for one in each] == [
        (3, "threshold"),
        (3, "threshold"),
        (4, "deepest"),
        (4, "deepest"),
    ]


def test_lowest_variance_looks_between_and_at_the_next_layer_at_least() -> None:
    one = curves([4.0, 8, 6, 2, 1], {0: 1.0}).stability

    assert lowest_relative(one, 2, 4) == 0.75
    assert lowest_relative(one, 2, 5) == 0.25
    assert lowest_relative(one, 2, 3) == 0.75
    assert lowest_relative(curves([0.0, 0, 0], {}).stability, 1, 3) == 1


numbers = st.floats(0, 1e9)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(4, 48), st.floats(0.01, 0.95), st.integers(1, 5))
def test_every_choice_is_one_that_a_server_takes(
    data: st.DataObject, n: int, kept: float, num_prompts: int
) -> None:
    candidates = data.draw(st.sets(st.integers(0, n - 2), min_size=1))
    l_obs = min(8, max(2, n // 3))
    distances = st.fixed_dictionaries({layer: numbers for layer in candidates})
    each = [
        curves(
            data.draw(st.lists(numbers, min_size=n - l_obs + 1, max_size=n - l_obs + 1)),
            data.draw(distances),
            data.draw(distances),
            l_obs,
        )
        for _ in range(num_prompts)
    ]

    found = choose(each, n, kept)

    assert set(found) == set(PRUNE_METHODS)
    for name, one in found.items():
        served = settings_of(name, one, n)
        where = [pruned_at(served, prompt)[0] for prompt in each]
        assert all(one.layer <= layer <= served.last_scored_layer for layer in where)
        if one.max_layer is not None and one.threshold is not None:
            assert one.layer < one.max_layer and all(layer <= one.max_layer for layer in where)
            assert 0.05 <= one.threshold <= 0.95
        else:
            assert one.layer in candidates
