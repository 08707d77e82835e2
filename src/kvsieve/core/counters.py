"""What the sieve has done since it was last asked, on its way from the scheduler to /metrics.

The scheduler counts in one `SieveCounters` and hands it over with each step's statistics;
the process that serves /metrics adds what arrives to its metrics. A hand-over is a plain
dict, because vLLM sends it through msgpack.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kvsieve.core.pruning import PrunedPrompt

GAUGES = ("blocks_held", "pool_blocks", "mode")
"""Fields that say how things are, and not what was added."""


@dataclass
class SieveCounters:
    """Sums since the last hand-over, and the last known values of the gauges.

    Attributes:
        requests: Requests that arrived, by the mode they are served in.
        sieved_requests: Requests whose sieved layers were compacted, each counted once even
            if it was preempted and had to be sieved again.
        prompt_tokens: Prompt tokens of those, each prompt once and not once per layer.
        kept_tokens: Of these, tokens that a sieved layer holds per KV head; of each request
            the mean over the sieved layers, rounded up.
        dropped_tokens: `prompt_tokens` less `kept_tokens`.
        freed_blocks: Blocks that went back to the pool because their tokens were dropped.
        compactions: Compactions of one request's cache in one layer, repeated ones included.
        shadow_dropped_tokens: What `dropped_tokens` would have been of the requests that were
            only scored.
        compaction_seconds: Host time of scoring and compaction, in seconds, by mode; in shadow
            mode of scoring alone.
        attention_mass_lost: By mode, for each request that was scored, the share of the
            window's attention that falls on dropped tokens, mean over layers.
        layer_mass_lost: The same shares by mode and layer number (as text), not averaged.
        pruned_requests: Requests whose prompt was read with pruning, by "method/reason"; with the
            reason "never" no token was pruned.
        prune_layers: By method, the layer at which each of them was pruned.
        prune_seconds_saved: Prefill time that pruning saved, as estimated from the layers that ran.
        blocks_held: Blocks in use by layer class, or None if never counted.
        pool_blocks: Blocks that the pool can give to requests, or None if not known.
        mode: The engine's mode, or None if not known.
    """

    requests: dict[str, int] = field(default_factory=dict)
    sieved_requests: int = 0
    prompt_tokens: int = 0
    kept_tokens: int = 0
    dropped_tokens: int = 0
    freed_blocks: int = 0
    compactions: int = 0
    shadow_dropped_tokens: int = 0
    compaction_seconds: dict[str, float] = field(default_factory=dict)
    attention_mass_lost: dict[str, list[float]] = field(default_factory=dict)
    layer_mass_lost: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    pruned_requests: dict[str, int] = field(default_factory=dict)
    prune_layers: dict[str, list[int]] = field(default_factory=dict)
    prune_seconds_saved: float = 0.0
    blocks_held: dict[str, int] | None = None
    pool_blocks: int | None = None
    mode: str | None = None
    _handed_over: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def add_request(self, mode: str) -> None:
        """Count a request that arrived and is served in this mode."""
        self.requests[mode] = self.requests.get(mode, 0) + 1

    def add_row(
        self,
        *,
        prompt_tokens: int,
        stored_tokens: int,
        num_layers: int,
        seconds: float,
        mode: str,
        mass_lost: Sequence[float] = (),
        layers: Sequence[int] = (),
        again: bool = False,
        pruned: PrunedPrompt | None = None,
    ) -> None:
        """Count one prompt that the worker sieved, or scored in shadow mode.

        Args:
            prompt_tokens: Length of the original prompt, in tokens.
            stored_tokens: Prompt tokens that a sieved layer holds, per KV head; the mean over
                the sieved layers, rounded up, where budgets differ by layer.
            num_layers: Layers that were compacted.
            seconds: Host time, in seconds.
            mode: "sieve", or "shadow": nothing was moved, so nothing is kept or dropped.
            mass_lost: Share of the window's attention on dropped tokens, per layer.
            layers: The layer's number for each share.
            again: Whether the request was counted before; only work is counted then.
            pruned: What pruning did while the prompt was read.
        """
        self.compaction_seconds[mode] = self.compaction_seconds.get(mode, 0.0) + seconds
        if mode == "sieve":
            self.compactions += num_layers
        if again:
            return
        if pruned is not None:
            key = f"{pruned.method}/{pruned.reason}"
            self.pruned_requests[key] = self.pruned_requests.get(key, 0) + 1
            self.prune_seconds_saved += pruned.seconds_saved
            if pruned.layer is not None:
                self.prune_layers.setdefault(pruned.method, []).append(pruned.layer)
        if mode == "sieve":
            self.sieved_requests += 1
            self.prompt_tokens += prompt_tokens
            self.kept_tokens += stored_tokens
            self.dropped_tokens += prompt_tokens - stored_tokens
        else:
            self.shadow_dropped_tokens += prompt_tokens - stored_tokens
        # One share that is not a number would make the sum of a histogram useless for good.
        shares = [
            (str(layer), float(share))
            for layer, share in zip(layers, mass_lost, strict=True)
            if math.isfinite(share)
        ]
        for layer, share in shares:
            self.layer_mass_lost.setdefault(mode, {}).setdefault(layer, []).append(share)
        if shares:
            mean = sum(share for _, share in shares) / len(shares)
            self.attention_mass_lost.setdefault(mode, []).append(mean)

    def merge(self, other: SieveCounters) -> None:
        """Add the sums of `other`, and take the gauges that it knows."""
        for mode, count in other.requests.items():
            self.requests[mode] = self.requests.get(mode, 0) + count
        self.sieved_requests += other.sieved_requests
        self.prompt_tokens += other.prompt_tokens
        self.kept_tokens += other.kept_tokens
        self.dropped_tokens += other.dropped_tokens
        self.freed_blocks += other.freed_blocks
        self.compactions += other.compactions
        self.shadow_dropped_tokens += other.shadow_dropped_tokens
        for mode, seconds in other.compaction_seconds.items():
            self.compaction_seconds[mode] = self.compaction_seconds.get(mode, 0.0) + seconds
        for mode, means in other.attention_mass_lost.items():
            self.attention_mass_lost.setdefault(mode, []).extend(means)
        for mode, layers in other.layer_mass_lost.items():
            for layer, shares in layers.items():
                self.layer_mass_lost.setdefault(mode, {}).setdefault(layer, []).extend(shares)
        for key, count in other.pruned_requests.items():
            self.pruned_requests[key] = self.pruned_requests.get(key, 0) + count
        for method, numbers in other.prune_layers.items():
            self.prune_layers.setdefault(method, []).extend(numbers)
        self.prune_seconds_saved += other.prune_seconds_saved
        for name in GAUGES:
            if (value := getattr(other, name)) is not None:
                setattr(self, name, value)

    def as_dict(self) -> dict[str, Any]:
        """The sums that are not zero and the gauges that are known, as plain JSON values."""
        return {
            name: value
            for name in _NAMES
            if (value := getattr(self, name)) or (name in GAUGES and value is not None)
        }

    def take(self) -> dict[str, Any] | None:
        """Hand over what is new and start the sums again from zero.

        Returns:
            `as_dict()` without gauges that did not change, or None if nothing is new.
        """
        taken = {
            name: value
            for name, value in self.as_dict().items()
            if name not in GAUGES or value != self._handed_over.get(name)
        }
        for name in taken.keys() & set(GAUGES):
            # A copy: in one process the receiver would see what is counted into it later.
            self._handed_over[name] = taken[name] = copy.copy(taken[name])
        empty = SieveCounters()
        for name in _NAMES:
            if name not in GAUGES:
                setattr(self, name, getattr(empty, name))
        return taken or None

    @classmethod
    def from_dict(cls, handed_over: Mapping[str, Any]) -> SieveCounters:
        """What `take` or `as_dict` returned, as counters again.

        Raises:
            TypeError: There is a key that no field has.
        """
        if unknown := set(handed_over) - set(_NAMES):
            raise TypeError(f"unknown counters: {', '.join(sorted(unknown))}")
        return cls(**handed_over)


_NAMES = tuple(each.name for each in fields(SieveCounters) if not each.name.startswith("_"))
