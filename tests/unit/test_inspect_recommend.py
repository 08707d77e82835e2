from __future__ import annotations

import json
import shlex
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.core.budget import sieve_start, smallest_budget
from kvsieve.core.config import SieveConfig
from kvsieve.core.plan import MAX_GROUPS, group_layers, make_plan
from kvsieve.inspect.evidence import LayerEvidence
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
from kvsieve.inspect.sliced import LayerHeads, sampled_queries, sliced_attention
from kvsieve.policies import Evidence, Policy, parse_settings, policy_from_config

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


@given(st.integers(0, 64), st.integers(0, 8))
def test_smallest_budget_is_made_of_what_is_always_kept(recent: int, sinks: int) -> None:
    config = SieveConfig(num_recent_tokens=recent, num_sink_tokens=sinks)

    assert budget_grid(2000, config, 16)[0] == recent + sinks + 16


def random_layer(seed: int, n: int, window: int) -> LayerEvidence:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (3 * torch.randn(h, n, 8, generator=generator) for h in (6, 2, 2))
    heads = LayerHeads(torch.nn.Identity(), query, key, value, 8**-0.5)
    _, attention = sliced_attention(
        *(query, key, value, heads.scale),
        layer=0,
        observation_window=window,
        sampled=sampled_queries(n, 1),
    )
    return LayerEvidence(attention, heads)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(40, 400))
def test_losses_are_what_a_choice_loses_and_fall_with_the_budget(seed: int, n: int) -> None:
    policy = policy_from_config(CONFIG)
    window = policy.observation_window
    grid = budget_grid(n, CONFIG, BLOCK)

    lost = layer_losses(random_layer(seed, n, window), grid, policy, BLOCK)

    attention = random_layer(seed, n, window).window_attention()
    for budget, loss in zip(grid, lost, strict=True):
        start = max(0, (n - budget) // BLOCK * BLOCK)
        kept = policy.choose(random_layer(seed, n, window), n - start)
        shares = [
            1 - float(attention[kv_head, head, kept[kv_head]].double().sum()) / window
            for kv_head in range(2)
            for head in range(3)
        ]
        assert loss == pytest.approx(sum(shares) / len(shares), abs=1e-5)
        assert 0 <= loss <= 1
    assert all(a >= b - 1e-6 for a, b in pairwise(lost))


def test_score_is_computed_once_and_no_step_spoils_it() -> None:
    calls = []

    def score(evidence: Evidence) -> torch.Tensor:
        calls.append(evidence)
        return torch.arange(float(evidence.num_tokens)).expand(2, 1, -1).clone()

    def spoil(scores: torch.Tensor, evidence: Evidence, num_keep: int) -> torch.Tensor:
        return scores.neg_()

    policy = Policy("last", score, reduce=lambda scores, _: scores[:, 0], refine=spoil)
    evidence = random_layer(0, 400, 32)

    losses = layer_losses(evidence, [100, 200, 300], policy, BLOCK)

    assert calls == [evidence]
    attention = evidence.window_attention()
    # The first positions stay, and the last 32.
    for budget, loss in zip([100, 200, 300], losses, strict=True):
        kept = 400 - (400 - budget) // BLOCK * BLOCK
        dropped = attention[..., kept - 32 : 368].sum(dim=2) / 32
        assert loss == pytest.approx(float(dropped.mean()), abs=1e-5)


def test_one_hot_attention_loses_nothing_at_the_smallest_budget() -> None:
    n = 532
    query, key = torch.zeros(2, n, 4), torch.zeros(1, n, 4)
    query[..., 0] = 100.0
    key[0, 250, 0] = 100.0
    heads = LayerHeads(torch.nn.Identity(), query, key, key, 1.0)
    _, attention = sliced_attention(
        *(query, key, key, 1.0), layer=0, observation_window=32, sampled=sampled_queries(n, 1)
    )

    lost = layer_losses(
        LayerEvidence(attention, heads),
        budget_grid(n, CONFIG, BLOCK),
        policy_from_config(CONFIG),
        BLOCK,
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
    assert best.num_groups <= MAX_GROUPS
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

    curves = loss_curves(prompts, range(30), best.plan.full)

    assert set(curves) == {"no full layer", "recommended"}
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
    config = parse_settings({"observation_window": 16, "pooling": "max"})
    plan = make_plan(tuple(range(6)), (), (5,))
    candidate = Candidate(300, plan, 0.0, 0.0, 1, 0.5, 0.0, 6)

    words = serve_command("/models/my model", candidate, config, 16)

    assert shlex.split(as_shell(words)) == words
    assert words == [
        *("kvsieve", "serve", "/models/my model", "--budget", "300", "--full-layers", "5-5"),
        *("--observation-window", "16", "--pooling", "max", "--block-size", "16"),
    ]


def given_to_serve(words: list[str]) -> dict[str, str]:
    """The options of a command, by the name of the setting."""
    flags = words[3:]
    return {
        flag.removeprefix("--").replace("-", "_"): value
        for flag, value in zip(flags[::2], flags[1::2], strict=True)
    }


@pytest.mark.parametrize(
    ("settings_", "named"),
    [
        ({}, {}),
        ({"policy": "tova"}, {"policy": "tova"}),
        ({"policy": "pyramidkv"}, {"policy": "pyramidkv", "layer_budgets": "uniform"}),
        (
            {"policy": "chunkkv", "policy_options": {"chunk_length": 8}, "pool_size": 7},
            {"policy": "chunkkv", "policy_options": '{"chunk_length": 8}'},
        ),
        ({"policy": "chunkkv", "policy_options": {"chunk_length": 20}}, {"policy": "chunkkv"}),
        (
            {"policy": "h2o", "num_recent_tokens": 64, "num_sink_tokens": 4},
            {"policy": "h2o", "num_recent_tokens": "64", "num_sink_tokens": "4"},
        ),
        ({"observation_window": 16, "num_sink_tokens": 0}, None),
    ],
)
def test_command_brings_back_the_settings_of_any_policy(
    settings_: dict[str, Any], named: dict[str, str] | None
) -> None:
    config = parse_settings(settings_)
    candidate = Candidate(300, make_plan(tuple(range(6)), (), (5,)), 0.0, 0.0, 1, 0.5, 0.0, 6)

    given = given_to_serve(serve_command("model", candidate, config, 16))

    assert given.pop("block_size") == "16"
    if named is not None:
        assert given == {"budget": "300", "full_layers": "5-5", **named}
    options = {"policy_options": json.loads(given.pop("policy_options", "{}"))}
    served = parse_settings({**given, **options})
    wanted = {"budget": 300, "full_layers": (5,), "layer_budgets": "uniform"}
    assert served == config.model_copy(update=wanted)
