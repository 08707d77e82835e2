"""Intervals: coverage by simulation, invariants over all inputs, the ends by hand."""

from __future__ import annotations

import importlib
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvsieve.core.errors import KvsieveError
from kvsieve.evals.statistics import (
    SMALL_SAMPLE,
    Estimate,
    mean,
    paired_difference,
    paired_ratio,
)

scores = st.floats(0, 1, allow_nan=False) | st.sampled_from([0.0, 0.5, 1.0])
score_lists = st.lists(scores, min_size=1, max_size=40)
pairs = st.lists(st.tuples(scores, scores), min_size=1, max_size=40)
few = settings(max_examples=40)


def is_honest(estimate: Estimate, lowest: float, highest: float) -> bool:
    """Finite, in order, within the bounds, and never without a width."""
    ends = (estimate.low, estimate.value, estimate.high)
    ordered = lowest <= estimate.low <= estimate.value <= estimate.high <= highest
    return all(map(math.isfinite, ends)) and ordered and estimate.low < estimate.high


@few
@given(score_lists, st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_mean_is_honest_and_does_not_depend_on_the_order(values, seed, random) -> None:
    estimate = mean(values, seed)
    shuffled = list(values)
    random.shuffle(shuffled)

    assert is_honest(estimate, 0, 1)
    assert estimate.value == pytest.approx(sum(values) / len(values))
    assert estimate.count == len(values)
    assert mean(shuffled, seed) == estimate


@few
@given(pairs)
def test_a_difference_is_honest_and_turns_its_sign_with_the_sides(values) -> None:
    first, second = zip(*values, strict=True)
    forward, backward = paired_difference(first, second), paired_difference(second, first)

    assert is_honest(forward, -1, 1)
    assert forward.value == pytest.approx(-backward.value, abs=1e-12)
    # Resampling draws other values from the other side, so the ends agree only nearly.
    assert forward.low == pytest.approx(-backward.high, abs=0.05)


@few
@given(
    st.lists(st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)), min_size=1, max_size=40),
    st.floats(0.01, 100),
)
def test_a_ratio_is_honest_and_has_no_unit(values, unit) -> None:
    first, second = zip(*values, strict=True)
    estimate = paired_ratio(first, second)
    scaled = paired_ratio([unit * v for v in first], [unit * v for v in second])

    assert is_honest(estimate, 0, math.inf)
    # Rounding may make equal ratios unequal, and with them the kind of interval.
    assert scaled.value == pytest.approx(estimate.value)


@pytest.mark.parametrize(("hits", "count"), [(0, 1), (1, 1), (0, 7), (3, 10), (29, 30), (50, 50)])
def test_wilson_is_scipys(hits: int, count: int) -> None:
    expected = stats.binomtest(hits, count).proportion_ci(method="wilson")
    estimate = mean([1] * hits + [0] * (count - hits))

    assert estimate.value == hits / count
    assert estimate.low == pytest.approx(expected.low, abs=1e-12)
    assert estimate.high == pytest.approx(expected.high, abs=1e-12)
    assert mean([1.0] * hits + [0.0] * (count - hits)) == estimate


def test_equal_values_leave_room_for_one_that_was_not_seen() -> None:
    # q = z^2 / (n + z^2): 0.793 for one sample, 0.161 for twenty.
    assert mean([0.5]).low == pytest.approx(0.5 * (1 - 0.7935), abs=1e-4)
    assert paired_difference([1.0] * 20, [1.0] * 20) == Estimate(
        0.0, pytest.approx(-0.1611, abs=1e-4), pytest.approx(0.1611, abs=1e-4), 20
    )
    assert paired_ratio([20.0], [20.0]).high == pytest.approx(2**0.7935, abs=1e-3)
    # Where equal scores are 0 or 1, it is Wilson's interval.
    assert mean([1.0] * 12).low == pytest.approx(12 / (12 + 1.959964**2))


def test_values_that_differ_in_their_last_bits_count_as_equal() -> None:
    values = [0.5 + i * 2**-53 for i in range(40)]

    assert is_honest(mean(values), 0, 1)
    assert mean(values).high - mean(values).low > 0.05
    assert paired_ratio([1e308] * 2, [1e-308] * 2).high == pytest.approx(sys.float_info.max)


def test_a_ratio_is_the_geometric_mean_of_ratios() -> None:
    estimate = paired_ratio([20.0, 30.0, 5.0], [10.0, 30.0, 10.0])

    assert estimate.value == pytest.approx(1.0)
    assert paired_ratio([12.0, 24.0], [10.0, 20.0]).value == pytest.approx(1.2)


def test_pairing_sees_what_two_separate_means_do_not() -> None:
    rng = np.random.default_rng(0)
    reference = rng.uniform(0.2, 1.0, 60)
    worse = reference - rng.uniform(0.0, 0.1, 60)

    assert mean(worse).high > mean(reference).low
    assert paired_difference(worse, reference).high < 0


def three_values(down: float, up: float):
    """Differences of right and wrong: -1, 0 and 1 with these probabilities."""
    return lambda rng, n: rng.choice([-1.0, 0.0, 1.0], n, p=[down, 1 - down - up, up])


@pytest.mark.parametrize("count", [3, 8, SMALL_SAMPLE - 1, SMALL_SAMPLE, 45])
@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda rng, n: rng.beta(2, 2, n), 0.5),
        (lambda rng, n: rng.beta(0.3, 0.9, n), 0.25),
        (lambda rng, n: (rng.random(n) < 0.9).astype(float), 0.9),
        (three_values(0.1, 0.05), -0.05),
        (three_values(0.3, 0.1), -0.2),
    ],
)
def test_the_intervals_cover(draw, expected, count, monkeypatch) -> None:
    monkeypatch.setattr("kvsieve.evals.statistics.RESAMPLES", 499)
    rng = np.random.default_rng(5)
    rounds = 120
    hits = 0
    for _ in range(rounds):
        drawn = draw(rng, count)
        if expected < 0:
            estimate = paired_difference(np.maximum(drawn, 0), np.maximum(-drawn, 0))
        else:
            estimate = mean(drawn)
        hits += estimate.low <= expected <= estimate.high

    # 95% of 120 rounds are 114; 106 are 3.3 standard deviations fewer.
    assert hits >= 106


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mean([]), "at least one"),
        (lambda: mean([0.5, math.nan]), "nan at position 1"),
        (lambda: mean([1.5]), "from 0.0 to 1.0"),
        (lambda: paired_difference([1], [1, 0]), "1 and 2 given"),
        (lambda: paired_ratio([0.0], [1.0]), "at position 0"),
        (lambda: paired_ratio([1.0], [math.inf]), "inf"),
    ],
)
def test_what_has_no_mean_is_refused(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_without_scipy_the_error_says_what_to_install(monkeypatch) -> None:
    def missing(name: str, *rest: object) -> object:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)

    with pytest.raises(KvsieveError, match=r"pip install 'kvsieve\[eval\]'"):
        mean([0.1, 0.9])
    assert mean([0.0, 1.0]).value == 0.5
