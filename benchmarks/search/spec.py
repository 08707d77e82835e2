"""A candidate as data, written `key=value,key=value`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Spec:
    """How the tokens of a prompt are ranked and chosen. Steps run in this order.

    Attributes:
        source: What is scored: "window" (softmax attention of the last queries), "sample"
            (the same of queries spread over the prompt, moved to its end), "keydiff" (1 minus
            the cosine of a key to the mean of the normalised keys), "localdiff" (to the mean
            of 129 keys around it), "knorm" (minus the norm of a key), "recency".
        window: Queries of "window".
        recent: Last tokens that are always kept; -1: as many as `window`.
        agg: Over queries: "sum", "sq" (sum of squares), "max", or "lin" (the last query
            weighs most, the first nothing).
        value: "none", "norm" (times the norm of the value) or "wo" (times the mean over the
            group of the L1 norm of W_O v).
        heads: Each query head's scores divided by: "none", their "max" or their "sum".
        reduce: Query heads of a group to one: "mean" or "max".
        share: Weight of the mean over the KV heads, in [0, 1]; 1: one ranking for all heads.
        norm: Each KV head's scores divided by "none", their "max" or "sum", before sharing.
        pool: Poolings in order, such as "avg:21+max:7"; "max:5:15" covers 5 to the left and
            15 to the right; "both:7:21" is the sum of two averages; "tent:21" the maximum of
            neighbours weighted by distance; "" for none.
        chunk: Tokens of a chunk; 0 for none. A chunk is kept as a whole.
        stat: Of a chunk: "mean", "max", or "top4" (mean of its best 4).
        mix: Share of the free budget that goes to the best of `mix_with`, after the others.
        mix_with: "keydiff" or "recency".
        two: Share of the free budget that is chosen without `value`, as in CriticalKV, and the
            rest with it; 0: `value` decides alone.
        sinks: First tokens that are always kept.
        full: Layers that keep everything, such as "0-2" or "0/15/29"; "" for none.
        slope: Budget of the first sieved layer minus the last, as a share of the mean.
        blocks: Whether storage comes in blocks of 32, as kvsieve's does.
    """

    source: str = "window"
    window: int = 32
    recent: int = -1
    agg: str = "sum"
    value: str = "none"
    heads: str = "none"
    reduce: str = "mean"
    share: float = 0.0
    norm: str = "none"
    pool: str = ""
    chunk: int = 0
    stat: str = "mean"
    mix: float = 0.0
    mix_with: str = "keydiff"
    two: float = 0.0
    sinks: int = 4
    full: str = ""
    slope: float = 0.0
    blocks: bool = True

    @property
    def num_recent(self) -> int:
        """Last tokens that are always kept."""
        return self.window if self.recent < 0 else self.recent

    @property
    def full_layers(self) -> frozenset[int]:
        """Numbers of the layers that keep everything."""
        layers: set[int] = set()
        for part in filter(None, self.full.split("/")):
            first, _, last = part.partition("-")
            layers.update(range(int(first), int(last or first) + 1))
        return frozenset(layers)

    @classmethod
    def parse(cls, text: str) -> Spec:
        """From text; what is left out has its default.

        Raises:
            ValueError: An unknown key.
        """
        kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(cls)}
        values: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            key, _, value = part.partition("=")
            if key not in kinds:
                raise ValueError(f"a candidate has no {key!r}; it has {', '.join(kinds)}")
            kind = kinds[key]
            values[key] = value == "1" if kind is bool else kind(value)
        return cls(**values)

    def __str__(self) -> str:
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(f"{field.name}={int(value) if isinstance(value, bool) else value}")
        return ",".join(parts)
