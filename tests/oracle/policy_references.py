"""Every method's definition a second time: float64, dense, one head at a time.

Written from the papers and the authors' code as they describe it, with their values, and without
anything of the product. Slow on purpose. `PUBLISHED` has one entry per method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt in one layer, float64.

    Queries [num_heads, n, d] and keys [num_kv_heads, n, d] are rotated by position times
    `frequencies`, in the first 2 * len(frequencies) dimensions; values [num_kv_heads, n, d];
    projection [num_heads, d, hidden].
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    projection: torch.Tensor
    frequencies: np.ndarray
    is_neox: bool
    layer: int
    head_table: dict[str, Any]

    @property
    def n(self) -> int:
        return self.keys.shape[1]

    @property
    def num_heads(self) -> int:
        return self.queries.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[0]

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def heads_of(self, kv_head: int) -> range:
        return range(kv_head * self.group, (kv_head + 1) * self.group)


@dataclass(frozen=True)
class Ranking:
    """How candidates compare: by the first level, among equals by the next, then by position.

    Every level is [num_kv_heads, num_candidates] float64, higher is better. `unsure` marks
    candidates whose place hangs on a near tie in a decision before this one.
    """

    levels: list[torch.Tensor]
    unsure: torch.Tensor


@dataclass(frozen=True)
class Published:
    """A method's definition and its authors' values.

    `rank` gives the ranking of the first `num_candidates` positions when `keep` are kept, those
    after the candidates among them.
    """

    rank: Callable[[Prompt, Published, int, int], Ranking]
    window: int = 32
    recent: int | None = None
    sinks: int = 4
    pool: int = 1
    pooling: str = "max"
    recent_share: float = 0.0
    values: dict[str, float] = field(default_factory=dict)

    def num_recent(self, keep: int) -> int:
        return min(self.window if self.recent is None else self.recent, keep)


NEAR = 1e-5
"""Scores closer than this, relative to the largest of the head, may change places in float32."""


def by_score(rows: list[list[float]] | torch.Tensor) -> Ranking:
    scores = torch.as_tensor(rows, dtype=torch.float64)
    return Ranking([scores], torch.zeros(scores.shape, dtype=torch.bool))


@lru_cache(maxsize=4)
def attention(
    prompt: Prompt, first: int, noisy: bool = False, temperature: float = 1.0
) -> torch.Tensor:
    """Softmax weights of the queries from `first` on, [num_heads, n - first, n]."""
    n, rows = prompt.n, []
    noise = gumbel(prompt) if noisy else torch.zeros(prompt.num_heads, n, dtype=torch.float64)
    for head in range(prompt.num_heads):
        keys = prompt.keys[head // prompt.group]
        for i in range(first, n):
            logits = keys[: i + 1] @ prompt.queries[head, i] / keys.shape[1] ** 0.5
            logits = (logits + noise[head, : i + 1]) / temperature
            weights = (logits - logits.max()).exp()
            row = torch.zeros(n, dtype=torch.float64)
            row[: i + 1] = weights / weights.sum()
            rows.append(row)
    return torch.stack(rows).view(prompt.num_heads, n - first, n)


def window_attention(prompt: Prompt, published: Published) -> torch.Tensor:
    return attention(prompt, max(0, prompt.n - published.window))


def pooled(row: torch.Tensor, width: int) -> torch.Tensor:
    values = row.tolist()
    half = width // 2
    return torch.tensor(
        [max(values[max(0, i - half) : i + half + 1]) for i in range(len(values))],
        dtype=torch.float64,
    )


def group_means(prompt: Prompt, per_head: torch.Tensor) -> list[torch.Tensor]:
    return [
        sum(per_head[h] for h in prompt.heads_of(g)) / prompt.group
        for g in range(prompt.num_kv_heads)
    ]


def snapkv(prompt: Prompt, published: Published, num_candidates: int, keep: int) -> Ranking:
    received = window_attention(prompt, published)[:, :, :num_candidates].mean(dim=1)
    means = group_means(prompt, received)
    return by_score(torch.stack([pooled(row, published.pool) for row in means]))


def kv_compress(prompt: Prompt, published: Published, num_candidates: int, keep: int) -> Ranking:
    squares = (window_attention(prompt, published)[:, :, :num_candidates] ** 2).sum(dim=1)
    rows = [
        sum(pooled(squares[h], published.pool) for h in prompt.heads_of(g))
        for g in range(prompt.num_kv_heads)
    ]
    return by_score(torch.stack(rows))


def averaged(row: torch.Tensor, width: int) -> torch.Tensor:
    """The mean over `width` neighbours; beyond the ends are zeros that count."""
    half, n = width // 2, len(row)
    means = [row[max(0, i - half) : i + half + 1].sum() / width for i in range(n)]
    return torch.stack(means) if means else row


def own(prompt: Prompt, published: Published, num_candidates: int, keep: int) -> Ranking:
    squares = (window_attention(prompt, published)[:, :, :num_candidates] ** 2).sum(dim=1)
    means = group_means(prompt, squares)
    return by_score(torch.stack([averaged(row, published.pool) for row in means]))


def own_agnostic(prompt: Prompt, published: Published, num_candidates: int, keep: int) -> Ranking:
    (difference,) = keydiff(prompt, published, num_candidates, keep).levels
    weighed = (1 + difference) * prompt.values.norm(dim=2)[:, :num_candidates]
    return by_score(torch.stack([averaged(row, published.pool) for row in weighed]))


def pooled_heads(prompt: Prompt, published: Published, num_candidates: int) -> list[torch.Tensor]:
    received = window_attention(prompt, published)[:, :, :num_candidates].mean(dim=1)
    return [pooled(row, published.pool) for row in received]


def weighted_groups(
    prompt: Prompt, heads: list[torch.Tensor], weights: list[float]
) -> list[torch.Tensor]:
    rows = []
    for g in range(prompt.num_kv_heads):
        total = sum(weights[h] for h in prompt.heads_of(g))
        rows.append(sum(weights[h] / total * heads[h] for h in prompt.heads_of(g)))
    return rows


def adakv(prompt: Prompt, published: Published, num_candidates: int, keep: int) -> Ranking:
    heads = pooled_heads(prompt, published, num_candidates)
    base = keep - (prompt.n - num_candidates)
    if num_candidates == 0 or base == 0:
        return by_score(torch.stack(group_means(prompt, torch.stack(heads))))
    entries = [
        (float(score), h, j) for h, row in enumerate(heads) for j, score in enumerate(row.tolist())
    ]
    best = sorted(entries, reverse=True)[: prompt.num_heads * base]
    alpha = published.values["alpha"]
    quotas = [
        sum(1 for _, owner, _ in best if owner == h) * (1 - alpha) + base * alpha
        for h in range(prompt.num_heads)
    ]
    return by_score(torch.stack(weighted_groups(prompt, heads, quotas)))


def headkv(prompt: Prompt, published: Published, num_candidates: int, keep: int) -> Ranking:
    beta, c = published.values["beta"], 1e9
    means = {name: float(np.mean(value)) for name, value in prompt.head_table.items()}
    pool = c / beta * len(means)
    capacity = {
        name: mean / sum(means.values()) * pool + (c - c / beta) for name, mean in means.items()
    }
    weights = [capacity[f"{prompt.layer}-{h}"] for h in range(prompt.num_heads)]
    heads = pooled_heads(prompt, published, num_candidates)
    return by_score(torch.stack(weighted_groups(prompt, heads, weights)))


def criticalkv(prompt: Prompt, published: Published, num_candidates: int, keep: int) -> Ranking:
    base = snapkv(prompt, published, num_candidates, keep).levels[0]
    num_first = int(published.values["first_stage_ratio"] * keep) - (prompt.n - num_candidates)
    num_first = max(0, num_first)
    first, second = torch.zeros_like(base), torch.zeros_like(base)
    unsure = torch.zeros(base.shape, dtype=torch.bool)
    for g in range(prompt.num_kv_heads):
        order = sorted(range(num_candidates), key=lambda j: (-float(base[g, j]), -j))
        first[g, order[:num_first]] = 1.0
        if 0 < num_first < num_candidates:
            gap = (base[g] - base[g, order[num_first - 1]]).abs()
            unsure[g] = (gap <= NEAR * base[g].max()) & (gap > 0)
        norms = [
            (prompt.values[g] @ prompt.projection[h]).abs().sum(dim=1) for h in prompt.heads_of(g)
        ]
        weight = (sum(norms) / len(norms))[:num_candidates]
        second[g] = (base[g] + published.values["epsilon"]) * weight
    levels = [first, base.masked_fill(first == 0, 0.0), second.masked_fill(first > 0, 0.0)]
    return Ranking(levels, unsure)


def chunkkv(prompt: Prompt, published: Published, num_candidates: int, keep: int) -> Ranking:
    scores = snapkv(prompt, published, num_candidates, keep).levels[0].sum(dim=0)
    length = int(published.values["chunk_length"])
    means, numbers = torch.zeros_like(scores), torch.zeros_like(scores)
    for begin in range(0, num_candidates, length):
        chunk = scores[begin : begin + length]
        means[begin : begin + length] = sum(chunk.tolist()) / len(chunk)
        numbers[begin : begin + length] = begin // length
    levels = [level.expand(prompt.num_kv_heads, -1) for level in (means, numbers, scores)]
    return Ranking(levels, torch.zeros(levels[0].shape, dtype=torch.bool))


def rkv(prompt: Prompt, published: Published, num_candidates: int, keep: int) -> Ranking:
    n, old = prompt.n, max(0, prompt.n - published.window)
    rows = []
    for g in range(prompt.num_kv_heads):
        keys = prompt.keys[g]
        importance = torch.zeros(old, dtype=torch.float64)
        for i in range(old, n):
            logits = torch.stack(
                [
                    keys[:old] @ prompt.queries[h, i] / keys.shape[1] ** 0.5
                    for h in prompt.heads_of(g)
                ]
            )
            if old:
                importance += torch.softmax(logits.max(dim=0).values, dim=0) / (n - old)
        unit = keys / keys.norm(dim=1, keepdim=True)
        similarity = unit @ unit.T
        for i in range(n):
            similarity[i, i] = 0.0
            alike = (similarity[i] > 0.5).nonzero().flatten().tolist()
            if alike:
                similarity[i, max(alike)] = 0.0
        redundancy = torch.softmax(similarity.mean(dim=0), dim=0)
        mix = published.values["mix_lambda"]
        padded = torch.cat([importance, torch.zeros(n - old, dtype=torch.float64)])
        rows.append(
            mix * pooled(padded[:num_candidates], published.pool)
            - (1 - mix) * redundancy[:num_candidates]
        )
    return by_score(torch.stack(rows))


def tova(prompt: Prompt, published: Published, num_candidates: int, keep: int) -> Ranking:
    last = attention(prompt, prompt.n - 1)[:, 0, :num_candidates]
    return by_score(last.mean(dim=0).expand(prompt.num_kv_heads, -1))


def summed(prompt: Prompt, weights: torch.Tensor, num_candidates: int) -> Ranking:
    received = weights.sum(dim=1)[:, :num_candidates]
    return by_score(
        torch.stack(
            [sum(received[h] for h in prompt.heads_of(g)) for g in range(prompt.num_kv_heads)]
        )
    )


def h2o(prompt: Prompt, published: Published, num_candidates: int, keep: int) -> Ranking:
    return summed(prompt, attention(prompt, 0), num_candidates)


def gumbel(prompt: Prompt) -> torch.Tensor:
    """The documented noise: a generator per 1024 positions, by its number."""
    blocks = []
    for block in range(prompt.n // 1024 + 1):
        generator = torch.Generator().manual_seed(block)
        uniform = torch.rand(prompt.num_heads, 1024, generator=generator).double().numpy()
        blocks.append(-np.log(-np.log(np.maximum(uniform, 2.0**-25))))
    return torch.from_numpy(np.concatenate(blocks, axis=1)[:, : prompt.n])


def keyformer(prompt: Prompt, published: Published, num_candidates: int, keep: int) -> Ranking:
    weights = attention(prompt, 0, True, published.values["temperature"])
    return summed(prompt, weights, num_candidates)


def unrotated(prompt: Prompt, head: int, position: int) -> torch.Tensor:
    """A query without its rotary embedding, by complex numbers."""
    query = prompt.queries[head, position].numpy()
    pairs = len(prompt.frequencies)
    if prompt.is_neox:
        first, second = np.arange(pairs), np.arange(pairs) + pairs
    else:
        first, second = 2 * np.arange(pairs), 2 * np.arange(pairs) + 1
    turned = query[first] + 1j * query[second]
    turned = turned * np.exp(-1j * position * prompt.frequencies)
    plain = query.copy()
    plain[first], plain[second] = turned.real, turned.imag
    return torch.from_numpy(plain)


def rotation_matrix(prompt: Prompt, position: int) -> torch.Tensor:
    size = prompt.queries.shape[2]
    matrix = torch.eye(size, dtype=torch.float64)
    pairs = len(prompt.frequencies)
    for i, frequency in enumerate(prompt.frequencies):
        a, b = (i, i + pairs) if prompt.is_neox else (2 * i, 2 * i + 1)
        cos, sin = np.cos(position * frequency), np.sin(position * frequency)
        matrix[a, a], matrix[a, b], matrix[b, a], matrix[b, b] = cos, -sin, sin, cos
    return matrix


@lru_cache(maxsize=4)
def mean_rotation(prompt: Prompt, positions: range) -> torch.Tensor:
    return sum(rotation_matrix(prompt, p) for p in positions) / len(positions)


def expected_attention(
    prompt: Prompt, published: Published, num_candidates: int, keep: int
) -> Ranking:
    n, sinks, size = prompt.n, published.sinks, prompt.keys.shape[2]
    scores = torch.zeros(prompt.num_kv_heads, n, dtype=torch.float64)
    if n <= sinks:
        return by_score(scores[:, :num_candidates])
    future = range(n, n + int(published.values["n_future_positions"]))
    turn = mean_rotation(prompt, future)
    for head in range(prompt.num_heads):
        g = head // prompt.group
        queries = torch.stack([unrotated(prompt, head, i) for i in range(sinks, n)])
        mean = queries.mean(dim=0)
        covariance = (queries - mean).T @ (queries - mean) / len(queries)
        mean, covariance = turn @ mean, turn @ covariance @ turn.T
        keys = prompt.keys[g, sinks:]
        logits = keys @ mean / size**0.5 + ((keys @ covariance) * keys).sum(dim=1) / (2 * size)
        scores[g, sinks:] += torch.softmax(logits, dim=0) / prompt.group
    scores *= prompt.values.norm(dim=2)
    return by_score(scores[:, :num_candidates])


def keydiff(prompt: Prompt, published: Published, num_candidates: int, keep: int) -> Ranking:
    rows = []
    for keys in prompt.keys:
        unit = keys / keys.norm(dim=1, keepdim=True)
        anchor = unit.mean(dim=0)
        rows.append(-(keys @ anchor) / (keys.norm(dim=1) * anchor.norm()))
    return by_score(torch.stack(rows)[:, :num_candidates])


def knorm(prompt: Prompt, published: Published, num_candidates: int, keep: int) -> Ranking:
    return by_score(-(prompt.keys**2).sum(dim=2).sqrt()[:, :num_candidates])


def streaming_llm(prompt: Prompt, published: Published, num_candidates: int, keep: int) -> Ranking:
    order = torch.arange(num_candidates, dtype=torch.float64)
    return by_score(order.expand(prompt.num_kv_heads, -1))


def chance(prompt: Prompt, published: Published, num_candidates: int, keep: int) -> Ranking:
    generator = torch.Generator().manual_seed(prompt.n)
    numbers = torch.rand(prompt.num_kv_heads, prompt.n, generator=generator)
    return by_score(numbers[:, :num_candidates].double())


PUBLISHED = {
    "kvsieve": Published(own, window=32, recent=8, pool=21, pooling="avg"),
    "kvsieve_agnostic": Published(own_agnostic, recent=8, pool=11, pooling="avg"),
    "snapkv": Published(snapkv, window=32, pool=7),
    "pyramidkv": Published(snapkv, window=8, pool=7),
    "layerwise": Published(snapkv, window=256, pool=7),
    "kv_compress": Published(kv_compress, window=32, pool=7),
    "adakv": Published(adakv, window=32, pool=7, values={"alpha": 0.5}),
    "headkv": Published(headkv, window=32, pool=7, values={"beta": 1.005}),
    "criticalkv": Published(
        criticalkv, window=32, pool=7, values={"first_stage_ratio": 0.5, "epsilon": 1e-4}
    ),
    "chunkkv": Published(chunkkv, window=32, pool=7, values={"chunk_length": 20}),
    "rkv": Published(rkv, window=8, pool=7, values={"mix_lambda": 0.1}),
    "tova": Published(tova, window=1, sinks=0),
    "h2o": Published(h2o, recent=1, sinks=0, recent_share=0.5),
    "keyformer": Published(
        keyformer, recent=1, sinks=0, recent_share=0.3, values={"temperature": 1.0}
    ),
    "expected_attention": Published(
        expected_attention, recent=0, values={"n_future_positions": 512}
    ),
    "keydiff": Published(keydiff, recent=0, sinks=0),
    "knorm": Published(knorm, recent=0, sinks=0),
    "streaming_llm": Published(streaming_llm),
    "random": Published(chance),
}
