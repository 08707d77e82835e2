"""The recommended plan: the least memory that stays within the loss that the user names.

The loss is predicted with the functions that the engine itself uses: what the policy would keep,
and the attention of the prompts' windows to the rest. It is a proxy: attention that is lost, not
answers that are worse.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvsieve.core.budget import BudgetRule, sieve_start
from kvsieve.core.config import SieveConfig
from kvsieve.core.cost import request_cost
from kvsieve.core.notation import layer_list
from kvsieve.core.plan import (
    MAX_GROUPS,
    LayerPlan,
    group_layers,
    make_plan,
)
from kvsieve.policies import Evidence, Policy, attention_mass_lost, find_method

BUDGET_GROWTH = 1.1
"""Each budget of the grid is about a tenth larger than the one before it."""

TIE = 1.05
"""Plans within 5% of the least memory count as equal: then padding and groups decide, for padding
also costs while a prompt is read, and each group costs host time in every step."""


NAMED_SETTINGS = (
    "observation_window",
    "num_recent_tokens",
    "pool_size",
    "pooling",
    "num_sink_tokens",
)
"""Settings of the sieve that `kvsieve inspect` takes and a recommended command names."""


@dataclass(frozen=True)
class Bounds:
    """The loss that the user accepts.

    Attributes:
        mean: Attention mass lost, mean over the sieved layers, of every prompt.
        worst: Bound on the worst sieved layer of every prompt; None for none.
    """

    mean: float
    worst: float | None = None

    def hold(self, candidate: Candidate) -> bool:
        """Whether a plan stays within the bounds, as the engine reports them (five digits)."""
        return round(candidate.mean_loss, 5) <= self.mean and (
            self.worst is None or round(candidate.worst_loss, 5) <= self.worst
        )


@dataclass(frozen=True)
class PromptLosses:
    """What each budget would lose of one prompt.

    Attributes:
        prompt_tokens: Length of the prompt.
        lost: [num_layers, num_budgets] float64, attention mass lost per full-attention layer
            and budget of the grid; 0 where the prompt fits the budget.
    """

    prompt_tokens: int
    lost: torch.Tensor


@dataclass(frozen=True)
class Candidate:
    """One plan, with what it is predicted to lose and to hold.

    Attributes:
        budget: Nominal budget of the sieved layers, in tokens.
        plan: Which layers stay full.
        mean_loss: Attention mass lost, mean over the sieved layers, of the worst prompt.
        worst_loss: Attention mass lost of the worst sieved layer of any prompt.
        kv_bytes: Cache that the prompts hold together once they are read, padding included.
        kv_share: The same as a share of what stock vLLM holds.
        padding_share: Share of the pool that no layer uses.
        num_groups: Block tables per request.
    """

    budget: int
    plan: LayerPlan
    mean_loss: float
    worst_loss: float
    kv_bytes: int
    kv_share: float
    padding_share: float
    num_groups: int


@dataclass(frozen=True)
class Recommendation:
    """The plan for the bounds, or the one that comes closest.

    Attributes:
        best: The plan; None if not even the shortest block of any prompt would be dropped,
            because every prompt fits the smallest budget.
        is_within: Whether it stays within the bounds. If not, `best` loses least of all.
        num_candidates: Plans that were looked at.
    """

    best: Candidate | None
    is_within: bool
    num_candidates: int


def budget_grid(longest_prompt: int, config: SieveConfig, block_size: int) -> tuple[int, ...]:
    """Budgets to try: from the smallest legal one to the longest prompt, ascending.

    Each is a whole number of blocks more than the smallest, because blocks are freed whole:
    a budget between two of them stores as much as one of the two.
    """
    smallest = config.smallest_legal_budget(block_size)
    budgets = [smallest]
    while budgets[-1] + block_size <= longest_prompt - block_size:
        wanted = budgets[-1] * (BUDGET_GROWTH - 1)
        budgets.append(budgets[-1] + max(1, round(wanted / block_size)) * block_size)
    largest = smallest + max(0, (longest_prompt - smallest) // block_size - 1) * block_size
    return (*(budget for budget in budgets if budget < largest), largest)


def layer_losses(
    evidence: Evidence, budgets: Sequence[int], policy: Policy, block_size: int
) -> list[float]:
    """Attention mass that one layer would lose of a prompt under each budget.

    Args:
        evidence: What the policy may look at in the layer.
        budgets: Nominal budgets, in tokens.
        policy: How tokens are ranked and chosen.
        block_size: Block size of the cache manager, in tokens.
    """
    prompt_tokens = evidence.num_tokens
    attention = evidence.window_attention()
    scores = policy.score(evidence)
    # Scores know of no budget: they are computed once. A copy each, since nothing forbids the
    # later steps to work in place.
    scored = replace(policy, score=lambda _: scores.clone())
    losses = []
    for budget in budgets:
        start = sieve_start(prompt_tokens, budget, block_size)
        if start == 0:
            losses.append(0.0)
            continue
        positions = scored.choose(evidence, prompt_tokens - start).to(attention.device)
        losses.append(float(attention_mass_lost(attention, positions)))
    return losses


def full_layer_choices(
    lost: torch.Tensor, layers: Sequence[int], untouched: Sequence[int]
) -> list[tuple[int, ...]]:
    """Sets of layers to keep full under one budget: those that lose most, for each count.

    Counts that vLLM would spread over too many groups are left out, as in the default plan:
    each group costs host time in every step.

    Args:
        lost: [num_layers], the worst prompt's loss in each layer.
        layers: Their numbers.
        untouched: Layers with a sliding window, which take part in the grouping.
    """
    order = sorted(range(len(layers)), key=lambda index: (-float(lost[index]), index))
    choices = []
    for count in range(len(layers)):
        grouping = group_layers(count, len(layers) - count, len(untouched))
        if grouping.num_groups <= MAX_GROUPS:
            choices.append(tuple(sorted(layers[index] for index in order[:count])))
    return choices


def evaluate(
    prompts: Sequence[PromptLosses],
    layers: Sequence[int],
    untouched: Sequence[int],
    full: tuple[int, ...],
    budget_index: int,
    budgets: Sequence[int],
    *,
    block_size: int,
    page_bytes: int,
) -> Candidate:
    """What a plan loses and holds.

    Args:
        prompts: What each budget loses of each prompt.
        layers: Numbers of the full-attention layers.
        untouched: Numbers of the others.
        full: Layers that stay full.
        budget_index: Which of the budgets.
        budgets: The grid.
        block_size: Block size of the cache manager, in tokens.
        page_bytes: Bytes of one block of one layer.
    """
    plan = make_plan(tuple(layers), tuple(untouched), full)
    sieved = [index for index, layer in enumerate(layers) if layer not in set(full)]
    lost = [prompt.lost[sieved, budget_index] for prompt in prompts]
    rule = BudgetRule(tokens=budgets[budget_index])
    held = whole = 0
    for prompt in prompts:
        shape = (prompt.prompt_tokens, 0, block_size, page_bytes)
        held += request_cost(plan, rule, *shape).bytes
        whole += request_cost(plan, None, *shape).bytes
    grouping = group_layers(len(plan.full), len(plan.sieved), len(plan.untouched))
    return Candidate(
        budget=budgets[budget_index],
        plan=plan,
        mean_loss=max(float(one.mean()) for one in lost),
        worst_loss=max(float(one.max()) for one in lost),
        kv_bytes=held,
        kv_share=held / whole,
        padding_share=grouping.padding_share,
        num_groups=grouping.num_groups,
    )


def recommend(
    prompts: Sequence[PromptLosses],
    layers: Sequence[int],
    untouched: Sequence[int],
    budgets: Sequence[int],
    bounds: Bounds,
    *,
    block_size: int,
    page_bytes: int,
) -> Recommendation:
    """The plan that holds the least memory within the bounds, for all prompts.

    Plans within `TIE` of the least memory count as equal; of them the one with the least
    padding is taken (a number of full layers that divides the layers has none), then the
    fewest groups, then the least memory.

    Args:
        prompts: What each budget loses of each prompt.
        layers: Numbers of the full-attention layers.
        untouched: Numbers of the others.
        budgets: The grid.
        bounds: What the user accepts.
        block_size: Block size of the cache manager, in tokens.
        page_bytes: Bytes of one block of one layer.
    """
    candidates = []
    for index in range(len(budgets)):
        lost = torch.stack([prompt.lost[:, index] for prompt in prompts]).amax(dim=0)
        for full in full_layer_choices(lost, layers, untouched):
            candidate = evaluate(
                prompts,
                layers,
                untouched,
                full,
                index,
                budgets,
                block_size=block_size,
                page_bytes=page_bytes,
            )
            if candidate.kv_share < 1:
                candidates.append(candidate)
    if not candidates:
        return Recommendation(None, False, 0)
    within = [candidate for candidate in candidates if bounds.hold(candidate)]
    if not within:
        least = min(candidates, key=lambda c: (c.mean_loss, c.worst_loss, c.kv_bytes))
        return Recommendation(least, False, len(candidates))
    limit = TIE * min(candidate.kv_bytes for candidate in within)
    equal = [candidate for candidate in within if candidate.kv_bytes <= limit]
    best = min(equal, key=lambda c: (c.padding_share, c.num_groups, c.kv_bytes, c.mean_loss))
    return Recommendation(best, True, len(candidates))


def loss_curves(
    prompts: Sequence[PromptLosses],
    layers: Sequence[int],
    full: tuple[int, ...] | None,
) -> dict[str, list[float]]:
    """Mean loss against budget, of the worst prompt, for some ways to choose full layers.

    Args:
        prompts: What each budget loses of each prompt.
        layers: Numbers of the full-attention layers.
        full: The recommended full layers; None if there are none to show.
    """
    ways: dict[str, tuple[int, ...]] = {"no full layer": ()}
    if full is not None:
        ways["recommended"] = full
    curves = {}
    for name, kept in ways.items():
        sieved = [index for index, layer in enumerate(layers) if layer not in kept]
        means = torch.stack([prompt.lost[sieved].mean(dim=0) for prompt in prompts])
        curves[name] = means.amax(dim=0).tolist()
    return curves


def serve_command(
    model: str, candidate: Candidate, config: SieveConfig, block_size: int
) -> list[str]:
    """The words of the command that serves a plan.

    They name every setting that is not the policy's own default, and the policy if it is not
    the default one.
    """
    words = ["kvsieve", "serve", model, "--budget", str(candidate.budget)]
    words += ["--full-layers", layer_ranges(candidate.plan.full)]
    method = find_method(config.policy)
    defaults = SieveConfig.parse({**method.defaults, "policy": method.name})
    if config.policy != SieveConfig.model_fields["policy"].default:
        words += ["--policy", config.policy]
    options = {
        name: value
        for name, value in config.policy_options.items()
        if name not in method.options or value != method.options[name]
    }
    if options:
        words += ["--policy-options", json.dumps(options)]
    if defaults.layer_budgets != "uniform":
        words += ["--layer-budgets", "uniform"]
    for field in NAMED_SETTINGS:
        value: Any = getattr(config, field)
        if value != getattr(defaults, field):
            words += [f"--{field.replace('_', '-')}", str(value)]
    return [*words, "--block-size", str(block_size)]


def as_shell(words: Sequence[str]) -> str:
    """Words as one line for a shell."""
    return shlex.join(words)


def layer_ranges(layers: Sequence[int]) -> str:
    """`(0, 1, 2, 5)` as `0-2,5`, the way `--full-layers` takes it.

    One number alone would be read as a count of leading layers: layer 5 is `5-5`, and no
    layer is the count `0`.
    """
    if not layers:
        return "0"
    text = layer_list(layers).replace(", ", ",")
    return f"{text}-{text}" if len(layers) == 1 else text
