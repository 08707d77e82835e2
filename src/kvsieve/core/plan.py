"""Which layers stay full, and how vLLM will group them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvsieve.core.errors import ConfigError

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
    than `MAX_GROUPS`, but two if there can be two.

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
