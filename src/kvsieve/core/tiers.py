"""Which sieved layer keeps how much: one budget, a pyramid, or budgets by layers.

Layers with one budget are a *tier*, and tiers are what the cache manager knows: each makes
cache groups of its own. Like all budgets, a tier's is a pure function of the prompt's length,
of settings and of the request's own budget, so that scheduler and worker agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from kvsieve.core.budget import BudgetRule
from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError
from kvsieve.core.notation import layer_list
from kvsieve.core.plan import LayerPlan, tier_sizes

BETA = 20
"""Steepness of the pyramid: the last layer's share of the mean is 1/20 (PyramidKV)."""


def pyramid(
    prompt_tokens: int, budget: int, recent_tokens: int, smallest: int, num_layers: int
) -> tuple[int, ...]:
    """PyramidKV's budget of each layer, with a mean that is exact (arXiv 2406.02069).

    Capacities beyond the recent tokens fall in a line from the first layer to the last; the last
    has 1/20 of the mean, or what is legal. A prompt shorter than twice the mean's capacity gets
    the same budget everywhere. The published code rounds every layer down and so misses the mean;
    here the tokens that rounding takes go to the first layers that it took them from.

    Args:
        prompt_tokens: Length of the prompt, in tokens.
        budget: Mean over the layers, in tokens; at least `smallest`.
        recent_tokens: Last tokens of the prompt, which every layer keeps.
        smallest: The smallest budget that a layer may have, in tokens.
        num_layers: Number of layers.

    Returns:
        Budgets in tokens, from the first layer to the last, falling.
    """
    mean = budget - recent_tokens
    if prompt_tokens < max(budget, 2 * mean) or num_layers == 1:
        return (budget,) * num_layers
    least = max(mean // BETA, smallest - recent_tokens)
    most = 2 * mean - least
    if most >= prompt_tokens - recent_tokens:
        most = prompt_tokens - recent_tokens
        least = 2 * mean - most
    steps = num_layers - 1
    line = [most * steps - layer * (most - least) for layer in range(num_layers)]
    return tuple(recent_tokens + tokens for tokens in falling_quotients(line, [steps] * num_layers))


def falling_quotients(totals: Sequence[int], counts: Sequence[int]) -> list[int]:
    """The quotients `totals / counts` as whole numbers that fall like them, near in their sum.

    All are rounded down; what that takes goes to the first of those that it was taken from, as
    far as it reaches. The sum of `quotient * count` falls short of the totals' by less than the
    largest count; with equal counts by the part that they cannot share, if any.

    Args:
        totals: Numerators; the quotients must not rise.
        counts: Denominators.
    """
    quotients = [divmod(total, count) for total, count in zip(totals, counts, strict=True)]
    rounded = [quotient for quotient, _ in quotients]
    spare = sum(rest for _, rest in quotients)
    for index, (_, rest) in enumerate(quotients):
        still_falls = index == 0 or rounded[index] < rounded[index - 1]
        if rest and counts[index] <= spare and still_falls:
            rounded[index] += 1
            spare -= counts[index]
    return rounded


@lru_cache(maxsize=1024)
def in_proportion(
    parts: tuple[int, ...], counts: tuple[int, ...], mean: int, least: int, most: int
) -> tuple[int, ...]:
    """Whole numbers in proportion to `parts` and of a given mean, as far as bounds allow.

    What a bound takes from one, or gives to it, the others share. The mean falls short by less
    than 1, except where the bounds themselves are beyond it.

    Args:
        parts: The proportion, at least 1 each.
        counts: How often each of the numbers counts in the mean.
        mean: Their mean.
        least: Lower bound of each number.
        most: Upper bound of each number, at least `least`.
    """
    # One level for all of them, so fine that a step of it raises no number by more than 1.
    steps = max(parts)

    def at(level: int) -> tuple[int, ...]:
        return tuple(min(max(part * level // steps, least), most) for part in parts)

    # At the higher level all are at their upper bound.
    low, high = 0, -(-most * steps // min(parts))
    while low < high:
        middle = (low + high + 1) // 2
        total = sum(number * count for number, count in zip(at(middle), counts, strict=True))
        if total <= mean * sum(counts):
            low = middle
        else:
            high = middle - 1
    return at(low)


@lru_cache(maxsize=1024)
def _pyramid_tiers(
    prompt_tokens: int, budget: int, recent_tokens: int, smallest: int, sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """The pyramid's budget of each tier: the mean of its layers'."""
    layers = pyramid(prompt_tokens, budget, recent_tokens, smallest, sum(sizes))
    ends = list(accumulate(sizes))
    totals = [sum(layers[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    return tuple(falling_quotients(totals, sizes))


@dataclass(frozen=True)
class UniformBudgets:
    """The same budget for every sieved layer.

    Attributes:
        rule: The budget.
    """

    rule: BudgetRule

    def mean(self, prompt_tokens: int, requested: BudgetRule | None = None) -> int:
        """The mean over the layers that is aimed at, in tokens."""
        return (requested or self.rule).tokens_for(prompt_tokens)

    def per_tier(self, prompt_tokens: int, requested: BudgetRule | None = None) -> tuple[int, ...]:
        """The nominal budget of each tier, in tokens."""
        return (self.mean(prompt_tokens, requested),)


@dataclass(frozen=True)
class PyramidBudgets:
    """A pyramid over the sieved layers, in steps of several layers.

    The mean over the layers falls short of the budget by less than a token, and by nothing
    before it is brought into steps.

    Attributes:
        rule: The mean over the layers.
        recent_tokens: Last tokens of the prompt, which every layer keeps.
        smallest: The smallest budget that a layer may have, in tokens.
        sizes: Number of layers of each tier, from the first layers to the last.
    """

    rule: BudgetRule
    recent_tokens: int
    smallest: int
    sizes: tuple[int, ...]

    def mean(self, prompt_tokens: int, requested: BudgetRule | None = None) -> int:
        """The mean over the layers that is aimed at, in tokens."""
        return (requested or self.rule).tokens_for(prompt_tokens)

    def per_tier(self, prompt_tokens: int, requested: BudgetRule | None = None) -> tuple[int, ...]:
        """The nominal budget of each tier, in tokens."""
        return _pyramid_tiers(
            prompt_tokens,
            self.mean(prompt_tokens, requested),
            self.recent_tokens,
            self.smallest,
            self.sizes,
        )

    def per_layer(self, prompt_tokens: int, requested: BudgetRule | None = None) -> tuple[int, ...]:
        """The nominal budget of each layer before it is brought into steps, in tokens."""
        mean = self.mean(prompt_tokens, requested)
        return pyramid(prompt_tokens, mean, self.recent_tokens, self.smallest, sum(self.sizes))


@dataclass(frozen=True)
class ExplicitBudgets:
    """Budgets by layers, as the operator gave them.

    Attributes:
        rules: Budget of each tier.
        sizes: Number of layers of each tier.
        rule: The mean to which all are scaled; None to leave them as they are.
    """

    rules: tuple[BudgetRule, ...]
    sizes: tuple[int, ...]
    rule: BudgetRule | None = None

    def mean(self, prompt_tokens: int, requested: BudgetRule | None = None) -> int:
        """The mean over the layers that is aimed at, in tokens; rounded up if nobody named one."""
        if wanted := requested or self.rule:
            return wanted.tokens_for(prompt_tokens)
        total = sum(
            size * rule.tokens_for(prompt_tokens)
            for size, rule in zip(self.sizes, self.rules, strict=True)
        )
        return -(-total // sum(self.sizes))

    def per_tier(self, prompt_tokens: int, requested: BudgetRule | None = None) -> tuple[int, ...]:
        """The nominal budget of each tier, in tokens; scaled ones as `in_proportion` says."""
        given = tuple(rule.tokens_for(prompt_tokens) for rule in self.rules)
        wanted = requested or self.rule
        if wanted is None:
            return given
        mean = wanted.tokens_for(prompt_tokens)
        if mean >= prompt_tokens:
            # The whole prompt was asked for, in every layer.
            return (mean,) * len(given)
        # The bounds are the operator's, and the same in every rule.
        bounds = self.rules[0]
        most = bounds.within_bounds(prompt_tokens)
        return in_proportion(given, self.sizes, mean, bounds.min_tokens, most)


@dataclass(frozen=True)
class TierRule:
    """The nominal budget of one tier, as a function of prompt length and request.

    Rules of two tiers differ even where they give the same numbers, so that vLLM never makes
    one cache group of them.

    Attributes:
        budgets: The budgets of all tiers.
        index: Which of them.
    """

    budgets: UniformBudgets | PyramidBudgets | ExplicitBudgets
    index: int = 0

    def tokens_for(self, prompt_tokens: int, requested: BudgetRule | None = None) -> int:
        """The tier's nominal budget for a prompt, in tokens.

        Args:
            prompt_tokens: The original prompt length.
            requested: A request's own budget, which takes the place of the mean over the layers:
                a pyramid is made anew around it, budgets by layers are scaled.
        """
        return self.budgets.per_tier(prompt_tokens, requested)[self.index]

    def mean_for(self, prompt_tokens: int, requested: BudgetRule | None = None) -> int:
        """The mean over all sieved layers that is aimed at, in tokens."""
        return self.budgets.mean(prompt_tokens, requested)

    def __str__(self) -> str:
        if isinstance(self.budgets, UniformBudgets):
            return str(self.budgets.rule)
        if isinstance(self.budgets, PyramidBudgets):
            tiers = len(self.budgets.sizes)
            return f"tier {self.index + 1} of {tiers} of a pyramid around {self.budgets.rule}"
        scaled = "" if self.budgets.rule is None else f", scaled to a mean of {self.budgets.rule}"
        return f"{self.budgets.rules[self.index]}{scaled}"


@dataclass(frozen=True)
class LayerTier:
    """Sieved layers with one budget.

    Attributes:
        layers: Their numbers, ascending.
        rule: Their budget.
    """

    layers: tuple[int, ...]
    rule: TierRule


def uniform_tier(rule: BudgetRule) -> TierRule:
    """One budget for all layers, as a tier's."""
    return TierRule(UniformBudgets(rule))


def make_tiers(config: SieveConfig, plan: LayerPlan, block_size: int) -> tuple[LayerTier, ...]:
    """The tiers of a model's sieved layers.

    Args:
        config: The operator's settings.
        plan: Which layers are sieved.
        block_size: Block size of the cache manager, in tokens.

    Returns:
        Tiers by their first layer; every sieved layer is in one of them.

    Raises:
        ConfigError: No layer is sieved, a budget is too small, or budgets by layers do not name
            every sieved layer once and no other.
    """
    reasons: list[str] = []
    if not plan.sieved:
        reasons.append("the layer plan has no sieved layer, so there is nothing to give a budget")
    try:
        rule = config.budget_rule(block_size)
    except ConfigError as error:
        reasons += error.reasons
    if isinstance(config.layer_budgets, dict):
        reasons += _wrong_layers(config.named_layers, plan)
    if reasons:
        raise ConfigError(reasons)
    if config.layer_budgets == "uniform":
        return (LayerTier(plan.sieved, uniform_tier(rule)),)
    if config.layer_budgets == "pyramid":
        sizes = tier_sizes(len(plan.full), len(plan.sieved), len(plan.untouched), config.max_tiers)
        smallest = config.smallest_legal_budget(block_size)
        budgets = PyramidBudgets(rule, config.recent_tokens, smallest, sizes)
        ends = list(accumulate(sizes))
        return tuple(
            LayerTier(plan.sieved[end - size : end], TierRule(budgets, index))
            for index, (end, size) in enumerate(zip(ends, sizes, strict=True))
        )
    layers_of: dict[BudgetRule, list[int]] = {}
    for layers, layer_rule in config.layer_rules(block_size):
        layers_of.setdefault(layer_rule, []).extend(layers)
    tiers = sorted((tuple(sorted(layers)), each) for each, layers in layers_of.items())
    explicit = ExplicitBudgets(
        rules=tuple(each for _, each in tiers),
        sizes=tuple(len(layers) for layers, _ in tiers),
        rule=rule if config.is_budget_used else None,
    )
    return tuple(
        LayerTier(layers, TierRule(explicit, index)) for index, (layers, _) in enumerate(tiers)
    )


def _wrong_layers(named: set[int], plan: LayerPlan) -> list[str]:
    """What is wrong with budgets by layers that leave out a sieved layer or name another."""
    wrong = {
        "leaves out the sieved layers": set(plan.sieved) - named,
        "names layers that keep everything": named & set(plan.full),
        "names layers that cannot be sieved": named & set(plan.untouched),
        "names layers that the model does not have": named
        - {*plan.sieved, *plan.full, *plan.untouched},
    }
    reasons = [
        f"layer_budgets {what}: {layer_list(sorted(layers))}"
        for what, layers in wrong.items()
        if layers
    ]
    if reasons:
        reasons[-1] += f" (sieved: {layer_list(plan.sieved)})"
    return reasons


def smallest_budget_of(config: SieveConfig, block_size: int) -> int:
    """A lower bound on the length of a prompt that is sieved anywhere, in tokens.

    It needs no layers: where budgets are not scaled, no layer is sieved of a prompt that is
    shorter than the smallest of them, and under a pyramid of none that is shorter than the mean.

    Raises:
        ConfigError: A budget can fall below the smallest legal one.
    """
    rule = config.budget_rule(block_size)
    rules = config.layer_rules(block_size)
    if not rules:
        return rule.smallest
    if config.is_budget_used:
        return config.smallest_request_budget(block_size)
    return min(each.smallest for _, each in rules)
