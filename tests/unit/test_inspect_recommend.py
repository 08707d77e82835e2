from __future__ import annotations

import shlex
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.core.budget import sieve_start, smallest_budget
from kvsieve.core.config import SieveConfig
from kvsieve.core.plan import MAX_DEFAULT_GROUPS, group_layers, make_plan
from kvsieve.inspect.recommend import (
    TIE,
    Bounds,
    Candidate,
    PromptLosses,
    Recommendation,
    as_shell,
    budget_grid,
    layer_losses,
    layer_ranges,
    loss_curves,
    recommend,
    serve_command,
)
from kvsieve.policies import attention_mass_lost, policy_from_config

CONFIG = SieveConfig()
BLOCK = 32
SMALLEST = smallest_budget(CONFIG.observation_window, CONFIG.num_sink_tokens, BLOCK)


def random_losses(seed: int, lengths: list[int], num_layers: int) -> list[PromptLosses]:
    """Losses that fall with the budget, differently in each layer."""
    generator = torch.Generator().manual_seed(seed)
    budgets = torch.tensor(budget_grid(max(lengths), CONFIG, BLOCK), dtype=torch.float64)
    prompts = []
    for length in lengths:
        scale = torch.rand(num_layers, 1, generator=generator, dtype=torch.float64)
        speed = 5 * torch.rand(num_layers, 1, generator=generator, dtype=torch.float64)
        lost = scale * torch.exp(-speed * budgets / length) * (budgets < length - BLOCK)
        prompts.append(PromptLosses(length, lost))
    return prompts


def recommended(prompts: list[PromptLosses], bounds: Bounds) -> Recommendation:
    longest = max(prompt.prompt_tokens for prompt in prompts)
    return recommend(
        prompts,
        range(len(prompts[0].lost)),
        (),
        budget_grid(longest, CONFIG, BLOCK),
        bounds,
        block_size=BLOCK,
        page_bytes=1024,
    )


@given(st.integers(33, 300_000), st.sampled_from([1, 16, 32, 128]))
def test_grid_is_legal_ascending_and_reaches_from_end_to_end(longest: int, block: int) -> None:
    grid = budget_grid(longest, CONFIG, block)

    smallest = smallest_budget(CONFIG.observation_window, CONFIG.num_sink_tokens, block)
    assert grid[0] == smallest
    assert list(grid) == sorted(set(grid))
    assert all((budget - smallest) % block == 0 for budget in grid)
    if longest >= smallest + block:
        # Even the largest drops a block of the longest prompt, and no block more than that.
        assert sieve_start(longest, grid[-1], block) == block
    assert len(grid) <= 130


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(40, 400))
def test_losses_are_the_products_and_fall_with_the_budget(seed: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    policy = policy_from_config(CONFIG)
    window = policy.observation_window
    weights = torch.softmax(3 * torch.randn(2, 3, n, generator=generator), dim=-1)
    scores = window * weights[..., : n - window]
    grid = budget_grid(n, CONFIG, BLOCK)

    lost = layer_losses(scores, n, grid, policy, BLOCK)

    for budget, loss in zip(grid, lost, strict=True):
        start = max(0, (n - budget) // BLOCK * BLOCK)
        kept = policy.select(scores, n - start - window) if start else None
        expected = 0.0 if kept is None else float(attention_mass_lost(scores, kept, window))
        assert loss == expected
        assert 0 <= loss <= 1
    assert all(a >= b - 1e-6 for a, b in pairwise(lost))


def test_one_hot_attention_loses_nothing_at_the_smallest_budget() -> None:
    scores = torch.zeros(1, 2, 500)
    scores[:, :, 250] = CONFIG.observation_window

    lost = layer_losses(
        scores, 532, budget_grid(532, CONFIG, BLOCK), policy_from_config(CONFIG), 32
    )

    assert lost == [0.0] * len(lost)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 10_000),
    st.lists(st.integers(200, 4000), min_size=1, max_size=3),
    st.sampled_from([2, 7, 12, 30]),
    st.floats(0, 0.5),
    st.one_of(st.none(), st.floats(0, 0.6)),
)
def test_plan_stays_within_the_bounds_of_every_prompt(
    seed: int, lengths: list[int], num_layers: int, mean: float, worst: float | None
) -> None:
    prompts = random_losses(seed, lengths, num_layers)
    bounds = Bounds(mean, worst)

    found = recommended(prompts, bounds)

    best = found.best
    assert best is not None
    index = budget_grid(max(lengths), CONFIG, BLOCK).index(best.budget)
    lost = [prompt.lost[list(best.plan.sieved), index] for prompt in prompts]
    assert best.mean_loss == pytest.approx(max(float(one.mean()) for one in lost))
    assert best.worst_loss == pytest.approx(max(float(one.max()) for one in lost))
    assert found.is_within is bounds.hold(best)
    assert 0 < best.kv_share < 1
    assert best.num_groups <= MAX_DEFAULT_GROUPS
    grouping = group_layers(len(best.plan.full), len(best.plan.sieved))
    assert best.padding_share == grouping.padding_share


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 10_000),
    st.lists(st.integers(200, 4000), min_size=1, max_size=3),
    st.floats(0.001, 0.3),
    st.floats(1, 3),
)
def test_accepting_more_loss_never_needs_more_memory(
    seed: int, lengths: list[int], mean: float, factor: float
) -> None:
    prompts = random_losses(seed, lengths, 12)

    strict, loose = (recommended(prompts, Bounds(m)) for m in (mean, factor * mean))

    if not strict.is_within:
        return
    assert strict.best is not None and loose.best is not None and loose.is_within
    # Plans within TIE of the least count as equal.
    assert loose.best.kv_bytes <= TIE * strict.best.kv_bytes


def test_a_layer_that_loses_much_stays_full() -> None:
    prompts = random_losses(0, [3000], 12)
    lost = torch.full_like(prompts[0].lost, 0.001)
    lost[[4, 9, 10]] = 0.9
    prompts = [PromptLosses(3000, lost)]

    best = recommended(prompts, Bounds(0.01)).best

    assert best is not None
    assert set(best.plan.full) >= {4, 9, 10}
    assert (best.budget, best.padding_share) == (SMALLEST, 0)


def test_each_prompt_may_have_a_layer_of_its_own_that_stays_full() -> None:
    prompts = []
    for layer in (8, 11):
        lost = torch.full_like(random_losses(0, [3000], 12)[0].lost, 0.001)
        lost[layer] = 0.9
        prompts.append(PromptLosses(3000, lost))

    best = recommended(prompts, Bounds(0.01)).best

    assert best is not None
    assert set(best.plan.full) >= {8, 11} and best.budget == SMALLEST


def test_counts_that_divide_the_layers_are_preferred_among_equals() -> None:
    # Four of 30 layers must stay full; a group of four leaves two pages of each block unused, and
    # with a budget this large one or two more full layers cost less than that.
    lost = torch.full((30, len(budget_grid(3000, CONFIG, BLOCK))), 0.5, dtype=torch.float64)
    lost[4:, -6:] = 0
    best = recommended([PromptLosses(3000, lost)], Bounds(0.0)).best

    assert best is not None
    assert len(best.plan.full) in (5, 6) and best.padding_share == 0


def test_nothing_within_the_bounds_is_said_and_the_least_loss_is_given() -> None:
    lost = torch.full((6, len(budget_grid(1000, CONFIG, BLOCK))), 0.5, dtype=torch.float64)
    lost[:, -1] = 0.4

    found = recommended([PromptLosses(1000, lost)], Bounds(0.1))

    assert not found.is_within
    assert found.best is not None and found.best.mean_loss == pytest.approx(0.4)


def test_prompts_that_fit_the_smallest_budget_get_no_plan() -> None:
    grid = budget_grid(SMALLEST + 5, CONFIG, BLOCK)
    prompts = [PromptLosses(SMALLEST + 5, torch.zeros(6, len(grid), dtype=torch.float64))]

    assert recommended(prompts, Bounds(0.5)).best is None


def test_the_bound_on_the_worst_layer_costs_memory() -> None:
    prompts = random_losses(5, [2000], 12)
    without = recommended(prompts, Bounds(0.1)).best
    assert without is not None

    bounded = recommended(prompts, Bounds(0.1, without.worst_loss / 2)).best

    assert bounded is not None and bounded.worst_loss <= without.worst_loss / 2
    assert bounded.kv_bytes >= without.kv_bytes / TIE


def test_sliding_window_layers_take_part_in_the_grouping() -> None:
    lost = torch.zeros(4, len(budget_grid(2000, CONFIG, BLOCK)), dtype=torch.float64)
    found = recommend(
        [PromptLosses(2000, lost)],
        (2, 5, 8, 11),
        (0, 1, 3, 4, 6, 7, 9, 10),
        budget_grid(2000, CONFIG, BLOCK),
        Bounds(0.0),
        block_size=BLOCK,
        page_bytes=1,
    )

    assert found.best is not None
    assert found.best.plan.untouched == (0, 1, 3, 4, 6, 7, 9, 10)
    assert found.best.kv_share > 8 / 12


def test_curves_fall_and_keeping_the_worst_layers_full_helps() -> None:
    prompts = random_losses(2, [3000, 800], 30)
    best = recommended(prompts, Bounds(0.05)).best
    assert best is not None

    curves = loss_curves(prompts, range(30), (), best.plan.full)

    assert set(curves) == {"no full layer", "default", "recommended"}
    for losses in curves.values():
        assert losses == sorted(losses, reverse=True)
    at = budget_grid(3000, CONFIG, BLOCK).index(best.budget)
    assert curves["recommended"][at] == pytest.approx(best.mean_loss)


@given(st.sets(st.integers(0, 39), max_size=39))
def test_full_layers_survive_the_command_line(full: set[int]) -> None:
    layers = tuple(range(40))
    text = layer_ranges(sorted(full))

    parsed = SieveConfig.parse({"full_layers": text}).full_layers

    assert make_plan(layers, (), parsed).full == tuple(sorted(full))


def test_command_names_every_setting_that_is_not_a_default() -> None:
    config = SieveConfig(observation_window=16, pooling="avg")
    plan = make_plan(tuple(range(6)), (), (5,))
    candidate = Candidate(300, plan, 0.0, 0.0, 1, 0.5, 0.0, 6)

    words = serve_command("/models/my model", candidate, config, 16)

    assert shlex.split(as_shell(words)) == words
    assert words == [
        *("kvsieve", "serve", "/models/my model", "--budget", "300", "--full-layers", "5-5"),
        *("--observation-window", "16", "--pooling", "avg", "--block-size", "16"),
    ]
