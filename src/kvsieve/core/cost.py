"""What a request costs: blocks and bytes of the cache, in a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvsieve.core.budget import BudgetRule, sieve_start
from kvsieve.core.plan import LayerPlan, group_layers
from kvsieve.core.tiers import LayerTier


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
