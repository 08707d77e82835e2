"""Budgets that differ by layer, against sums and lines written out in fractions."""

from __future__ import annotations

import pickle
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvsieve.core.budget import BudgetRule
from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError
from kvsieve.core.plan import LayerPlan, make_plan
from kvsieve.core.tiers import (
    ExplicitBudgets,
    LayerTier,
    PyramidBudgets,
    falling_quotients,
    in_proportion,
    make_tiers,
    pyramid,
    smallest_budget_of,
    uniform_tier,
)

BLOCK = 32
PLAN = make_plan(tuple(range(30)), (), 3)

layer_counts = st.integers(1, 90)
lengths = st.integers(1, 60_000)
windows = st.integers(0, 300)
floors = st.integers(1, 200)
extras = st.integers(0, 9000)


def pyramid_line(
    prompt: int, budget: int, recent: int, smallest: int, layers: int
) -> list[Fraction]:
    """The line as the paper's code has it, in fractions: nothing is rounded."""
    capacity = budget - recent
    if prompt < budget or prompt < 2 * capacity or layers == 1:
        return [Fraction(budget)] * layers
    low = max(capacity // 20, smallest - recent)
    high = 2 * capacity - low
    if high >= prompt - recent:
        high = prompt - recent
        low = 2 * capacity - high
    step = Fraction(high - low, layers - 1)
    return [recent + high - layer * step for layer in range(layers)]


def tiers_of(plan: LayerPlan = PLAN, **settings: object) -> tuple[LayerTier, ...]:
    return make_tiers(SieveConfig.parse(settings), plan, BLOCK)


def tokens(
    tiers: tuple[LayerTier, ...], prompt: int, requested: BudgetRule | None = None
) -> list[int]:
    return [tier.rule.tokens_for(prompt, requested) for tier in tiers]


def total(tiers: tuple[LayerTier, ...], prompt: int, requested: BudgetRule | None = None) -> int:
    return sum(
        len(tier.layers) * budget
        for tier, budget in zip(tiers, tokens(tiers, prompt, requested), strict=True)
    )


@given(layer_counts, lengths, windows, floors, extras)
@example(32, 8192, 8, 1, 120)
@example(27, 4000, 32, 36, 480)
def test_a_pyramid_has_exactly_the_mean_that_was_asked_for(
    layers: int, prompt: int, recent: int, beyond: int, extra: int
) -> None:
    smallest = recent + beyond
    budgets = pyramid(prompt, smallest + extra, recent, smallest, layers)

    assert len(budgets) == layers
    assert sum(budgets) == layers * (smallest + extra)


@given(layer_counts, lengths, windows, floors, extras)
@example(3, 57, 32, 20, 8)  # Longer than two capacities, and shorter than its budget.
def test_a_pyramid_is_the_papers_line_rounded_to_a_neighbour(
    layers: int, prompt: int, recent: int, beyond: int, extra: int
) -> None:
    smallest = recent + beyond
    budgets = pyramid(prompt, smallest + extra, recent, smallest, layers)
    line = pyramid_line(prompt, smallest + extra, recent, smallest, layers)

    for budget, exact in zip(budgets, line, strict=True):
        assert abs(budget - exact) < 1


@given(layer_counts, lengths, windows, floors, extras)
def test_a_pyramid_falls_and_stays_between_the_legal_and_the_prompt(
    layers: int, prompt: int, recent: int, beyond: int, extra: int
) -> None:
    smallest = recent + beyond
    budgets = pyramid(prompt, smallest + extra, recent, smallest, layers)

    assert list(budgets) == sorted(budgets, reverse=True)
    assert min(budgets) >= smallest
    if prompt >= smallest + extra:
        assert max(budgets) <= prompt


@given(layer_counts, lengths, windows, floors, extras)
def test_the_last_layer_has_a_twentieth_of_the_mean_or_what_is_legal(
    layers: int, prompt: int, recent: int, beyond: int, extra: int
) -> None:
    assume(layers > 1)
    capacity = beyond + extra
    budgets = pyramid(prompt, recent + capacity, recent, recent + beyond, layers)
    # A prompt that is long enough for the whole line.
    if prompt > 2 * capacity + recent:
        assert budgets[-1] - recent == max(capacity // 20, beyond)


@pytest.mark.parametrize(
    ("prompt", "is_flat"), [(127, True), (128, True), (239, True), (240, False), (8192, False)]
)
def test_a_prompt_shorter_than_two_capacities_is_treated_uniformly(
    prompt: int, is_flat: bool
) -> None:
    assert (len(set(pyramid(prompt, 128, 8, 9, 32))) == 1) is is_flat


def test_the_published_figures_with_the_remainder_given_back() -> None:
    budgets = pyramid(8192, 128, 8, 9, 32)

    # The published code has 234 down to 17 without the window, 4016 in all.
    assert (budgets[0], budgets[-1]) == (234 + 8, 6 + 8)
    assert sum(budgets) == 32 * 128


@given(
    num_layers=st.integers(2, 90),
    full=st.integers(0, 12),
    max_tiers=st.integers(1, 12),
    budget=st.integers(68, 6000),
    prompt=lengths,
)
@example(num_layers=30, full=3, max_tiers=3, budget=512, prompt=4000)
@example(num_layers=32, full=4, max_tiers=3, budget=69, prompt=171)
def test_the_tiers_of_a_pyramid_are_their_layers_means(
    num_layers: int, full: int, max_tiers: int, budget: int, prompt: int
) -> None:
    assume(full < num_layers)
    plan = make_plan(tuple(range(num_layers)), (), full)
    tiers = tiers_of(plan, budget=budget, layer_budgets="pyramid", max_tiers=max_tiers)
    given_tokens = tokens(tiers, prompt)

    assert len(tiers) <= max_tiers
    assert [layer for tier in tiers for layer in tier.layers] == list(plan.sieved)
    layers = iter(pyramid(prompt, budget, 32, 68, len(plan.sieved)))
    for tier, nominal in zip(tiers, given_tokens, strict=True):
        mean = Fraction(sum(next(layers) for _ in tier.layers), len(tier.layers))
        assert abs(nominal - mean) < 1
        assert nominal >= 68
    assert given_tokens == sorted(given_tokens, reverse=True)
    short = len(plan.sieved) * budget - total(tiers, prompt)
    assert 0 <= short < max(len(tier.layers) for tier in tiers)


def test_a_small_tier_takes_what_a_large_one_cannot_share() -> None:
    plan = make_plan(tuple(range(32)), (), 4)
    tiers = tiers_of(plan, budget=73, layer_budgets="pyramid", max_tiers=4)

    assert [len(tier.layers) for tier in tiers] == [8, 8, 8, 4]
    assert tokens(tiers, 8000) == [77, 74, 70, 69]
    assert total(tiers, 8000) == 28 * 73


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 9)), min_size=1, max_size=12))
@example([(23, 3), (22, 3), (7, 1)])
@example([(52, 9), (11, 2)])  # The small one must not overtake the large one.
def test_quotients_fall_and_their_sum_is_near(pairs: list[tuple[int, int]]) -> None:
    pairs = sorted(pairs, key=lambda pair: -Fraction(*pair))
    counts = [count for _, count in pairs]
    rounded = falling_quotients([total for total, _ in pairs], counts)
    short = sum(each - count * value for (each, count), value in zip(pairs, rounded, strict=True))

    assert rounded == sorted(rounded, reverse=True)
    assert all(abs(value - Fraction(*pair)) < 1 for value, pair in zip(rounded, pairs, strict=True))
    assert 0 <= short < max(counts)
    if len(set(counts)) == 1:
        assert short == sum(each for each, _ in pairs) % counts[0]


@given(st.integers(68, 6000), lengths)
def test_equal_tiers_keep_the_total_to_less_than_one_tiers_layers(budget: int, prompt: int) -> None:
    tiers = tiers_of(budget=budget, layer_budgets="pyramid")

    assert [len(tier.layers) for tier in tiers] == [9, 9, 9]
    # What is missing is the part of the total that nine equal layers cannot share.
    assert 27 * budget - total(tiers, prompt) == 27 * budget % 9


@given(st.integers(68, 6000), st.integers(68, 6000), st.integers(68, 6000), lengths)
def test_a_requests_budget_moves_the_whole_pyramid(
    budget: int, wanted: int, other: int, prompt: int
) -> None:
    tiers = tiers_of(budget=budget, layer_budgets="pyramid")
    own = tiers_of(budget=wanted, layer_budgets="pyramid")
    requested = BudgetRule(tokens=wanted, min_tokens=68)

    assert tokens(tiers, prompt, requested) == tokens(own, prompt)
    assert tiers[0].rule.mean_for(prompt, requested) == wanted
    assert tiers[0].rule.mean_for(prompt) == budget


@given(st.integers(68, 6000), lengths)
def test_a_uniform_budget_is_one_tier_and_a_request_replaces_it(budget: int, prompt: int) -> None:
    tiers = tiers_of(budget=300)

    assert [tier.layers for tier in tiers] == [PLAN.sieved]
    assert tokens(tiers, prompt) == [300]
    assert tokens(tiers, prompt, BudgetRule(tokens=budget)) == [budget]
    assert tiers[0].rule == uniform_tier(BudgetRule(tokens=300, min_tokens=68))


def test_budgets_by_layers_hold_as_they_were_given() -> None:
    tiers = tiers_of(layer_budgets={"10-29": "5%", "3-9": 512})

    assert [tier.layers for tier in tiers] == [tuple(range(3, 10)), tuple(range(10, 30))]
    assert tokens(tiers, 4000) == [512, 200]
    assert tokens(tiers, 100) == [512, 68]
    # 7 layers of 512 and 20 of 200 are 280.9 in the mean.
    assert tiers[0].rule.mean_for(4000) == 281


def test_ranges_with_one_budget_are_one_tier() -> None:
    tiers = tiers_of(layer_budgets={"3-9": 512, "10-19": 100, "20-29": 512})

    assert [tier.layers for tier in tiers] == [
        (*range(3, 10), *range(20, 30)),
        tuple(range(10, 20)),
    ]


@given(
    budgets=st.lists(
        st.integers(70, 9000) | st.sampled_from(["2%", "30%", "100%"]), min_size=2, max_size=4
    ),
    ends=st.sets(st.integers(3, 28), min_size=3, max_size=3),
    bounds=st.sampled_from([{}, {"min_budget": 70}, {"max_budget": 9000}]),
    wanted=st.integers(70, 9000),
    prompt=lengths,
)
# Twice the budgets would be 16384 for the first layers, of a prompt of 3000 tokens.
@example([8192, 300], {2 + 9}, {}, 2600, 3000)
@example([900, 200], {11}, {"min_budget": 150, "max_budget": 1000}, 150, 4000)
@example([900, 200], {11}, {"min_budget": 150, "max_budget": 1000}, 1000, 4000)
def test_a_request_scales_budgets_by_layers(
    budgets: list[int | str],
    ends: set[int],
    bounds: dict[str, int],
    wanted: int,
    prompt: int,
) -> None:
    edges = [3, *(end + 1 for end in sorted(ends)[: len(budgets) - 1]), 30]
    shape = {
        f"{first}-{after - 1}": budget
        for budget, (first, after) in zip(budgets, pairwise(edges), strict=True)
    }
    tiers = tiers_of(layer_budgets=shape, **bounds)
    least = bounds.get("min_budget", 68)
    most = min(prompt, bounds.get("max_budget", prompt))
    requested = BudgetRule(tokens=wanted, min_tokens=least, max_tokens=bounds.get("max_budget"))
    scaled = tokens(tiers, prompt, requested)

    assert tiers[0].rule.mean_for(prompt, requested) == wanted
    if wanted >= prompt:
        # All of the prompt: no layer may lose any of it.
        assert scaled == [wanted] * len(tiers)
        return
    # No tier is given what it cannot use, so the mean is what was asked for.
    assert all(least <= each <= most for each in scaled)
    assert 0 <= 27 * wanted - total(tiers, prompt, requested) < 27
    # Those that no bound holds stand to each other as the operator's budgets do.
    free = [
        (scale, own)
        for scale, own in zip(scaled, tokens(tiers, prompt), strict=True)
        if least < scale < most
    ]
    for (scale, own), (other, others) in pairwise(free):
        assert scale * others < (other + 1) * own and other * own < (scale + 1) * others
    # Nobody at a bound would be within it at the level of the others.
    for scale, own in free[:1]:
        for each, its in zip(scaled, tokens(tiers, prompt), strict=True):
            if each == least:
                assert its * scale < (least + 1) * own
            if each == most:
                assert its * (scale + 1) > most * own


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 400),
    st.integers(0, 300),
    st.data(),
)
def test_a_larger_mean_makes_no_part_smaller(
    pairs: list[tuple[int, int]], least: int, room: int, data: st.DataObject
) -> None:
    parts, counts = zip(*pairs, strict=True)
    mean = data.draw(st.integers(least, least + room))
    more = data.draw(st.integers(mean, least + room))
    few = in_proportion(parts, counts, mean, least, least + room)
    many = in_proportion(parts, counts, more, least, least + room)

    assert all(a <= b for a, b in zip(few, many, strict=True))


def test_a_budget_beside_budgets_by_layers_scales_them_like_a_requests() -> None:
    shape = {"3-11": 300, "12-29": 150}
    scaled = tiers_of(budget=400, layer_budgets=shape)
    as_given = tiers_of(layer_budgets=shape)

    assert tokens(scaled, 4000) == [600, 300]
    assert tokens(as_given, 4000) == [300, 150]
    assert tokens(as_given, 4000, BudgetRule(tokens=400)) == [600, 300]
    assert scaled[0].rule.mean_for(4000) == 400


def test_what_a_bound_takes_from_scaled_budgets_goes_to_the_others() -> None:
    tiers = tiers_of(layer_budgets={"3-11": 900, "12-29": 200}, min_budget=150, max_budget=1000)

    assert tokens(tiers, 4000, BudgetRule(tokens=600)) == [1000, 400]
    assert tokens(tiers, 4000, BudgetRule(tokens=1000)) == [1000, 1000]
    assert tokens(tiers, 4000, BudgetRule(tokens=200)) == [300, 150]
    assert tokens(tiers, 4000, BudgetRule(tokens=150)) == [150, 150]


def test_what_the_prompt_is_too_short_for_goes_to_the_other_layers() -> None:
    tiers = tiers_of(budget=1000, layer_budgets={"3-11": 900, "12-20": 100, "21-29": "10%"})

    # As they are they would be in the ratio 9 : 1 : 1.5, or 2348 tokens for the first.
    assert tokens(tiers, 1500) == [1500, 600, 900]


@given(
    st.sampled_from(["uniform", "pyramid", {"3-9": 512, "10-20": "5%", "21-29": 300}]),
    lengths,
    st.none() | st.integers(68, 5000) | st.floats(0.01, 1),
)
def test_a_pickled_rule_gives_the_same_and_is_equal(
    layer_budgets: object, prompt: int, wanted: float | None
) -> None:
    requested = None
    if wanted is not None:
        key = "tokens" if isinstance(wanted, int) else "share"
        requested = BudgetRule(**{key: wanted}, min_tokens=68)
    for tier in tiers_of(layer_budgets=layer_budgets):
        copy = pickle.loads(pickle.dumps(tier.rule))

        assert copy == tier.rule
        assert hash(copy) == hash(tier.rule)
        assert copy.tokens_for(prompt, requested) == tier.rule.tokens_for(prompt, requested)


@pytest.mark.parametrize("layer_budgets", ["pyramid", {"3-9": "10%", "10-29": 400}])
def test_tiers_differ_even_where_they_keep_the_same(layer_budgets: object) -> None:
    tiers = tiers_of(layer_budgets=layer_budgets, max_tiers=3)

    # At 4000 tokens 10% are 400; a prompt of 1100 tokens is below twice the pyramid's capacity.
    prompt = 1100 if layer_budgets == "pyramid" else 4000
    assert len(set(tokens(tiers, prompt))) == 1
    assert len({tier.rule for tier in tiers}) == len(tiers) > 1


@pytest.mark.parametrize(
    ("plan", "layer_budgets", "words"),
    [
        (PLAN, {"3-9": 512}, ["leaves out the sieved layers: 10-29", "sieved: 3-29"]),
        (PLAN, {"0-29": 512}, ["keep everything: 0-2"]),
        (PLAN, {"3-29,40": 512}, ["does not have: 40"]),
        (make_plan((0, 2, 4), (1, 3), 1), {"1-4": 512}, ["cannot be sieved: 1, 3"]),
        (
            PLAN,
            {"0-8": 40, "10-29": 512, "77": "1%"},
            ["for 4 reasons", "'0-8' 40 is too small", "out the sieved layers: 9", "0-2", "77"],
        ),
    ],
)
def test_every_layer_that_is_missing_or_wrong_is_listed(
    plan: LayerPlan, layer_budgets: object, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        tiers_of(plan, layer_budgets=layer_budgets)

    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("layer_budgets", ["uniform", "pyramid", {"0-2": 512}])
def test_a_plan_without_sieved_layers_has_no_tiers(layer_budgets: object) -> None:
    with pytest.raises(ConfigError, match="no sieved layer"):
        tiers_of(LayerPlan((0, 1, 2), ()), layer_budgets=layer_budgets)


@given(
    st.sampled_from(
        [
            {"budget": 400},
            {"budget": "10%"},
            {"budget": 500, "layer_budgets": "pyramid"},
            {"budget": "3%", "layer_budgets": "pyramid"},
            {"layer_budgets": {"3-9": 512, "10-20": "2%", "21-29": 300}},
            {"budget": 900, "layer_budgets": {"3-9": 512, "10-29": 80}},
        ]
    ),
    st.integers(1, 5000),
)
def test_no_shorter_prompt_is_sieved_than_the_bound_says(
    settings: dict[str, object], prompt: int
) -> None:
    bound = smallest_budget_of(SieveConfig.parse(settings), BLOCK)

    if min(tokens(tiers_of(**settings), prompt)) < prompt:
        assert prompt >= bound


def test_the_bound_of_each_kind_of_budgets() -> None:
    def bound(**settings: object) -> int:
        return smallest_budget_of(SieveConfig.parse(settings), BLOCK)

    assert bound(budget=400) == 400
    assert bound(budget=400, layer_budgets="pyramid") == 400
    assert bound(budget="10%") == 68
    assert bound(layer_budgets={"3-9": 512, "10-29": 300}) == 300
    assert bound(budget=400, layer_budgets={"3-9": 512, "10-29": 300}) == 68


def test_a_rule_says_what_it_is() -> None:
    assert str(tiers_of(budget=512)[0].rule) == "512 tokens"
    pyramids = tiers_of(budget=512, layer_budgets="pyramid")
    assert str(pyramids[1].rule) == "tier 2 of 3 of a pyramid around 512 tokens"
    by_layers = tiers_of(budget=512, layer_budgets={"3-9": 300, "10-29": "5%"})
    assert str(by_layers[0].rule) == "300 tokens, scaled to a mean of 512 tokens"
    assert isinstance(pyramids[0].rule.budgets, PyramidBudgets)
    assert isinstance(by_layers[0].rule.budgets, ExplicitBudgets)


@pytest.mark.parametrize("prompt_tokens", [200, 4000])
def test_all_of_a_prompt_is_all_of_it_in_every_layer(prompt_tokens: int) -> None:
    config = SieveConfig.parse({"layer_budgets": {"0-2": 2048, "3-29": "5%"}})
    tiers = make_tiers(config, make_plan(tuple(range(30)), (), 0), 32)

    for requested in (BudgetRule(share=1.0), BudgetRule(tokens=prompt_tokens)):
        assert all(t.rule.tokens_for(prompt_tokens, requested) >= prompt_tokens for t in tiers)
