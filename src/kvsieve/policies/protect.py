"""Protect: force tokens into the kept set."""

from __future__ import annotations

import torch


def protect_sinks(scores: torch.Tensor, num_sink_tokens: int) -> torch.Tensor:
    """Give the first tokens a score above every other.

    None of SnapKV, FastKV or ASL forces the attention sinks; they are nearly always
    selected, and losing them ruins the text, so a few are forced here.

    Args:
        scores: [num_kv_heads, n] float32; not changed.
        num_sink_tokens: Positions to protect.

    Returns:
        [num_kv_heads, n] float32.
    """
    if num_sink_tokens == 0:
        return scores
    scores = scores.clone()
    scores[:, :num_sink_tokens] = float("inf")
    return scores
