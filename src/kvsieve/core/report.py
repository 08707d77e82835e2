"""Proof that the sieve ran: on one request as it reaches the client, and in the log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvsieve.core.notation import layer_list
from kvsieve.core.pruning import PrunedPrompt
from kvsieve.core.treatment import Mode


@dataclass(frozen=True)
class MassLost:
    """Share of the window's attention that went to tokens that are (or would be) dropped.

    The share of a layer is the mean over its query heads of the softmax weight that the
    prompt's last `observation_window` queries gave to dropped positions.

    Attributes:
        mean: Mean over the layers.
        max: The worst layer's share.
        layers: Share per layer, by layer number.
    """

    mean: float
    max: float
    layers: dict[str, float]

    @classmethod
    def of(cls, layers: tuple[int, ...], shares: tuple[float, ...]) -> MassLost | None:
        """Summarise the shares of the layers, rounded to what they are worth.

        Returns:
            The summary; None without layers, or if a share is not a number, which JSON could not
            carry.
        """
        if not shares or not all(map(math.isfinite, shares)):
            return None
        rounded = [round(share, 5) for share in shares]
        return cls(
            mean=round(sum(shares) / len(shares), 5),
            max=max(rounded),
            layers=dict(zip(map(str, layers), rounded, strict=True)),
        )


@dataclass(frozen=True)
class TierStored:
    """Prompt tokens that the layers of one tier hold.

    Attributes:
        layers: The layers, such as `"3-11"`.
        stored_tokens: Tokens held per KV head.
    """

    layers: str
    stored_tokens: int


@dataclass(frozen=True)
class LayersStored:
    """Prompt tokens that the sieved layers hold of one prompt, as counted where rows moved.

    Attributes:
        prompt_tokens: Length of the prompt, in tokens.
        counted: Tokens per KV head of each layer that was sieved, by layer number. All other
            sieved layers hold the whole prompt.
    """

    prompt_tokens: int
    counted: dict[int, int]

    @property
    def dropped_tokens(self) -> int:
        """Prompt tokens dropped per KV head, summed over the layers."""
        return sum(self.prompt_tokens - stored for stored in self.counted.values())

    def mean(self, num_layers: int) -> int:
        """Mean over so many sieved layers, rounded up, in tokens."""
        return self.prompt_tokens - self.dropped_tokens // num_layers

    def by_tier(self, tiers: Sequence[tuple[int, ...]]) -> list[TierStored]:
        """What each tier holds, of the layers that it has; a mean is rounded up."""
        stored = []
        for layers in tiers:
            counted = {each: self.counted[each] for each in layers if each in self.counted}
            mean = LayersStored(self.prompt_tokens, counted).mean(len(layers))
            stored.append(TierStored(layer_list(layers).replace(", ", ","), mean))
        return stored


@dataclass
class SieveReport:
    """What happened to the cache of one request.

    Token counts and attention come from the worker, where rows move; `blocks_freed` comes
    from the cache manager, where blocks go back to the pool. Neither is computed from the
    formula that planned them.

    Attributes:
        policy: Name of the scoring policy.
        mode: "sieve", "shadow" or "full", as decided when the request arrived.
        budget: Nominal budget of the request in tokens, the mean over the sieved layers; None
            in mode "full".
        sieved: Whether the sieved layers were compacted.
        prompt_tokens: Length of the original prompt, in tokens.
        stored_tokens: Prompt tokens held per layer class (`"full"`, `"sieved"`), per KV head;
            the mean over the sieved layers, rounded up, where budgets differ by layer.
        layers: Number of layers per layer class.
        dropped_tokens: Prompt tokens dropped per KV head, summed over layers.
        would_drop_tokens: In shadow mode, what `dropped_tokens` would have been.
        blocks_freed: Blocks that the sieve gave back while the request ran.
        protected_tokens: Prompt tokens that the policy keeps whatever their score: sinks, the last
            ones and named spans. 0 if the prompt fits its budget. Layers beyond the one where a
            prompt was pruned follow the pruning method's rules instead.
        attention_mass_lost: Attention to what was, or would be, dropped; None if the
            prompt fits its budget, or the model's attention is not a number.
        tiers: Prompt tokens held per tier; None if all sieved layers have the same budget.
        pruned: What pruning did while the prompt was read; None if it was not asked for.
        not_pruned: Why pruning that was asked for was not done; None if it was, and in other modes
            than "sieve".
    """

    policy: str
    mode: Mode
    budget: int | None
    sieved: bool
    prompt_tokens: int
    stored_tokens: dict[str, int]
    layers: dict[str, int]
    dropped_tokens: int = 0
    would_drop_tokens: int = 0
    blocks_freed: int = 0
    protected_tokens: int = 0
    attention_mass_lost: MassLost | None = None
    tiers: list[TierStored] | None = None
    pruned: PrunedPrompt | None = None
    not_pruned: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


def pruning_sentence(report: Mapping[str, Any]) -> str | None:
    """What pruning did to a request, or why it did nothing; None if it was not asked for.

    Args:
        report: What `SieveReport.as_dict` gives.
    """
    if report["not_pruned"] is not None:
        return f"not pruned: {report['not_pruned']}"
    pruned = report["pruned"]
    if pruned is None:
        return None
    if pruned["layer"] is None:
        return f"{pruned['method']} pruned nothing: the ranks of tokens did not settle"
    return (
        f"{pruned['method']} pruned after layer {pruned['layer']} ({pruned['reason']}):"
        f" {pruned['kept_tokens']} of {report['prompt_tokens']} tokens went on,"
        f" {100 * pruned['computed_share']:.0f}% of the prompt's work was done, about"
        f" {pruned['seconds_saved']:.2f} s saved"
    )


@dataclass
class SieveTotals:
    """Sums over the finished requests of one engine, for the log.

    Attributes:
        requests: Finished requests.
        sieved_requests: Those whose sieved layers were compacted.
        shadow_requests: Those that were only scored.
        prompt_tokens: Prompt tokens of the sieved requests.
        stored_tokens: Prompt tokens that a sieved layer held of them, in the mean.
        blocks_freed: Blocks that the sieve gave back.
        mass_lost: Sum over the scored requests of the attention mass lost.
        scored_requests: Sieved requests of which that is known.
        shadow_mass_lost: Sum over the shadow requests of what would have been lost.
        seconds: Host time of scoring and compaction, in seconds.
        pruned_requests: Of the sieved requests those that were read with pruning, by method.
        unpruned_requests: Of the sieved requests those that were to be pruned and could not be.
        computed_share: Sum over the pruned requests of the share of the work on their prompt that
            the layers did.
        prune_seconds_saved: Prefill time that pruning saved, in seconds; an estimate.
    """

    requests: int = 0
    sieved_requests: int = 0
    shadow_requests: int = 0
    prompt_tokens: int = 0
    stored_tokens: int = 0
    blocks_freed: int = 0
    mass_lost: float = 0.0
    scored_requests: int = 0
    shadow_mass_lost: float = 0.0
    seconds: float = 0.0
    pruned_requests: dict[str, int] = field(default_factory=dict)
    unpruned_requests: int = 0
    computed_share: float = 0.0
    prune_seconds_saved: float = 0.0

    def add(self, report: SieveReport, seconds: float = 0.0) -> None:
        """Count one finished request."""
        self.requests += 1
        self.seconds += seconds
        # A prompt that was read twice has no such number, which is not the same as none lost.
        lost = report.attention_mass_lost.mean if report.attention_mass_lost else 0.0
        if report.would_drop_tokens:
            self.shadow_requests += 1
            self.shadow_mass_lost += lost
        if not report.sieved:
            return
        self.sieved_requests += 1
        self.mass_lost += lost
        self.scored_requests += report.attention_mass_lost is not None
        self.prompt_tokens += report.prompt_tokens
        self.stored_tokens += report.stored_tokens["sieved"]
        self.blocks_freed += report.blocks_freed
        if (pruned := report.pruned) is not None:
            counted = self.pruned_requests.get(pruned.method, 0)
            self.pruned_requests[pruned.method] = counted + 1
            self.computed_share += pruned.computed_share
            self.prune_seconds_saved += pruned.seconds_saved
        elif report.not_pruned is not None:
            self.unpruned_requests += 1

    def __str__(self) -> str:
        parts = [f"{self.requests} request{'' if self.requests == 1 else 's'} finished"]
        if self.sieved_requests:
            parts.append(
                f"{self.sieved_requests} sieved: {self.prompt_tokens} prompt tokens,"
                f" {self.stored_tokens} kept per sieved layer, {self.blocks_freed} blocks"
                f" freed"
            )
            if self.scored_requests:
                lost = 100 * self.mass_lost / self.scored_requests
                parts[-1] += f", {lost:.2f}% of attention lost"
        if num_pruned := sum(self.pruned_requests.values()):
            methods = ", ".join(f"{count} {name}" for name, count in self.pruned_requests.items())
            parts.append(
                f"{num_pruned} pruned while read ({methods}):"
                f" {100 * self.computed_share / num_pruned:.0f}% of their prompts' work done, about"
                f" {self.prune_seconds_saved:.2f} s saved"
            )
        if self.unpruned_requests:
            parts.append(f"{self.unpruned_requests} to be pruned and could not be")
        if self.shadow_requests:
            would = 100 * self.shadow_mass_lost / self.shadow_requests
            parts.append(
                f"{self.shadow_requests} in shadow: {would:.2f}% of attention would be lost"
            )
        if not self.sieved_requests and not self.shadow_requests:
            return f"{parts[0]}, none of them longer than its budget"
        parts.append(f"{self.seconds:.2f} s of scoring and compaction")
        return "; ".join(parts)
