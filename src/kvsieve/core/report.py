"""Proof that the sieve ran: on one request as it reaches the client, and in total."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class SieveReport:
    """What happened to the cache of one request.

    Token counts come from the worker, where rows move; `blocks_freed` comes from the
    cache manager, where blocks go back to the pool. Neither is computed from the
    formula that planned them.

    Attributes:
        policy: Name of the scoring policy.
        sieved: Whether the sieved layers were compacted.
        prompt_tokens: Length of the original prompt, in tokens.
        stored_tokens: Prompt tokens held per layer class (`"full"`, `"sieved"`), per KV head.
        layers: Number of layers per layer class.
        dropped_tokens: Prompt tokens dropped per KV head, summed over layers.
        blocks_freed: Blocks that the sieve gave back while the request ran.
    """

    policy: str
    sieved: bool
    prompt_tokens: int
    stored_tokens: dict[str, int]
    layers: dict[str, int]
    dropped_tokens: int = 0
    blocks_freed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


@dataclass
class SieveTotals:
    """Sums over the finished requests of one engine.

    Attributes:
        requests: Finished requests.
        sieved_requests: Those whose sieved layers were compacted.
        prompt_tokens: Prompt tokens of the sieved requests.
        stored_tokens: Prompt tokens that a sieved layer held of them.
        blocks_freed: Blocks that the sieve gave back.
        seconds: Host time of scoring and compaction, in seconds.
    """

    requests: int = 0
    sieved_requests: int = 0
    prompt_tokens: int = 0
    stored_tokens: int = 0
    blocks_freed: int = 0
    seconds: float = 0.0

    def add(self, report: SieveReport, seconds: float = 0.0) -> None:
        """Count one finished request."""
        self.requests += 1
        if report.sieved:
            self.sieved_requests += 1
            self.prompt_tokens += report.prompt_tokens
            self.stored_tokens += report.stored_tokens["sieved"]
            self.blocks_freed += report.blocks_freed
            self.seconds += seconds

    def __str__(self) -> str:
        if not self.sieved_requests:
            return f"{self.requests} requests finished, none of them longer than its budget"
        return (
            f"{self.sieved_requests} of {self.requests} requests sieved:"
            f" {self.prompt_tokens} prompt tokens, {self.stored_tokens} kept in each sieved layer,"
            f" {self.blocks_freed} blocks freed, {self.seconds:.2f} s of scoring and compaction"
        )
