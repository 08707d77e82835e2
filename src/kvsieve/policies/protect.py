"""Protect: force tokens into the kept set."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def protect(
    scores: torch.Tensor,
    num_sink_tokens: int,
    spans: Sequence[tuple[int, int]] = (),
    num_recent: int = 0,
    num_keep: int | None = None,
) -> torch.Tensor:
    """Give protected tokens a score above every other.

    None of SnapKV, FastKV or ASL forces the attention sinks; they are nearly always selected,
    and losing them ruins the text. Spans (a system message, say) are forced because eviction
    drops instructions first.

    Args:
        scores: [num_kv_heads, n] floating point; not changed.
        num_sink_tokens: First positions to protect.
        spans: Positions to protect as (begin, end), end excluded.
        num_recent: Last positions to protect. They give way to sinks and spans: of what is
            kept they take at most what those leave.
        num_keep: Positions that will be kept; None for no limit.

    Returns:
        [num_kv_heads, n], plus infinity where protected and nowhere else.
    """
    num_positions = scores.shape[-1]
    # Counted on the CPU, where the numbers are: asking a device would wait for it.
    forced = torch.zeros(num_positions, dtype=torch.bool)
    forced[:num_sink_tokens] = True
    for begin, end in spans:
        forced[begin:end] = True
    if num_recent > 0:
        if num_keep is not None:
            # Positions that are forced already cost nothing more.
            room = max(0, num_keep - int(forced.sum()))
            num_recent = min(num_recent, room)
        if num_recent:
            forced[max(0, num_positions - num_recent) :] = True
    if not bool(forced.any()):
        return scores
    # An infinite score must not push out a protected token.
    highest = torch.finfo(scores.dtype).max
    return scores.clamp(max=highest).masked_fill(forced.to(scores.device), float("inf"))
