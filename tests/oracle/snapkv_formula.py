"""The SnapKV formula as the product defines it: pure functions over dense tensors.

Written from the specification and nothing else; `snapkv_oracle` runs a model around it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def sieve_start(prompt_len: int, budget_tokens: int, block_size: int) -> int:
    """Number of prompt tokens given up, a multiple of `block_size`; 0 means nothing is sieved."""
    return max(0, (prompt_len - budget_tokens) // block_size * block_size)


def window_attention(q_window: torch.Tensor, k: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention of the observation window over the whole prompt, `A` of the formula.

    Args:
        q_window: [num_heads, W, head_dim], rotary-embedded queries of the last W prompt positions.
        k: [num_kv_heads, P, head_dim], rotary-embedded keys of the whole prompt.
        scaling: factor of q·k.

    Returns:
        [num_heads, W, P] probabilities, fp32 (fp64 if q is); each row sums to 1 over the keys at
        or before its query.
    """
    num_heads, window, _ = q_window.shape
    num_kv_heads, prompt_len, _ = k.shape
    compute = torch.promote_types(q_window.dtype, torch.float32)
    keys = k.to(compute).repeat_interleave(num_heads // num_kv_heads, dim=0)
    logits = q_window.to(compute) @ keys.transpose(1, 2) * scaling
    query_pos = torch.arange(prompt_len - window, prompt_len, device=k.device)
    future = torch.arange(prompt_len, device=k.device)[None, :] > query_pos[:, None]
    return logits.masked_fill(future, float("-inf")).softmax(dim=-1)


def snapkv_scores(
    attention: torch.Tensor, num_kv_heads: int, pool_size: int, pooling: str
) -> torch.Tensor:
    """Pooled score of every prompt position before the observation window.

    Args:
        attention: [num_heads, W, P] from `window_attention`.
        num_kv_heads: query heads h belong to KV head h // (num_heads // num_kv_heads).
        pool_size: odd pooling width in positions.
        pooling: "max" or "avg".

    Returns:
        [num_kv_heads, P - W], dtype of `attention`.
    """
    if pool_size < 1 or pool_size % 2 == 0:
        raise ValueError(f"pool_size must be odd and positive, got {pool_size}")
    num_heads, window, prompt_len = attention.shape
    # The window is cut off before pooling, so its own (high) attention cannot leak into scores.
    summed = attention[:, :, : prompt_len - window].sum(dim=1)
    grouped = summed.view(num_kv_heads, num_heads // num_kv_heads, -1).mean(dim=1)
    if grouped.shape[-1] == 0:
        return grouped
    if pooling == "max":
        return F.max_pool1d(grouped, pool_size, stride=1, padding=pool_size // 2)
    if pooling == "avg":
        return F.avg_pool1d(grouped, pool_size, stride=1, padding=pool_size // 2)
    raise ValueError(f'pooling must be "max" or "avg", got {pooling!r}')


def select_kept(
    scores: torch.Tensor, *, prompt_len: int, num_kept: int, num_sink_tokens: int
) -> torch.Tensor:
    """Prompt positions that each KV head keeps.

    Args:
        scores: [num_kv_heads, P - W] pooled scores.
        prompt_len: P.
        num_kept: kept positions per head, the window and the sinks included.
        num_sink_tokens: leading positions kept whatever their score.

    Returns:
        LongTensor [num_kv_heads, num_kept], ascending.

    Raises:
        ValueError: if the window and the sinks do not fit in `num_kept`.
    """
    candidates = scores.shape[1]
    window = prompt_len - candidates
    if num_kept == prompt_len:
        return torch.arange(prompt_len, device=scores.device).repeat(scores.shape[0], 1)
    if num_kept - window < num_sink_tokens:
        raise ValueError(
            f"{num_kept} kept tokens cannot hold a window of {window} and {num_sink_tokens} sinks"
        )
    ranked = scores.clone()
    ranked[:, :num_sink_tokens] = float("inf")
    # Reversed before a stable sort, so that of two equal scores the higher position comes first.
    order = candidates - 1 - ranked.flip(1).argsort(dim=1, descending=True, stable=True)
    best = order[:, : num_kept - window].sort(dim=1).values
    tail = torch.arange(candidates, prompt_len, device=scores.device).repeat(scores.shape[0], 1)
    return torch.cat([best, tail], dim=1)


def kept_difference(
    kept_a: torch.Tensor,
    kept_b: torch.Tensor,
    scores: torch.Tensor,
    epsilon: float,
    *,
    num_sink_tokens: int = 4,
) -> tuple[int, int]:
    """Compares two kept sets of one layer and says how much of the difference near ties explain.

    A differing position (in one set of a head but not in the other) is explained if its pooled
    score lies within `epsilon`, relative, of that head's selection threshold: the lowest score
    that `kept_a`'s number of free (neither sink nor window) positions admits. Sinks and window
    positions are never explained, since no score decides about them.

    Args:
        kept_a: LongTensor [num_kv_heads, n], the reference set.
        kept_b: LongTensor [num_kv_heads, m], the set under test.
        scores: [num_kv_heads, P - W] pooled scores, the oracle's `OracleResult.scores[layer]`.
        epsilon: relative distance to the threshold that counts as a tie.
        num_sink_tokens: leading positions that were kept whatever their score.

    Returns:
        (n_different, n_explained), summed over heads. A swap of two positions counts as 2.
    """
    if kept_a.shape[0] != kept_b.shape[0] or kept_a.shape[0] != scores.shape[0]:
        raise ValueError("kept_a, kept_b and scores must have the same number of KV heads")
    candidates = scores.shape[1]
    n_different = n_explained = 0
    for row_a, row_b, row in zip(kept_a.tolist(), kept_b.tolist(), scores.tolist(), strict=True):
        differing = set(row_a) ^ set(row_b)
        n_different += len(differing)
        n_free = sum(num_sink_tokens <= pos < candidates for pos in row_a)
        if n_free == 0:
            continue
        threshold = sorted(row[num_sink_tokens:], reverse=True)[n_free - 1]
        for pos in differing:
            if num_sink_tokens <= pos < candidates:
                n_explained += abs(row[pos] - threshold) <= epsilon * abs(threshold)
    return n_different, n_explained
