"""One pass of a prompt through SmolLM2, with the tensors that each layer's attention sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

NAME = "kvsieve_tests_capture"
"""The name of the listening attention in Transformers, while a pass runs."""


@dataclass(frozen=True)
class LayerTensors:
    """What one layer's attention saw of a prompt, float32.

    Attributes:
        queries: [n, num_heads, head_size], rotary embedding applied.
        keys: [num_kv_heads, n, head_size], likewise.
        values: [num_kv_heads, n, head_size].
        output_projection: [num_heads, head_size, hidden_size].
        scale: Softmax scale.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    output_projection: torch.Tensor
    scale: float


@torch.no_grad()
def capture_layers(model: Any, token_ids: Sequence[int]) -> list[LayerTensors]:
    """Run a prompt through a Llama-like model of Transformers; one entry per layer."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    seen: list[LayerTensors] = []

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **_others: Any,
    ) -> tuple[torch.Tensor, None]:
        num_heads, head_size = query.shape[1], query.shape[3]
        seen.append(
            LayerTensors(
                queries=query[0].transpose(0, 1).clone(),
                keys=key[0].clone(),
                values=value[0].clone(),
                # o_proj reads the heads' outputs one after the other.
                output_projection=module.o_proj.weight.detach().T.reshape(num_heads, head_size, -1),
                scale=scaling,
            )
        )
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *_args, **_kwargs: None)
    try:
        model.set_attn_implementation(NAME)
        model.base_model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(NAME, None)
        AttentionMaskInterface._global_mapping.pop(NAME, None)
    return seen


@torch.no_grad()
def rotary_table(model: Any, num_positions: int) -> torch.Tensor:
    """[num_positions, head_size] float32: the cosines of all frequencies, then the sines."""
    half = model.config.head_dim // 2
    positions = torch.arange(num_positions)[None]
    # Transformers writes every frequency twice, once for each half of a head.
    cos, sin = model.base_model.rotary_emb(torch.zeros(1), positions)
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1)
