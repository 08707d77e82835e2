"""Expected attention (Devoto et al. 2025, arXiv 2510.00636), as kvpress computes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvsieve.core.config import SieveConfig
from kvsieve.policies.evidence import Chunk, Evidence, Rotary
from kvsieve.policies.method import Method
from kvsieve.policies.options import read_count, read_number, read_switch
from kvsieve.policies.policy import Policy, Sight
from kvsieve.policies.rotation import cos_and_sin, rotate, unrotate

OPTIONS = {
    "n_future_positions": 512,
    "use_covariance": True,
    "use_vnorm": True,
    "epsilon": 0.0,
}

SLICE = 1024
"""Queries or keys that are held in float64 at once."""


@dataclass
class QueryMoments:
    """Sums over a prompt's queries without their rotary embedding.

    Attributes:
        count: [num_heads] float64, finite queries.
        total: [num_heads, head_size] float64, their sum.
        products: [num_heads, head_size, head_size] float64, the sum of their outer products;
            None if nobody looks at it.
        rotary: The layer's rotary embedding; None if it has none.
    """

    count: torch.Tensor
    total: torch.Tensor
    products: torch.Tensor | None
    rotary: Rotary | None

    def mean(self) -> torch.Tensor:
        """[num_heads, head_size]."""
        return self.total / self.count.clamp(min=1)[:, None]

    def covariance(self) -> torch.Tensor | None:
        """[num_heads, head_size, head_size], divided by the count (not the count less one)."""
        if self.products is None:
            return None
        mean = self.mean()
        return self.products / self.count.clamp(min=1)[:, None, None] - (
            mean[:, :, None] * mean[:, None, :]
        )


@dataclass(frozen=True)
class QueryStatistics:
    """Accumulator of `QueryMoments` (`policies.Accumulator`).

    Attributes:
        num_skipped: First queries of a prompt that are not counted.
        with_products: Whether outer products are summed, too.
    """

    num_skipped: int
    with_products: bool

    def start(self, chunk: Chunk) -> QueryMoments:
        """Zeros."""
        queries = chunk.queries()
        _, num_heads, head_size = queries.shape
        zeros = queries.new_zeros(num_heads, head_size, dtype=torch.float64)
        products = zeros.new_zeros(num_heads, head_size, head_size) if self.with_products else None
        return QueryMoments(zeros.new_zeros(num_heads), zeros, products, chunk.rotary)

    def add(self, state: QueryMoments, chunk: Chunk) -> QueryMoments:
        """Add a chunk's queries, in place."""
        queries = chunk.queries()
        for begin in range(max(0, self.num_skipped - chunk.first), chunk.num_queries, SLICE):
            end = min(begin + SLICE, chunk.num_queries)
            part = queries[begin:end].double()
            if state.rotary is not None:
                cos, sin = cos_and_sin(state.rotary, chunk.first + begin, chunk.first + end)
                part = unrotate(part, cos[:, None], sin[:, None], state.rotary.is_neox)
            # One broken query must not spoil the mean of all.
            finite = part.isfinite().all(dim=-1, keepdim=True)
            part = part.masked_fill(~finite, 0.0)
            state.count += finite.sum(dim=(0, 2))
            state.total += part.sum(dim=0)
            if state.products is not None:
                state.products += torch.einsum("qhd,qhe->hde", part, part)
        return state

    def num_bytes(self, num_tokens: int, num_heads: int, num_kv_heads: int, head_size: int) -> int:
        """Eight per number: one count, a vector and perhaps a matrix per query head."""
        return 8 * num_heads * (1 + head_size + self.with_products * head_size**2)


def mean_rotation(rotary: Rotary, first: int, num_positions: int) -> tuple[torch.Tensor, ...]:
    """Mean cosines and sines over positions to come, [rotary_dim / 2] float64 each.

    Positions beyond the table do not exist for the model and are left out; after its last one
    that last one counts.
    """
    first = min(first, rotary.cos_sin.shape[0] - 1)
    cos, sin = cos_and_sin(rotary, first, first + num_positions)
    return cos.mean(dim=0), sin.mean(dim=0)


def expected_logits(
    keys: torch.Tensor, mean: torch.Tensor, covariance: torch.Tensor | None
) -> torch.Tensor:
    """Logarithm of the expected attention to each key, for normally distributed queries.

    Args:
        keys: [n, head_size] float32, of one KV head.
        mean: [num_queries_per_kv, head_size] float64.
        covariance: [num_queries_per_kv, head_size, head_size] float64, or None for none.

    Returns:
        [num_queries_per_kv, n] float64.
    """
    head_size = keys.shape[1]
    parts = []
    for part in keys.split(SLICE):
        key = part.double()
        logits = mean @ key.T / head_size**0.5
        if covariance is not None:
            logits += ((key @ covariance) * key).sum(dim=-1) / (2 * head_size)
        parts.append(logits)
    return torch.cat(parts, dim=1) if parts else mean.new_zeros(mean.shape[0], 0)


@dataclass(frozen=True)
class ExpectedAttention:
    """The score: expected attention of the queries to come, times the norm of the value.

    Attributes:
        num_sink_tokens: First tokens, which take no part in the softmax and score 0.
        num_future_positions: Positions after the prompt whose rotation is averaged.
        use_vnorm: Whether scores are multiplied with the L2 norm of the value.
        epsilon: What is added to them before, in [0, 1]: a score is at most 1.
    """

    num_sink_tokens: int
    num_future_positions: int
    use_vnorm: bool
    epsilon: float

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """[num_kv_heads, num_queries_per_kv, n] float32."""
        moments: QueryMoments = evidence.accumulated()
        mean, covariance = moments.mean(), moments.covariance()
        if moments.rotary is not None:
            neox = moments.rotary.is_neox
            cos, sin = mean_rotation(moments.rotary, evidence.num_tokens, self.num_future_positions)
            mean = rotate(mean, cos, sin, neox)
            if covariance is not None:
                # R C R^T: the rows, then the columns.
                covariance = rotate(rotate(covariance, cos, sin, neox).mT, cos, sin, neox).mT
        keys = evidence.keys()
        values = evidence.values() if self.use_vnorm else None
        group = mean.shape[0] // evidence.num_kv_heads
        scores = keys.new_zeros(evidence.num_kv_heads, group, evidence.num_tokens)
        for number in range(evidence.num_kv_heads):
            heads = slice(number * group, (number + 1) * group)
            logits = expected_logits(
                keys[number, self.num_sink_tokens :],
                mean[heads],
                None if covariance is None else covariance[heads],
            )
            # A broken key must spoil its own score and not the others'.
            broken = ~logits.isfinite()
            expected = logits.masked_fill(broken, float("-inf")).softmax(dim=-1)
            expected = expected.masked_fill(broken, float("nan"))
            if values is not None:
                value = values[number, self.num_sink_tokens :].double()
                expected = (expected + self.epsilon) * torch.linalg.vector_norm(value, dim=-1)
            scores[number, :, self.num_sink_tokens :] = expected.float()
        return scores


def build(config: SieveConfig) -> Policy:
    """What queries to come are expected to look at, judged by the prompt's own queries.

    Their mean and covariance are taken without rotary embedding and turned to the mean rotation
    of the next positions. The first tokens (`num_sink_tokens`) are always kept, and neither their
    queries nor their keys take part. The last tokens are not forced.

    Options:
        n_future_positions: Positions whose rotation is averaged.
        use_covariance: Whether the spread of the queries counts, or their mean alone.
        use_vnorm: Whether scores are multiplied with the norm of the value.
        epsilon: What is added to them before, in [0, 1]: a score is at most 1.

    Deviations from kvpress: sums in float64. Queries come with their rotary embedding and are
    turned back. Positions beyond the model's longest context are not averaged.
    """
    use_covariance = read_switch(config, OPTIONS, "use_covariance")
    use_vnorm = read_switch(config, OPTIONS, "use_vnorm")
    score = ExpectedAttention(
        config.num_sink_tokens,
        read_count(config, OPTIONS, "n_future_positions", at_least=1),
        use_vnorm,
        read_number(config, OPTIONS, "epsilon", at_least=0, at_most=1),
    )
    sights: tuple[Sight, ...] = ("keys", "values", "rotary") if use_vnorm else ("keys", "rotary")
    return Policy.with_settings(
        config,
        score,
        accumulator=QueryStatistics(config.num_sink_tokens, use_covariance),
        looks_at=frozenset(sights),
    )


EXPECTED_ATTENTION = Method(
    name="expected_attention",
    summary="Attention expected of queries to come, from the statistics of the prompt's",
    source="arXiv 2510.00636",
    sees_question=False,
    build=build,
    defaults={"num_recent_tokens": 0, "num_sink_tokens": 4, "pool_size": 1},
    options=OPTIONS,
)
