"""A sieved layer of the model: its attention module, and what policies need from around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvsieve.policies import Rotary

if TYPE_CHECKING:
    from kvsieve.engine.spec import SievedAttentionSpec


@dataclass(frozen=True)
class SievedLayer:
    """One sieved layer of the model.

    Attributes:
        name: vLLM's name of its `Attention` module.
        number: Its number in the model.
        module: That module.
        spec: Its cache spec.
        rotary: Its rotary embedding; None if nobody looks at it.
        output_projection: [num_heads, head_size, hidden_size], likewise.
    """

    name: str
    number: int
    module: Any
    spec: SievedAttentionSpec
    rotary: Rotary | None = None
    output_projection: torch.Tensor | None = None


ROTARY_MARKS = ("use_rope", "_use_rope", "use_rotary", "apply_rope_all_layers", "force_rope", "v1")
"""By what vLLM's models mark a layer with full attention that has a rotary embedding and does not
apply it: one of these is false (EXAONE, Step, Cohere). To layers with a sliding window it may
be applied all the same; those are not sieved."""


def find_rotary(model: Any, name: str) -> Rotary | None:
    """The rotary embedding that the layer of an attention module with full attention applies.

    Returns:
        None if it applies none, or none as we know it.
    """
    parent = _parent(model, name)
    if not all(getattr(parent, mark, True) for mark in ROTARY_MARKS):
        return None
    module: Any = getattr(parent, "rotary_emb", None)
    cos_sin = getattr(module, "cos_sin_cache", None)
    if not isinstance(cos_sin, torch.Tensor) or cos_sin.dim() != 2:
        return None
    return Rotary(cos_sin, bool(module.is_neox_style))


def find_output_projection(model: Any, name: str, module: Any) -> torch.Tensor | None:
    """The output projection beside an attention module, per query head.

    Back-ends pack weights in their own ways (vLLM's CPU linear leaves an empty parameter
    behind), so the projection is asked what it does to unit vectors.

    Returns:
        [num_heads, head_size, hidden_size] in the model's type; None if there is none.
    """
    projection = getattr(_parent(model, name), "o_proj", None)
    if projection is None:
        return None
    num_heads, head_size = module.num_heads, module.head_size
    dtype = module.dtype
    unit = torch.eye(num_heads * head_size, dtype=dtype, device=projection.weight.device)
    weight = projection.quant_method.apply(projection, unit, None)
    return weight.view(num_heads, head_size, -1)


def _parent(model: Any, name: str) -> Any:
    return model.get_submodule(name.rpartition(".")[0])
