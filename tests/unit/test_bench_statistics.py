"""Percentiles, means over time, ratios of pairs, and the search of a sweep."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvsieve.bench.percentiles import percentile, weighted_mean
from kvsieve.bench.ratios import MIN_REPEATS_FOR_INTERVAL, ratio, student_t, summarise_ratios
from kvsieve.bench.sweep import highest_met, next_concurrency

NUMBERS = st.floats(-1e6, 1e6)
RATIOS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)


@given(st.lists(NUMBERS, min_size=1, max_size=50), st.floats(0, 1))
def test_a_percentile_is_numpys(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(
        float(np.percentile(values, share * 100)), rel=1e-6, abs=1e-6
    )


@given(st.lists(NUMBERS, min_size=1), st.floats(0, 1), st.floats(0, 1))
def test_percentiles_stay_in_range_and_in_order(
    values: list[float], one: float, two: float
) -> None:
    low, high = (percentile(values, share) for share in sorted((one, two)))
    assert min(values) <= low <= high <= max(values)


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.1), ([1.0], -0.1)])
def test_a_percentile_of_nothing_or_outside_is_an_error(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match=r"percentile|share"):
        percentile(values, share)


def test_a_mean_over_time_counts_each_value_until_the_next_look() -> None:
    assert weighted_mean([4.0, 1.0, 100.0], [0.0, 1.0, 4.0]) == pytest.approx((4 + 3) / 4)
    assert weighted_mean([2.0, 4.0], [1.0, 1.0]) == 3.0
    assert weighted_mean([7.0], [3.0]) == 7.0
    assert weighted_mean([], []) == 0.0


@given(st.floats(0, 10), st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_the_mean_over_time_of_a_constant_is_the_constant(value: float, times: list[float]) -> None:
    assert weighted_mean([value] * len(times), sorted(times)) == pytest.approx(value)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 10, 29, 100])
@pytest.mark.parametrize("share", [0.75, 0.975, 0.995])
def test_students_t_is_scipys(share: float, freedom: int) -> None:
    assert student_t(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-8)


@given(RATIOS)
def test_a_summary_holds_its_median_in_its_range(ratios: list[float]) -> None:
    summary = summarise_ratios(ratios)
    assert summary is not None and summary.repeats == len(ratios)
    assert summary.min <= summary.median <= summary.max
    if len(ratios) < MIN_REPEATS_FOR_INTERVAL:
        assert summary.mean is None and summary.low is None and summary.high is None
    else:
        assert summary.mean is not None and summary.low is not None and summary.high is not None
        assert summary.low <= summary.mean * (1 + 1e-9) and summary.mean <= summary.high * (
            1 + 1e-9
        )


@given(st.lists(st.floats(0.01, 100), min_size=MIN_REPEATS_FOR_INTERVAL, max_size=9))
def test_turning_the_ratio_round_turns_the_interval_round(ratios: list[float]) -> None:
    one, two = summarise_ratios(ratios), summarise_ratios([1 / each for each in ratios])
    assert one is not None and two is not None
    assert one.low is not None and two.high is not None and one.mean is not None
    assert two.mean == pytest.approx(1 / one.mean)
    assert two.high == pytest.approx(1 / one.low)


def test_the_interval_is_students_on_logarithms() -> None:
    ratios = [0.9, 1.0, 1.1, 1.2, 1.3, 1.1]
    summary = summarise_ratios(ratios)
    logs = np.log(ratios)
    low, high = stats.t.interval(0.95, len(logs) - 1, logs.mean(), stats.sem(logs))
    assert summary is not None and summary.low == pytest.approx(math.exp(low))
    assert summary.high == pytest.approx(math.exp(high))


def test_pairs_without_a_ratio_make_no_summary() -> None:
    assert summarise_ratios([1.0, None, 1.1]) is None
    assert summarise_ratios([]) is None
    assert ratio(1.0, 0.0) is None and ratio(None, 1.0) is None and ratio(3.0, 2.0) == 1.5


@given(st.integers(1, 300), st.integers(0, 400))
def test_a_sweep_finds_the_highest_in_few_steps(limit: int, capacity: int) -> None:
    met: dict[int, bool] = {}
    while (clients := next_concurrency(met, limit)) is not None:
        assert 1 <= clients <= limit and clients not in met
        met[clients] = clients <= capacity
        assert len(met) <= 2 * math.log2(limit) + 3
    assert highest_met(met) == min(limit, capacity)


@given(st.integers(1, 100), st.data())
def test_a_sweep_ends_however_noisy_the_answers_are(limit: int, data: st.DataObject) -> None:
    met: dict[int, bool] = {}
    while (clients := next_concurrency(met, limit)) is not None:
        assert clients not in met
        met[clients] = data.draw(st.booleans())
    found = highest_met(met)
    assert found == 0 or met[found]
    assert found == limit or met[found + 1] is False


def test_a_bound_that_one_client_breaks_is_not_reached() -> None:
    assert next_concurrency({}, 8) == 1
    assert next_concurrency({1: False}, 8) is None
    assert highest_met({1: False}) == 0
