"""From what a full pass captured to the positions that a candidate keeps."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from search.model import WINDOW, Captured, SearchModel
from search.spec import Spec

BLOCK = 32
"""Tokens of a cache block."""

LOCAL = 129
"""Keys whose mean "localdiff" compares with."""


class Features:
    """Scores of one case, each computed once and shared by the candidates that want it."""

    def __init__(self, model: SearchModel, captured: Captured) -> None:
        self.model, self.captured = model, captured
        self._known: dict[str, torch.Tensor] = {}

    def _once(self, name: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name not in self._known:
            self._known[name] = compute()
        return self._known[name]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
        return self.captured.keys.shape[1]

    def heads(self, spec: Spec) -> torch.Tensor:
        """Scores per query head, [num_layers, num_kv_heads, group, cut]; group 1 for key scores."""
        name = f"{spec.source}/{spec.window}/{spec.agg}"
        match spec.source:
            case "window":
                return self._once(name, lambda: self._window(spec.window, spec.agg))
            case "sample":
                return self._once(f"sample/{spec.agg}", lambda: self._sample(spec.agg))
            case "keydiff":
                return self._once("keydiff", self._keydiff)
            case "localdiff":
                return self._once("localdiff", self._localdiff)
            case "knorm":
                return self._once("knorm", lambda: -self.captured.keys.norm(dim=-1)[:, :, None])
            case "recency":
                order = torch.arange(self.captured.cut, dtype=torch.float32)
                return order.expand(*self.captured.keys.shape[:2], 1, -1)
        raise ValueError(f"no such source: {spec.source}")

    def value_weight(self, kind: str) -> torch.Tensor:
        """What scores are multiplied by, [num_layers, num_kv_heads, 1, cut]."""
        if kind == "norm":
            return self._once("norm", lambda: self.captured.values.norm(dim=-1)[:, :, None])
        return self._once("wo", self._output_norms)

    def _attention(self) -> torch.Tensor:
        """[num_layers, num_kv_heads, group, WINDOW, cut], causal softmax."""
        keys, queries = self.captured.keys, self.captured.queries
        layers, groups, cut, size = keys.shape
        logits = queries.reshape(layers, groups, -1, size) @ keys.transpose(-1, -2)
        logits = logits.view(layers, groups, -1, WINDOW, cut) * size**-0.5
        future = torch.ones(WINDOW, cut, dtype=torch.bool).triu(cut - WINDOW + 1)
        weights: torch.Tensor = logits.masked_fill_(future, float("-inf")).softmax(dim=-1)
        return weights

    def _window(self, window: int, agg: str) -> torch.Tensor:
        rows = self._once("attention", self._attention)[..., WINDOW - window :, :]
        return _aggregate(rows, agg)

    def _sample(self, agg: str) -> torch.Tensor:
        captured = self.captured
        angle = (captured.cut - captured.sampled_at)[:, None] * self.model.inv_freq
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        half = captured.sampled.shape[-1] // 2
        first, second = captured.sampled[..., :half], captured.sampled[..., half:]
        moved = captured.sampled * cos + torch.cat([-second, first], dim=-1) * sin
        scores = []
        for query, key in zip(moved, captured.keys, strict=True):
            by_group = query.view(key.shape[0], -1, *query.shape[1:])
            logits = by_group @ key[:, None].transpose(-1, -2) * key.shape[-1] ** -0.5
            scores.append(_aggregate(logits.softmax(dim=-1), agg))
        return torch.stack(scores)

    def _keydiff(self) -> torch.Tensor:
        unit = F.normalize(self.captured.keys, dim=-1)
        anchor = F.normalize(unit.mean(dim=2, keepdim=True), dim=-1)
        return 1 - (unit * anchor).sum(dim=-1)[:, :, None]

    def _localdiff(self) -> torch.Tensor:
        unit = F.normalize(self.captured.keys, dim=-1)
        layers, groups, cut, size = unit.shape
        flat = unit.transpose(-1, -2).reshape(layers * groups, size, cut)
        mean = F.avg_pool1d(flat, LOCAL, 1, LOCAL // 2, count_include_pad=False)
        anchor = F.normalize(mean.view(layers, groups, size, cut).transpose(-1, -2), dim=-1)
        return 1 - (unit * anchor).sum(dim=-1)[:, :, None]

    def _output_norms(self) -> torch.Tensor:
        norms = []
        for layer, values in enumerate(self.captured.values):
            weights = self.model.output_weights(layer)
            group = weights.shape[0] // values.shape[0]
            norms.append(
                torch.stack(
                    [
                        torch.stack(
                            [(value @ weights[g * group + r]).abs().sum(-1) for r in range(group)]
                        ).mean(0)
                        for g, value in enumerate(values)
                    ]
                )
            )
        return torch.stack(norms)[:, :, None]


def _aggregate(rows: torch.Tensor, agg: str) -> torch.Tensor:
    """[..., queries, cut] -> [..., cut]."""
    match agg:
        case "sum":
            return rows.sum(dim=-2)
        case "sq":
            return rows.square().sum(dim=-2)
        case "max":
            return rows.amax(dim=-2)
        case "lin":
            weight = torch.arange(1, rows.shape[-2] + 1, dtype=torch.float32) / rows.shape[-2]
            return (rows * weight[:, None]).sum(dim=-2)
    raise ValueError(f"no such aggregation: {agg}")


def pooled(scores: torch.Tensor, poolings: str) -> torch.Tensor:
    """Pool [num_layers, heads, n] over positions, one pooling after the other.

    Averages count padding as zeros, as SnapKV's do.
    """
    for pooling in filter(None, poolings.split("+")):
        kind, *sides = pooling.split(":")
        widths = [int(side) for side in sides]
        if kind == "both":
            narrow, wide = (_windowed(scores, "avg", width // 2, width // 2) for width in widths)
            scores = narrow + wide
        elif kind == "tent":
            scores = _tent(scores, widths[0] // 2)
        elif len(widths) == 2:
            scores = _windowed(scores, kind, *widths)
        else:
            scores = _windowed(scores, kind, widths[0] // 2, widths[0] // 2)
    return scores


def _windowed(scores: torch.Tensor, kind: str, left: int, right: int) -> torch.Tensor:
    padded = F.pad(scores, (left, right), value=0.0 if kind == "avg" else float("-inf"))
    if kind == "avg":
        return F.avg_pool1d(padded, left + right + 1, 1)
    if kind == "max":
        return F.max_pool1d(padded, left + right + 1, 1)
    raise ValueError(f"no such pooling: {kind}")


def _tent(scores: torch.Tensor, reach: int) -> torch.Tensor:
    """Maximum over neighbours of their score times a weight that falls with the distance."""
    padded = F.pad(scores, (reach, reach))
    count = scores.shape[-1]
    best = scores
    for shift in range(-reach, reach + 1):
        weight = 1 - abs(shift) / (reach + 1)
        best = torch.maximum(best, weight * padded[..., reach + shift : reach + shift + count])
    return best


def chunked(scores: torch.Tensor, size: int, stat: str) -> torch.Tensor:
    """Give every token its chunk's score, so that chunks are kept or lost as a whole."""
    count = scores.shape[-1]
    short = -count % size
    cells = F.pad(scores, (0, short), value=float("nan")).unflatten(-1, (-1, size))
    if stat == "mean":
        best = cells.nanmean(dim=-1)
    elif stat == "max":
        best = cells.nan_to_num(nan=float("-inf")).amax(dim=-1)
    else:
        top = cells.nan_to_num(nan=float("-inf")).topk(int(stat.removeprefix("top")), dim=-1)
        best = top.values.masked_fill(top.values.isinf(), float("nan")).nanmean(dim=-1)
    by_token: torch.Tensor = best.repeat_interleave(size, dim=-1)[..., :count]
    return by_token


def ranked(features: Features, spec: Spec, *, with_value: bool = True) -> torch.Tensor:
    """Scores of the positions before the recent ones, [num_layers, num_kv_heads, n]."""
    before = features.captured.cut - spec.num_recent
    scores = features.heads(spec)[..., :before]
    if spec.value != "none" and with_value:
        scores = scores * features.value_weight(spec.value)[..., :before]
    if spec.heads == "max":
        scores = scores / scores.amax(dim=-1, keepdim=True).clamp_min(1e-20)
    elif spec.heads == "sum":
        scores = scores / scores.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    scores = scores.mean(dim=2) if spec.reduce == "mean" else scores.amax(dim=2)
    if spec.norm == "max":
        scores = scores / scores.amax(dim=-1, keepdim=True).clamp_min(1e-20)
    elif spec.norm == "sum":
        scores = scores / scores.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    if spec.share:
        shared = scores.mean(dim=1, keepdim=True)
        scores = (1 - spec.share) * scores + spec.share * shared
    scores = pooled(scores, spec.pool)
    if spec.chunk:
        scores = chunked(scores, spec.chunk, spec.stat)
    if spec.sinks:
        scores = scores.clone()
        scores[..., : spec.sinks] = float("inf")
    return scores


def counts(spec: Spec, num_layers: int, cut: int, share: float) -> list[int]:
    """Tokens that every layer stores, so that the total is at most `share` of all.

    An empty list: the budget leaves no room for what must be kept and a block.
    """
    full = spec.full_layers
    sieved = [layer for layer in range(num_layers) if layer not in full]
    mean = (int(share * cut) * num_layers - len(full) * cut) / len(sieved)
    stored = [cut] * num_layers
    for order, layer in enumerate(sieved):
        tilt = 0.5 - order / (len(sieved) - 1)
        budget = min(int(mean * (1 + spec.slope * tilt)), cut)
        if spec.blocks:
            budget = cut - -(-(cut - budget) // BLOCK) * BLOCK
        if budget < spec.num_recent + spec.sinks + 1:
            return []
        stored[layer] = budget
    return stored


def kept(features: Features, spec: Spec, stored: list[int]) -> list[torch.Tensor]:
    """Positions that every layer keeps, [num_kv_heads, stored[layer]] each."""
    cut, recent = features.captured.cut, spec.num_recent
    scores = ranked(features, spec, with_value=spec.two == 0)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    later = None
    if spec.two:
        later = ranked(features, spec)
    elif spec.mix:
        other = Spec(source=spec.mix_with, window=spec.window, recent=recent, pool=spec.pool)
        later = ranked(features, other)
    last = torch.arange(cut - recent, cut).expand(features.num_kv_heads, -1)
    positions = []
    for layer, count in enumerate(stored):
        if count == cut:
            positions.append(torch.arange(cut).expand(features.num_kv_heads, -1))
            continue
        room = count - recent
        chosen = order[layer, :, :room]
        if later is not None:
            first = int(room * (spec.two or 1 - spec.mix))
            rest = later[layer].scatter(1, order[layer, :, :first], float("-inf"))
            added = rest.topk(room - first, dim=-1).indices
            chosen = torch.cat([order[layer, :, :first], added], dim=1)
        positions.append(torch.cat([chosen.sort(dim=1).values, last], dim=1))
    return positions


def gather(
    captured: Captured, positions: list[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The cache that is left."""
    cache = []
    for keys, values, index in zip(captured.keys, captured.values, positions, strict=True):
        if index.shape[1] == captured.cut:
            cache.append((keys, values))
            continue
        wide = index[..., None].expand(-1, -1, keys.shape[-1])
        cache.append((keys.gather(1, wide), values.gather(1, wide)))
    return cache
