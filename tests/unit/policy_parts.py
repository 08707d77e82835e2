"""Prompts of random tensors for the tests of policies, as the product and the oracle take them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvsieve.kernels.dense import DenseEvidence
from kvsieve.policies import METHODS, Policy, Rotary, parse_settings, policy_from_config
from tests.oracle.policy_references import NEAR, Prompt, Published, Ranking

HEAD_SIZE = 16
HIDDEN_SIZE = 24
NUM_LAYERS = 3
LAYER = 1
BLOCK = 16


@dataclass(frozen=True)
class Shape:
    """A prompt's length, heads, type and kind of rotary embedding."""

    tokens: int
    kv_heads: int
    group: int
    dtype: torch.dtype = torch.float32
    is_neox: bool = True
    rotary_dim: int = HEAD_SIZE

    def __str__(self) -> str:
        kind = "neox" if self.is_neox else "gptj"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.tokens}t-{self.kv_heads}x{self.group}-{dtype}-{kind}{self.rotary_dim}"

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


SHAPES = (
    Shape(1, 2, 3),
    Shape(3, 1, 4, is_neox=False),
    Shape(9, 2, 1, torch.float16),
    Shape(33, 2, 4, torch.bfloat16),
    Shape(61, 3, 1, rotary_dim=8),
    Shape(128, 1, 3, torch.float16, is_neox=False, rotary_dim=12),
    Shape(259, 2, 3, torch.bfloat16),
    Shape(300, 2, 4),
    Shape(300, 3, 3, torch.float16, rotary_dim=8),
)


@dataclass(frozen=True)
class Tensors:
    """Queries [n, heads, d], keys and values [kv_heads, n, d], the projection, the rotary table."""

    shape: Shape
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    projection: torch.Tensor
    rotary: Rotary
    frequencies: np.ndarray
    plain_queries: torch.Tensor

    def evidence(self, policy: Policy, chunk_size: int | None = None) -> DenseEvidence:
        evidence = DenseEvidence(
            self.queries,
            self.keys,
            self.values,
            policy.observation_window,
            HEAD_SIZE**-0.5,
            output_projection=self.projection,
            rotary=self.rotary,
            accumulator=policy.accumulator,
            chunk_size=chunk_size,
        )
        evidence.layer = LAYER
        return evidence

    def prompt(self) -> Prompt:
        return Prompt(
            queries=self.queries.double().transpose(0, 1),
            keys=self.keys.double(),
            values=self.values.double(),
            projection=self.projection.double(),
            frequencies=self.frequencies,
            is_neox=self.rotary.is_neox,
            layer=LAYER,
            head_table=head_table(self.shape.heads),
        )


def turned(
    vectors: torch.Tensor, positions: torch.Tensor, frequencies: np.ndarray, is_neox: bool
) -> torch.Tensor:
    """Vectors [..., n, d] float64 at their positions, by complex numbers."""
    pairs = len(frequencies)
    head, rest = vectors[..., : 2 * pairs], vectors[..., 2 * pairs :]
    first, second = (
        (head[..., :pairs], head[..., pairs:]) if is_neox else (head[..., ::2], head[..., 1::2])
    )
    angles = positions[:, None] * torch.from_numpy(frequencies)
    number = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    if is_neox:
        head = torch.cat([number.real, number.imag], dim=-1)
    else:
        head = torch.stack([number.real, number.imag], dim=-1).flatten(-2)
    return torch.cat([head, rest], dim=-1)


def make_tensors(shape: Shape, seed: int = 0, num_positions: int = 1024) -> Tensors:
    """Random queries and keys in clusters, so that attention has peaks and keys repeat."""
    generator = torch.Generator().manual_seed(1000 * seed + shape.tokens)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    n, d = shape.tokens, HEAD_SIZE
    topics = normal(shape.kv_heads, 6, d)
    topic = torch.randint(0, 6, (shape.kv_heads, n), generator=generator)
    keys = torch.stack([topics[g, topic[g]] for g in range(shape.kv_heads)]) + normal(
        shape.kv_heads, n, d
    )
    plain = 1.5 * normal(shape.heads, n, d) + 0.5 * normal(shape.heads, 1, d)
    frequencies = 10000.0 ** (-np.arange(shape.rotary_dim // 2) / (shape.rotary_dim // 2))
    positions = torch.arange(n, dtype=torch.float64)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * torch.from_numpy(
        frequencies
    )
    queries = turned(plain, positions, frequencies, shape.is_neox)
    return Tensors(
        shape=shape,
        queries=queries.transpose(0, 1).to(shape.dtype),
        keys=turned(keys, positions, frequencies, shape.is_neox).to(shape.dtype),
        values=normal(shape.kv_heads, n, d).to(shape.dtype),
        projection=normal(shape.heads, d, HIDDEN_SIZE).float(),
        rotary=Rotary(torch.cat([angles.cos(), angles.sin()], dim=1).float(), shape.is_neox),
        frequencies=frequencies,
        plain_queries=plain,
    )


def head_table(num_heads: int) -> dict[str, Any]:
    """Scores of every head in the authors' format; some in lists, some 0."""
    table: dict[str, Any] = {}
    for layer in range(NUM_LAYERS):
        for head in range(num_heads):
            score = ((7 * layer + 3 * head) % 5) / 10
            table[f"{layer}-{head}"] = [score, score + 0.1] if head % 2 else score
    return table


def policy_of(name: str, **given: Any) -> Policy:
    """A method's policy with its own defaults and what is given."""
    return policy_from_config(parse_settings({"policy": name, **given}))


def make_policy(name: str, num_heads: int, folder: Path, **given: Any) -> Policy:
    """`policy_of` for any method: with a table of heads for the one that needs it."""
    options = dict(given.pop("policy_options", {}))
    if name == "headkv":
        path = folder / f"heads-{num_heads}.json"
        path.write_text(json.dumps(head_table(num_heads)))
        options.setdefault("head_scores", str(path))
    return policy_of(name, policy_options=options, **given)


def budgets(published: Published, tokens: int) -> list[int]:
    """Numbers of kept tokens from the smallest that a server allows to all of the prompt."""
    smallest = published.num_recent(10**9) + published.sinks + BLOCK
    wanted = {smallest, smallest + 5, (smallest + tokens) // 2, tokens - 1, tokens}
    return sorted({min(keep, tokens) for keep in wanted if keep >= min(smallest, tokens)})


def expected_choice(
    ranking: Ranking, published: Published, tokens: int, keep: int
) -> tuple[list[list[int]], list[set[int]]]:
    """What the ranking keeps, and which positions are too close to the threshold to tell."""
    num_candidates = ranking.levels[0].shape[1]
    num_recent = tokens - num_candidates
    share = max(num_recent, math.floor(published.recent_share * keep))
    always = set(range(tokens - share, tokens)) | set(range(min(published.sinks, num_candidates)))
    kept, close = [], []
    for g in range(ranking.levels[0].shape[0]):
        rows = [level[g].tolist() for level in ranking.levels]
        free = [j for j in range(num_candidates) if j not in always]
        free.sort(key=lambda j: (*(row[j] for row in rows), j), reverse=True)
        room = keep - len(always)
        kept.append(sorted(always | set(free[:room])))
        near = {j for j in free if ranking.unsure[g, j]}
        if 0 < room < len(free):
            near |= {j for j in free if _is_near(rows, j, free[room - 1])}
            near |= {j for j in free if _is_near(rows, j, free[room])}
        close.append(near)
    return kept, close


def _is_near(rows: list[list[float]], position: int, edge: int) -> bool:
    for row in rows:
        gap = abs(row[position] - row[edge])
        if gap:
            return gap <= NEAR * max(map(abs, row))
    return position == edge


ALL_METHODS = sorted(METHODS)
