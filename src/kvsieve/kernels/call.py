"""The calls: what each operation takes and returns, whatever implements it.

Shapes: `G` KV heads, `H` query heads, `r = H / G` query heads of a group, `d` head size, `N`
tokens. Queries and keys carry their rotary embedding, and queries are always the last ones
of the tokens whose keys are given: query i of n stands at position `N - n + i` and sees the
keys up to its own. Inputs may be float32, bfloat16 or float16; everything is computed and
returned in float32, except that the Triton kernels multiply queries and keys in the cache's
type, accumulating in float32, as attention does.

A key that is not a number makes the scores of every query that sees it not a number, since it
is in their denominators: in its KV head all columns, in other KV heads none. With `lse` given
only its own column is affected.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Literal

import torch

from kvsieve.kernels.pages import PagedRows, Rows, as_dense

Implementation = Literal["reference", "cpu", "triton"]

# Operation and implementation to the module that has it. `triton` is imported when it is
# asked for, never before: a server on a CPU has none.
_MODULES: dict[str, dict[str, str]] = {
    "window_scores": {"reference": "reference", "cpu": "cpu_scores", "triton": "triton_scores"},
    "window_scores_and_squares": {"reference": "reference", "cpu": "cpu_scores"},
    "attention_sums": {"reference": "reference", "cpu": "cpu_scores"},
    "grouped_window_mean": {"reference": "reference", "cpu": "cpu_scores"},
    "key_redundancy": {"reference": "reference", "cpu": "cpu_rows"},
    "output_norms": {"reference": "reference", "cpu": "cpu_rows"},
    "compact_pages": {"reference": "reference", "triton": "triton_move"},
}


class KernelError(ValueError):
    """An implementation was asked for that is not there; says what to do."""


def _find(operation: str, impl: str) -> Callable[..., Any]:
    modules = _MODULES[operation]
    if impl not in modules:
        raise KernelError(
            f"{operation} has no implementation {impl!r}; it has {', '.join(modules)}"
        )
    if impl == "triton" and importlib.util.find_spec("triton") is None:
        raise KernelError(
            f"{operation} was asked for in Triton, which is not installed here; install it with"
            " kvsieve[gpu], or pass impl='cpu'"
        )
    module = importlib.import_module(f"kvsieve.kernels.{modules[impl]}")
    found: Callable[..., Any] = getattr(module, operation)
    return found


def _check_query(query: torch.Tensor, keys: Rows) -> None:
    """Raise ValueError unless queries and keys fit together."""
    if isinstance(keys, PagedRows):
        num_tokens, num_kv_heads, head_size = keys.num_tokens, *keys.pages.shape[2:]
    else:
        num_kv_heads, num_tokens, head_size = keys.shape
    num_queries, num_heads, query_size = query.shape
    if num_heads % num_kv_heads or query_size != head_size or not 1 <= num_queries <= num_tokens:
        raise ValueError(
            f"queries {tuple(query.shape)} do not fit {num_tokens} keys of {num_kv_heads} heads"
            f" of size {head_size}: they must be 1 to {num_tokens}, their heads a multiple of"
            f" {num_kv_heads}"
        )


def window_scores(
    query: torch.Tensor,
    keys: Rows,
    scale: float,
    *,
    impl: Implementation,
    power: Literal[1, 2] = 1,
    lse: torch.Tensor | None = None,
    reduce_group: bool = False,
) -> torch.Tensor:
    """Attention of the last queries to every key, summed over those queries.

    `sum_w A[h, w, j] ** power` with A the softmax over all keys up to the query's own: SnapKV's
    window attention (arXiv 2404.14469) with power 1, KV-Compress's (arXiv 2410.00161) with
    power 2. All N columns are returned, the window's own too; a row sums to the number of
    queries for power 1.

    Args:
        query: [W, H, d], W at most N.
        keys: [G, N, d] in any strides, or paged.
        scale: Softmax scale, 1/sqrt(d) in most models.
        impl: "reference", "cpu" or "triton".
        power: 1 or 2, applied to each weight before the sum.
        lse: [H, W] float32 natural logarithm of each query's softmax denominator, where the
            attention kernel returned it; must be finite. None computes it here.
        reduce_group: Sum over the r query heads of a KV head as well.

    Returns:
        [G, r, N] float32; [G, N] if `reduce_group`.

    Raises:
        KernelError: The implementation is not there.
        ValueError: The shapes do not fit, or the power is neither 1 nor 2.
    """
    function = _find("window_scores", impl)
    _check_query(query, keys)
    if power not in (1, 2):
        raise ValueError(f"power must be 1 or 2, not {power}")
    if lse is not None and lse.shape != (query.shape[1], query.shape[0]):
        raise ValueError(
            f"lse must be [heads, queries] = {(query.shape[1], query.shape[0])}, not"
            f" {tuple(lse.shape)}"
        )
    rows = keys if impl == "triton" else as_dense(keys)
    scores: torch.Tensor = function(
        query, rows, scale, power=power, lse=lse, reduce_group=reduce_group
    )
    return scores


def window_scores_and_squares(
    query: torch.Tensor, keys: Rows, scale: float, *, impl: Implementation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both powers of `window_scores` from one pass over the keys.

    Args:
        query: [W, H, d], W at most N.
        keys: [G, N, d] in any strides, or paged.
        scale: Softmax scale.
        impl: "reference" or "cpu".

    Returns:
        Sums of the weights and of their squares, [G, r, N] float32 each.

    Raises:
        KernelError: The implementation is not there.
        ValueError: The shapes do not fit.
    """
    function = _find("window_scores_and_squares", impl)
    _check_query(query, keys)
    both: tuple[torch.Tensor, torch.Tensor] = function(query, as_dense(keys), scale)
    return both


def attention_sums(
    query: torch.Tensor,
    keys: Rows,
    scale: float,
    *,
    impl: Implementation,
    noise: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Attention of a chunk's queries to every key, summed over the queries and the group.

    `sum_{h in group, i} softmax_j((scale * q_i . k_j + noise_j) / temperature)`. Added up over
    the chunks of a prompt this is H2O's accumulated attention (arXiv 2306.14048); with Gumbel
    noise and a temperature it is Keyformer's (MLSys 2024). A chunk's keys are those of the
    prompt up to the chunk's end; only the causal half is computed.

    Args:
        query: [n, H, d], all queries of the chunk.
        keys: [G, first + n, d] in any strides, or paged.
        scale: Softmax scale.
        impl: "reference" or "cpu".
        noise: [G, r or 1, first + n], added to the scaled logits.
        temperature: Divides the logits, noise included; above 0.

    Returns:
        [G, first + n] float32; each KV head's sum is n * r.

    Raises:
        KernelError: The implementation is not there.
        ValueError: The shapes do not fit, or the temperature is not above 0.
    """
    function = _find("attention_sums", impl)
    _check_query(query, keys)
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    key = as_dense(keys)
    num_kv_heads, num_tokens, _ = key.shape
    group = query.shape[1] // num_kv_heads
    fitting = [(num_kv_heads, rows, num_tokens) for rows in (1, group)]
    if noise is not None and noise.shape not in fitting:
        raise ValueError(f"noise must be one of {fitting}, not {tuple(noise.shape)}")
    sums: torch.Tensor = function(query, key, scale, noise=noise, temperature=temperature)
    return sums


def grouped_window_mean(
    query: torch.Tensor, keys: Rows, scale: float, *, impl: Implementation
) -> torch.Tensor:
    """R-KV's importance of the keys before the window, not pooled (R-KV, `[code]` d15c976).

    `mean_w softmax_{j < N - W}(max_{h in group} scale * q_hw . k_j)`: the largest logit of the
    group, a softmax over the columns before the window only, the mean over the window.

    Args:
        query: [W, H, d], W at most N.
        keys: [G, N, d] in any strides, or paged.
        scale: Softmax scale.
        impl: "reference" or "cpu".

    Returns:
        [G, N - W] float32; a row sums to 1.

    Raises:
        KernelError: The implementation is not there.
        ValueError: The shapes do not fit.
    """
    function = _find("grouped_window_mean", impl)
    _check_query(query, keys)
    scores: torch.Tensor = function(query, as_dense(keys), scale)
    return scores


def key_redundancy(keys: Rows, *, impl: Implementation, threshold: float = 0.5) -> torch.Tensor:
    """How much each key repeats the others of its KV head (R-KV).

    The cosine similarity of all pairs of keys, the diagonal zero. In each row the most recent
    key (highest position) more similar than the threshold is set to zero, so that the newest
    copy is not counted as redundant. Then the mean over the rows, and a softmax over the
    tokens. Takes N^2 time: meant for a few thousand tokens, not for long prompts.

    Args:
        keys: [G, N, d] in any strides, or paged.
        impl: "reference" or "cpu".
        threshold: Cosine above which a key counts as a copy.

    Returns:
        [G, N] float32; a row sums to 1.

    Raises:
        KernelError: The implementation is not there.
    """
    function = _find("key_redundancy", impl)
    redundancy: torch.Tensor = function(as_dense(keys), threshold=threshold)
    return redundancy


def output_norms(
    values: Rows, output_weight: torch.Tensor, *, impl: Implementation
) -> torch.Tensor:
    """How much each value adds to the hidden state: `mean_h ||v W_O[h]||_1` (CriticalKV).

    Its products are those of the output projection over the whole prompt: 2 * H * N * d *
    hidden floating-point operations in each layer.

    Args:
        values: [G, N, d] in any strides, or paged.
        output_weight: [H, d, hidden], the output projection's part of each query head: for a
            `torch.nn.Linear`, `weight.t().view(H, d, hidden)`.
        impl: "reference" or "cpu".

    Returns:
        [G, N] float32, the mean over the group's query heads.

    Raises:
        KernelError: The implementation is not there.
        ValueError: The shapes do not fit.
    """
    function = _find("output_norms", impl)
    value = as_dense(values)
    num_heads, head_size, _ = output_weight.shape
    if num_heads % value.shape[0] or head_size != value.shape[2]:
        raise ValueError(
            f"the output weight {tuple(output_weight.shape)} does not fit {value.shape[0]} KV"
            f" heads of size {value.shape[2]}"
        )
    norms: torch.Tensor = function(value, output_weight)
    return norms


def compact_pages(
    pages: torch.Tensor,
    blocks: torch.Tensor,
    positions: torch.Tensor,
    start: int,
    *,
    impl: Implementation,
) -> None:
    """Move the kept rows of one request, in place, to `[start, start + num_keep)`.

    Everything is gathered before anything is written: source and destination overlap. On
    CPUs `cpu.compact` does this, for keys and values at once.

    Args:
        pages: Keys or values, [num_blocks, block_size, G, d] in any strides; written.
        blocks: The request's physical blocks in order, int.
        positions: [G, num_keep] int64, ascending.
        start: First position of the kept region.
        impl: "reference" or "triton".

    Raises:
        KernelError: The implementation is not there.
    """
    _find("compact_pages", impl)(pages, blocks, positions, start)
