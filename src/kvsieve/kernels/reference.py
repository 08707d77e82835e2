"""The definition of correct: dense, float32, one request and layer at a time.

Every operation of `kernels.call` is written here as its formula reads. Nothing is bounded:
attention is held as `[heads, queries, keys]`. Queries are always the last ones of the tokens
whose keys are given: query i of n stands at position `num_tokens - n + i`.
"""

from __future__ import annotations

import torch


def window_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    *,
    power: int = 1,
    lse: torch.Tensor | None = None,
    reduce_group: bool = False,
) -> torch.Tensor:
    """Attention of the last queries to every key, summed over those queries.

    The softmax is over all keys up to the query's own. With power 1 that is SnapKV's window
    attention, with power 2 KV-Compress's. See `call.window_scores`.
    """
    logits = _masked_logits(query, key, scale)
    if lse is None:
        weights = torch.softmax(logits, dim=-1)
    else:
        weights = (logits - lse.float().view(*logits.shape[:3], 1)).exp()
    scores = weights.pow(power).sum(dim=2)
    return scores.sum(dim=1) if reduce_group else scores


def window_scores_and_squares(
    query: torch.Tensor, key: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both powers of `window_scores`."""
    return window_scores(query, key, scale), window_scores(query, key, scale, power=2)


def attention_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    *,
    noise: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Attention of a chunk's queries, summed over queries and the group (H2O, Keyformer).

    See `call.attention_sums`.
    """
    logits = _masked_logits(query, key, scale)
    if noise is not None:
        logits = logits + noise.float().unsqueeze(2)
    return torch.softmax(logits / temperature, dim=-1).sum(dim=(1, 2))


def grouped_window_mean(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """R-KV's importance: largest logit of the group, softmax before the window, mean over it.

    See `call.grouped_window_mean`.
    """
    old = key.shape[1] - query.shape[0]
    logits = _logits(query, key, scale)[..., :old]
    return torch.softmax(logits.amax(dim=1), dim=-1).mean(dim=1)


def key_redundancy(key: torch.Tensor, *, threshold: float = 0.5) -> torch.Tensor:
    """R-KV's redundancy of every key with the others of its KV head.

    See `call.key_redundancy`.
    """
    unit = torch.nn.functional.normalize(key.float(), dim=-1)
    similarity = unit @ unit.transpose(1, 2)
    similarity.diagonal(dim1=1, dim2=2).zero_()
    column = torch.arange(key.shape[1], device=key.device)
    newest = torch.where(similarity > threshold, column, -1).amax(dim=-1, keepdim=True)
    similarity = similarity.masked_fill(column == newest, 0.0)
    return torch.softmax(similarity.mean(dim=1), dim=-1)


def output_norms(value: torch.Tensor, output_weight: torch.Tensor) -> torch.Tensor:
    """CriticalKV's weight of a value: the L1 norm of what it adds to the hidden state.

    See `call.output_norms`.
    """
    num_kv_heads, _, head_size = value.shape
    weight = output_weight.float().view(num_kv_heads, -1, head_size, output_weight.shape[-1])
    projected = torch.einsum("gnd,grdm->grnm", value.float(), weight)
    return projected.abs().sum(dim=-1).mean(dim=1)


def compact(rows: torch.Tensor, positions: torch.Tensor, start: int) -> torch.Tensor:
    """Move the rows at `positions` to `[start, start + positions.shape[1])`.

    Args:
        rows: [num_kv_heads, num_tokens, head_size], keys or values; not changed.
        positions: [num_kv_heads, num_keep] int64, ascending.
        start: First row of the kept region.

    Returns:
        A copy of `rows` with the kept rows in place.
    """
    index = positions[..., None].expand(-1, -1, rows.shape[-1])
    moved = rows.clone()
    moved[:, start : start + positions.shape[1]] = rows.gather(1, index)
    return moved


def compact_pages(
    pages: torch.Tensor, blocks: torch.Tensor, positions: torch.Tensor, start: int
) -> None:
    """`compact` of a paged cache, in place.

    Args:
        pages: [num_blocks, block_size, num_kv_heads, head_size], any strides; written.
        blocks: Physical blocks of the request, in order, int.
        positions: [num_kv_heads, num_keep] int64, ascending.
        start: First position of the kept region.
    """
    num_kv_heads, num_keep = positions.shape
    block_size = pages.shape[1]
    heads = torch.arange(num_kv_heads, device=pages.device).unsqueeze(1)
    target = torch.arange(start, start + num_keep, device=pages.device).expand(num_kv_heads, -1)
    blocks = blocks.long()
    kept = pages[blocks[positions // block_size], positions % block_size, heads]
    pages[blocks[target // block_size], target % block_size, heads] = kept


def _logits(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """Scaled logits [num_kv_heads, group, queries, num_tokens] float32, not masked."""
    num_queries, num_heads, head_size = query.shape
    num_kv_heads = key.shape[0]
    grouped = query.float().view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_size)
    return torch.einsum("wkgd,knd->kgwn", grouped, key.float()) * scale


def _masked_logits(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """`_logits`, minus infinity at the keys after the query."""
    num_queries, num_tokens = query.shape[0], key.shape[1]
    position = torch.arange(num_tokens, device=key.device)
    hidden = position > position[num_tokens - num_queries :, None]
    return _logits(query, key, scale).masked_fill(hidden, float("-inf"))
