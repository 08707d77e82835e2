"""How many tokens a sieved layer keeps, and where the kept region starts.

Everything here is a pure function of the prompt's length and of settings, so
that scheduler and worker agree without exchanging a message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class BudgetRule:
    """The nominal budget of a sieved layer as a function of the prompt length.

    Exactly one of `tokens` and `share` is set.

    Attributes:
        tokens: Budget in tokens per KV head.
        share: Budget as a share of the prompt, in (0, 1].
        min_tokens: Lower bound on the resulting budget, in tokens.
        max_tokens: Upper bound on the resulting budget, in tokens.
    """

    tokens: int | None = None
    share: float | None = None
    min_tokens: int = 1
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.share is None):
            raise ValueError("a BudgetRule takes either tokens or share, and not both")

    def tokens_for(self, prompt_tokens: int) -> int:
        """The nominal budget, in tokens, of a prompt of `prompt_tokens` tokens."""
        if self.tokens is not None:
            budget = self.tokens
        else:
            assert self.share is not None
            # 14% of 11,750 tokens is 1,645, and 1645.0000000000002 in floating point.
            budget = math.ceil(prompt_tokens * self.share * (1 - 1e-12))
        return self.within_bounds(budget)

    def within_bounds(self, budget: int) -> int:
        """The nearest budget to one in tokens that the bounds allow."""
        budget = max(budget, self.min_tokens)
        return budget if self.max_tokens is None else min(budget, self.max_tokens)

    @property
    def smallest(self) -> int:
        """The smallest budget that the rule can give to any prompt, in tokens."""
        return self.tokens_for(1)

    def __str__(self) -> str:
        if self.tokens is not None:
            return f"{self.tokens_for(1)} tokens"
        assert self.share is not None
        ceiling = "" if self.max_tokens is None else f", at most {self.max_tokens}"
        return f"{self.share:.4g} of the prompt (at least {self.min_tokens}{ceiling})"


def sieve_start(prompt_tokens: int, budget: int, block_size: int) -> int:
    """First position that a sieved layer still holds once the prompt is sieved.

    The start is aligned down to a block, so that the leading blocks can be given
    back whole: `budget <= prompt_tokens - start < budget + block_size` for every
    prompt longer than its budget, and 0 for every other.

    Args:
        prompt_tokens: The original prompt length, also after a preemption.
        budget: Nominal budget in tokens.
        block_size: Block size of the cache *manager* (not the kernel's), in tokens.
    """
    return max(0, (prompt_tokens - budget) // block_size * block_size)


def stored_tokens(prompt_tokens: int, budget: int, block_size: int) -> int:
    """Tokens of the prompt that a sieved layer stores after the sieve, per KV head."""
    return prompt_tokens - sieve_start(prompt_tokens, budget, block_size)


def smallest_budget(num_recent_tokens: int, num_sink_tokens: int, block_size: int) -> int:
    """The smallest budget that leaves room for recent tokens, sinks and one block, in tokens."""
    return num_recent_tokens + num_sink_tokens + block_size
