"""Rotation: apply a rotary embedding to vectors, or take it off."""

from __future__ import annotations

import torch

from kvsieve.policies.evidence import Rotary


def cos_and_sin(rotary: Rotary, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the positions [first, end), [num_positions, rotary_dim / 2] each."""
    cos, sin = rotary.cos_sin[first:end].double().chunk(2, dim=-1)
    return cos, sin


def rotate(
    vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool
) -> torch.Tensor:
    """Turn every pair of dimensions by its angle.

    Args:
        vectors: [..., head_size]. Dimensions beyond twice the number of angles stay as they are.
        cos: [..., num_pairs], broadcast over the leading dimensions.
        sin: As `cos`.
        is_neox: Whether a pair is (i, i + num_pairs); otherwise (2i, 2i + 1).

    Returns:
        The same shape.
    """
    rotary_dim = 2 * cos.shape[-1]
    turned = vectors[..., :rotary_dim]
    if is_neox:
        first, second = turned.chunk(2, dim=-1)
    else:
        first, second = turned[..., ::2], turned[..., 1::2]
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.cat(pair, dim=-1) if is_neox else torch.stack(pair, dim=-1).flatten(-2)
    return torch.cat([turned, vectors[..., rotary_dim:]], dim=-1)


def unrotate(
    vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool
) -> torch.Tensor:
    """Undo `rotate`.

    Some models (YaRN) scale cosines and sines; that is undone too, so the inverse is divided by
    the square of the scale.
    """
    scale = cos.square() + sin.square()
    return rotate(vectors, cos / scale, -sin / scale, is_neox)
