"""Concentration: how many tokens hold most of the attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MASS_SHARES = (0.90, 0.95, 0.99)
"""Shares of the attention mass that are reported."""


@dataclass(frozen=True)
class HeadSpread:
    """A count of tokens over the heads of a layer.

    Attributes:
        mean: Mean over the query heads, in tokens.
        std: Standard deviation over the heads (population), in tokens.
        min: The most concentrated head, in tokens.
        max: The most diffuse head, in tokens.
    """

    mean: float
    std: float
    min: int
    max: int


def tokens_holding(mass: torch.Tensor, share: float) -> torch.Tensor:
    """The smallest number of positions that together hold a share of the mass, per head.

    Args:
        mass: [num_heads, num_tokens] non-negative, not all zero in a head.
        share: Share of each head's whole mass, in (0, 1].

    Returns:
        [num_heads] int64.
    """
    # Head by head, for memory: all heads of a long prompt in float64 would be more than a slice.
    counts = []
    for head in mass:
        held = head.double().sort(descending=True).values.cumsum(dim=0)
        # What rounding adds in the last digits must not ask for one token more: of four equal
        # weights, three hold 75%.
        counts.append((held < share * held[-1] * (1 - 1e-9)).sum() + 1)
    return torch.stack(counts)


def concentration(
    mass: torch.Tensor, shares: Sequence[float] = MASS_SHARES
) -> dict[float, HeadSpread]:
    """Tokens that hold each share of a layer's attention mass, over its heads.

    Args:
        mass: [num_heads, num_tokens], attention summed over a set of queries.
        shares: Shares of the mass, in (0, 1].
    """
    spreads = {}
    for share in shares:
        tokens = tokens_holding(mass, share)
        spreads[share] = HeadSpread(
            mean=float(tokens.double().mean()),
            std=float(tokens.double().std(unbiased=False)),
            min=int(tokens.min()),
            max=int(tokens.max()),
        )
    return spreads
