"""Which layers stay full, how vLLM will group them, and what a request costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsieve.core.budget import BudgetRule, sieve_start
from kvsieve.core.errors import ConfigError

if TYPE_CHECKING:
    from kvsieve.core.tiers import LayerTier

MAX_GROUPS = 10
"""Cache groups beyond which a plan is warned of. Each costs host time in every step
(docs/benchmarks.md, "Host time")."""


@dataclass(frozen=True)
class LayerPlan:
    """Which of a model's sievable layers keep everything.

    Layers are numbered as in their vLLM names (`model.layers.7.self_attn.attn` is 7).

    Attributes:
        full: Sievable layers that keep the full cache.
        sieved: Layers that are sieved to the budget.
        untouched: Layers that the sieve does not apply to (a sliding window, say).
    """

    full: tuple[int, ...]
    sieved: tuple[int, ...]
    untouched: tuple[int, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Number of layers per layer class; classes without layers are left out."""
        named = {"full": self.full, "sieved": self.sieved, "untouched": self.untouched}
        return {name: len(layers) for name, layers in named.items() if layers}


@dataclass(frozen=True)
class Grouping:
    """vLLM's cache groups for a plan: the rule of `_get_kv_cache_groups_uniform_page_size`.

    Attributes:
        num_groups: Block tables per request.
        group_size: Layers per group; each block holds this many pages.
        padding_layers: Page slots per block that no layer uses, summed over groups.
    """

    num_groups: int
    group_size: int
    padding_layers: int

    @property
    def padding_share(self) -> float:
        """Share of the pool that the padding wastes."""
        return self.padding_layers / (self.num_groups * self.group_size)

    def num_groups_of(self, class_size: int) -> int:
        """Groups that a class of this many layers makes."""
        return math.ceil(class_size / self.group_size)


def group_layers(*class_sizes: int) -> Grouping:
    """How vLLM groups layers of several classes with equal page sizes.

    Args:
        class_sizes: Number of layers in each class; zeros are ignored.
    """
    sizes = [size for size in class_sizes if size]
    if not sizes:
        return Grouping(0, 0, 0)
    # vLLM takes the smallest class as the group size, or the largest if it is less
    # than 1.5 times as large.
    group_size = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    if len(sizes) == 1:
        group_size = sizes[0]
    num_groups = sum(math.ceil(size / group_size) for size in sizes)
    return Grouping(num_groups, group_size, num_groups * group_size - sum(sizes))


def tier_sizes(
    num_full: int, num_sieved: int, num_untouched: int, max_tiers: int
) -> tuple[int, ...]:
    """How many sieved layers each of several tiers gets, so that grouping wastes little.

    vLLM gives all cache groups the same number of layers. Tiers are therefore made of equal
    units of layers; the unit is the one that pads least, then makes the fewest groups, then the
    most even tiers. There are `max_tiers` tiers; fewer where so many would make more groups
    than the default plan may have, but two if there can be two.

    Args:
        num_full: Layers that keep everything.
        num_sieved: Sieved layers.
        num_untouched: Layers that are not sieved for another reason.
        max_tiers: The most tiers wanted.

    Returns:
        Number of layers of each tier.
    """
    num_tiers = min(max_tiers, num_sieved)
    limit = max(MAX_GROUPS, group_layers(num_full, num_sieved, num_untouched).num_groups)
    while True:
        choices = []
        for unit in range(1, num_sieved // num_tiers + 1):
            each, more = divmod(num_sieved // unit, num_tiers)
            sizes = [unit * (each + (index < more)) for index in range(num_tiers)]
            sizes[-1] += num_sieved % unit
            grouping = group_layers(num_full, *sizes, num_untouched)
            key = (grouping.num_groups > limit, grouping.padding_share, grouping.num_groups)
            choices.append((*key, max(sizes) - min(sizes), -unit, tuple(sizes)))
        is_crowded, *_, best = min(choices)
        if not is_crowded or num_tiers <= 2:
            return best
        num_tiers -= 1


def make_plan(
    sievable: tuple[int, ...],
    untouched: tuple[int, ...],
    full_layers: int | tuple[int, ...],
) -> LayerPlan:
    """The layer plan for a model.

    Args:
        sievable: Numbers of the layers with full attention, ascending.
        untouched: Numbers of the other attention layers.
        full_layers: A count of leading sievable layers, or their numbers.

    Raises:
        ConfigError: A named layer does not exist, or no layer would be sieved.
    """
    if not sievable:
        raise ConfigError(
            [
                "the model has no full-attention layer, so there is nothing to sieve; serve it"
                " without kvsieve"
            ]
        )
    if isinstance(full_layers, int):
        full = sievable[:full_layers]
    else:
        unknown = sorted(set(full_layers) - set(sievable) - set(untouched))
        if unknown:
            raise ConfigError(
                [
                    f"full_layers names layers {unknown}, but the model's layers are numbered"
                    f" {min(sievable + untouched)} to {max(sievable + untouched)}"
                ]
            )
        full = tuple(layer for layer in sievable if layer in set(full_layers))
    sieved = tuple(layer for layer in sievable if layer not in set(full))
    if not sieved:
        raise ConfigError(
            [
                f"full_layers keeps all {len(sievable)} full-attention layers full: not one layer"
                " is sieved; name fewer layers or remove the kvsieve settings"
            ]
        )
    return LayerPlan(full=full, sieved=sieved, untouched=untouched)


@dataclass(frozen=True)
class RequestCost:
    """KV memory of one request in a plan.

    Attributes:
        blocks: Blocks held, summed over the groups.
        bytes: The same in bytes.
    """

    blocks: int
    bytes: int


def request_cost(
    plan: LayerPlan,
    budgets: BudgetRule | Sequence[LayerTier] | None,
    prompt_tokens: int,
    output_tokens: int,
    block_size: int,
    page_bytes: int,
) -> RequestCost:
    """Blocks and bytes that a request holds once it has written `output_tokens` tokens.

    Args:
        plan: The layer plan; untouched layers are counted as if they kept everything.
        budgets: The budget of all sieved layers, or the tiers that they form; None for stock
            vLLM (one group, everything kept).
        prompt_tokens: Length of the prompt, in tokens.
        output_tokens: Generated tokens that are in the cache.
        block_size: Block size of the cache manager, in tokens.
        page_bytes: Bytes of one block of one layer.
    """
    all_blocks = math.ceil((prompt_tokens + output_tokens) / block_size)
    if budgets is None:
        num_layers = len(plan.full) + len(plan.untouched) + len(plan.sieved)
        return RequestCost(all_blocks, all_blocks * num_layers * page_bytes)
    if isinstance(budgets, BudgetRule):
        tiers = [(len(plan.sieved), budgets.tokens_for(prompt_tokens))]
    else:
        tiers = [(len(tier.layers), tier.rule.tokens_for(prompt_tokens)) for tier in budgets]
    grouping = group_layers(len(plan.full), *(size for size, _ in tiers), len(plan.untouched))
    kept = [(len(plan.full), 0), (len(plan.untouched), 0)]
    for size, budget in tiers:
        kept.append((size, sieve_start(prompt_tokens, budget, block_size) // block_size))
    blocks = sum(grouping.num_groups_of(size) * (all_blocks - freed) for size, freed in kept)
    return RequestCost(blocks, blocks * grouping.group_size * page_bytes)
