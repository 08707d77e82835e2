"""Proof that the sieve ran on one request, as it reaches the client."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class SieveReport:
    """What happened to the cache of one request.

    Token counts are counted on the worker, where rows move; `blocks_freed` is
    counted by the cache manager, where blocks go back to the pool.

    Attributes:
        policy: Name of the scoring policy.
        sieved: Whether at least one layer was compacted.
        prompt_tokens: Length of the original prompt, in tokens.
        stored_tokens: Prompt tokens held per layer class (`"full"`, `"sieved"`).
        layers: Number of layers per layer class.
        dropped_tokens: Prompt tokens dropped per KV head, summed over sieved layers.
        blocks_freed: Blocks that the sieve gave back while the request ran.
    """

    policy: str
    sieved: bool
    prompt_tokens: int
    stored_tokens: dict[str, int] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    dropped_tokens: int = 0
    blocks_freed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)
