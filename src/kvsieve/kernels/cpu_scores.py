"""Attention scores on CPUs, in tiles that stay in the cache.

Scores never hold `[heads, queries, keys]`: one KV head and one block of queries at a time.
Without the log-sum-exp a tile has complete rows, so logits are computed once and the softmax
is exact in the tile. With it, keys are the outer loop and rows need not be complete.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

TILE_BYTES = 4 * 2**20
"""Bound on the logits held at once. Exceeded only where one row needs more, that is, above
a million keys."""
KEY_TILE_BYTES = 2**20
"""Bound on the keys converted to float32 at once, where the cache holds another type."""
MAX_ROWS = 384
"""Rows (queries x heads) of a tile at most. Causal tiles compute half of a square of queries
for nothing, so more would cost more than larger products save."""
UNSHIFTED = 32.0
"""Rows whose largest base-2 logit is within this of zero are exponentiated as they are: sums of
2**32 and their squared reciprocals stay normal, and so do weights 2**-62 of the largest."""
LOG2E = math.log2(math.e)


class Rows(NamedTuple):
    """One tile: query heads and queries of one KV head, and the keys that they see."""

    kv_head: int
    heads: slice
    """Query heads within the group."""
    queries: slice
    num_columns: int
    """Keys up to the last query's own."""


def window_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    *,
    power: int = 1,
    lse: torch.Tensor | None = None,
    reduce_group: bool = False,
) -> torch.Tensor:
    """See `call.window_scores`."""
    if lse is not None:
        return _scores_by_lse(query, key, scale, lse, power, reduce_group)
    return _scores_by_rows(query, key, scale, power, reduce_group, None)


def window_scores_and_squares(
    query: torch.Tensor, key: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `call.window_scores_and_squares`."""
    group = query.shape[1] // key.shape[0]
    squares = torch.zeros(
        (key.shape[0], group, key.shape[1]), dtype=torch.float32, device=key.device
    )
    return _scores_by_rows(query, key, scale, 1, False, None, squares), squares


def attention_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    *,
    noise: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """See `call.attention_sums`."""
    if noise is not None:
        noise = noise.float() * (LOG2E / temperature)
    return _scores_by_rows(query, key, scale / temperature, 1, True, noise)


def grouped_window_mean(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """See `call.grouped_window_mean`."""
    window, num_heads, _ = query.shape
    num_kv_heads, num_tokens, _ = key.shape
    group, num_old = num_heads // num_kv_heads, num_tokens - window
    scores = torch.zeros((num_kv_heads, num_old), dtype=torch.float32, device=key.device)
    if num_old == 0:
        return scores
    # Two tiles at once: the largest logits so far, and those of the next head.
    rows = max(1, min(window, MAX_ROWS, TILE_BYTES // 2 // (4 * num_old)))
    tile = torch.empty((2, rows, num_old), dtype=torch.float32, device=key.device)
    for kv_head in range(num_kv_heads):
        old_keys = key[kv_head, :num_old]
        for first in range(0, window, rows):
            queries = query[first : first + rows].float().mul(scale * LOG2E)
            largest, logits = tile[:, : queries.shape[0]]
            multiply(queries[:, kv_head * group], old_keys, largest)
            for head in range(kv_head * group + 1, (kv_head + 1) * group):
                multiply(queries[:, head], old_keys, logits)
                torch.maximum(largest, logits, out=largest)
            inverse = _exponentiate(largest)
            scores[kv_head].addmv_(largest.t(), inverse)
    return scores.div_(window)


def scratch_bytes(num_tokens: int, head_size: int, noise_rows: int = 0) -> int:
    """Bytes that scoring holds at once beyond its inputs and its result, at most.

    A constant of about 5 MiB, unless one row of logits is larger than a tile. Noise is
    scaled into a copy.

    Args:
        num_tokens: Keys.
        head_size: Size of a head.
        noise_rows: Rows of `attention_sums`'s noise, all KV heads together.
    """
    queries = 3 * MAX_ROWS * head_size * 4
    masks_and_rows = MAX_ROWS * MAX_ROWS + 4 * MAX_ROWS * 4
    tile = max(TILE_BYTES, 2 * num_tokens * 4)
    return tile + KEY_TILE_BYTES + queries + masks_and_rows + 4 * noise_rows * num_tokens


def multiply(rows: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
    """`out[i, j] = rows[i] . keys[j]`, the keys converted to float32 a block at a time.

    Args:
        rows: [num_rows, head_size] float32.
        keys: [num_keys, head_size], any strides, any floating type.
        out: [num_rows, num_keys] float32; written.
    """
    if keys.dtype == torch.float32:
        torch.mm(rows, keys.t(), out=out)
        return
    step = max(1, KEY_TILE_BYTES // (4 * keys.shape[1]))
    for first in range(0, keys.shape[0], step):
        columns = slice(first, first + step)
        torch.mm(rows, keys[columns].float().t(), out=out[:, columns])


def _exponentiate(logits: torch.Tensor) -> torch.Tensor:
    """Base-2 logits to unnormalised softmax weights in place; returns 1/denominator per row."""
    largest = logits.amax(dim=-1, keepdim=True)
    # Where it loses nothing, a pass over the tile is saved. NaN and infinities are shifted.
    if not bool((largest.abs() <= UNSHIFTED).all()):
        logits -= largest
    # exp2 is about three times as fast as exp in torch on x86.
    return logits.exp2_().sum(dim=-1).reciprocal_()


def _causal_tiles(
    num_kv_heads: int, group: int, num_queries: int, num_tokens: int
) -> Iterator[Rows]:
    """Tiles of complete rows that fit `TILE_BYTES`."""
    first_position = num_tokens - num_queries
    for kv_head in range(num_kv_heads):
        first = 0
        while first < num_queries:
            # Sized by the longest row that the tile may have.
            limit = min(num_tokens, first_position + first + MAX_ROWS)
            rows = max(1, min(MAX_ROWS, TILE_BYTES // (4 * limit)))
            heads_at_once = min(group, rows)
            last = min(num_queries, first + rows // heads_at_once)
            for head in range(0, group, heads_at_once):
                heads = slice(head, min(head + heads_at_once, group))
                yield Rows(kv_head, heads, slice(first, last), first_position + last)
            first = last


def _float_queries(query: torch.Tensor, group: int, rows: Rows, factor: float) -> torch.Tensor:
    """The tile's queries, scaled: [heads * queries, head_size] float32."""
    first = rows.kv_head * group
    heads = slice(first + rows.heads.start, first + rows.heads.stop)
    taken = query[rows.queries, heads].transpose(0, 1).float()
    return taken.mul(factor).reshape(-1, query.shape[-1])


def _scores_by_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    power: int,
    reduce_group: bool,
    noise: torch.Tensor | None,
    squares: torch.Tensor | None = None,
) -> torch.Tensor:
    """Column sums of softmax(scale * q.k + noise) ** power; noise is in base 2 already.

    The sums of the squares are added to `squares`, [G, r, N], where it is given.
    """
    num_queries, num_heads, _ = query.shape
    num_kv_heads, num_tokens, _ = key.shape
    group = num_heads // num_kv_heads
    out_rows = 1 if reduce_group else group
    scores = torch.zeros(
        (num_kv_heads, out_rows, num_tokens), dtype=torch.float32, device=key.device
    )
    tiles = list(_causal_tiles(num_kv_heads, group, num_queries, num_tokens))
    buffer = torch.empty(
        max((_num_rows(rows) * rows.num_columns for rows in tiles), default=0),
        dtype=torch.float32,
        device=key.device,
    )
    future = _future(MAX_ROWS, key.device)
    for rows in tiles:
        taken = rows.queries.stop - rows.queries.start
        num_rows, columns = _num_rows(rows), rows.num_columns
        logits = buffer[: num_rows * columns].view(num_rows, columns)
        queries = _float_queries(query, group, rows, scale * LOG2E)
        multiply(queries, key[rows.kv_head, :columns], logits)
        by_head = logits.view(-1, taken, columns)
        if noise is not None:
            mine = noise[rows.kv_head, rows.heads if noise.shape[1] > 1 else slice(0, 1)]
            by_head += mine[:, :columns].unsqueeze(1)
        by_head[:, :, columns - taken :].masked_fill_(future[:taken, :taken], float("-inf"))
        inverse = _exponentiate(logits)
        if power == 2:
            logits.square_()
            inverse.square_()
        # Normalising and summing over the queries is one product with 1/denominator.
        if reduce_group:
            scores[rows.kv_head, 0, :columns].addmv_(logits.t(), inverse)
            continue
        for index, head in enumerate(range(rows.heads.start, rows.heads.stop)):
            mine = inverse[index * taken : (index + 1) * taken]
            scores[rows.kv_head, head, :columns].addmv_(by_head[index].t(), mine)
            if squares is not None:
                squared = by_head[index].square_()
                squares[rows.kv_head, head, :columns].addmv_(squared.t(), mine.square())
    return scores.squeeze(1) if reduce_group else scores


def _num_rows(rows: Rows) -> int:
    heads, queries = rows.heads, rows.queries
    return int((heads.stop - heads.start) * (queries.stop - queries.start))


def _future(size: int, device: torch.device) -> torch.Tensor:
    """[size, size] bool, true where the key comes after the query."""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu_(1)


def _scores_by_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    lse: torch.Tensor,
    power: int,
    reduce_group: bool,
) -> torch.Tensor:
    """Column sums of exp(scale * q.k - lse) ** power: keys outside, queries inside."""
    num_queries, num_heads, _ = query.shape
    num_kv_heads, num_tokens, _ = key.shape
    group = num_heads // num_kv_heads
    out_rows = 1 if reduce_group else group
    scores = torch.zeros(
        (num_kv_heads, out_rows, num_tokens), dtype=torch.float32, device=key.device
    )
    queries_at_once = min(num_queries, MAX_ROWS)
    step = max(1, min(num_tokens, TILE_BYTES // (4 * queries_at_once)))
    buffer = torch.empty(queries_at_once * step, dtype=torch.float32, device=key.device)
    position = torch.arange(num_tokens - num_queries, num_tokens, device=key.device)
    for head in range(num_heads):
        kv_head = head // group
        total = scores[kv_head, 0 if reduce_group else head % group]
        for first in range(0, num_queries, queries_at_once):
            taken = slice(first, min(first + queries_at_once, num_queries))
            queries = query[taken, head].float().mul(scale * LOG2E)
            shift = lse[head, taken].float().mul(LOG2E).unsqueeze(1)
            first_position = num_tokens - num_queries + taken.start
            seen = num_tokens - num_queries + taken.stop
            for column in range(0, seen, step):
                columns = slice(column, min(column + step, seen))
                width = columns.stop - columns.start
                logits = buffer[: queries.shape[0] * width].view(-1, width)
                multiply(queries, key[kv_head, columns], logits)
                logits -= shift
                if columns.stop > first_position + 1:
                    start = max(columns.start, first_position)
                    ahead = torch.arange(start, columns.stop, device=key.device)
                    hidden = ahead > position[taken, None]
                    logits[:, start - columns.start :].masked_fill_(hidden, float("-inf"))
                weights = logits.exp2_()
                if power == 2:
                    weights.square_()
                total[columns] += weights.sum(dim=0)
    return scores.squeeze(1) if reduce_group else scores
