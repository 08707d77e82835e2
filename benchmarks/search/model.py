"""The model of a search: one full pass that is captured, and continuations on sieved caches.

Transformers lets attention be replaced by name. Ours attends as the model does while a prompt is
read, and keeps what policies look at; afterwards it attends to whatever a candidate kept, several
candidates in one batch, because the weights are what costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

NAME = "kvsieve_search"
"""The name of our attention in Transformers, while a pass runs."""

WINDOW = 64
"""Last queries of the compressed prompt that are kept: the widest observation window."""

SAMPLED = 128
"""Queries spread evenly over the compressed prompt that are kept as well."""


@dataclass
class Captured:
    """What candidates may look at.

    Attributes:
        cut: Tokens that are compressed; everything below is of these.
        keys: [num_layers, num_kv_heads, cut, head_size] float32, after RoPE.
        values: As `keys`.
        queries: [num_layers, num_heads, WINDOW, head_size], the last ones before the cut.
        sampled: [num_layers, num_heads, num_sampled, head_size], at `sampled_at`.
        sampled_at: [num_sampled] int64.
        logits: [num_judged, vocab_size], of full KV, for the judged tokens.
    """

    cut: int
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    sampled: torch.Tensor
    sampled_at: torch.Tensor
    logits: torch.Tensor


@dataclass
class FullPass:
    """What a pass with full KV leaves, wherever the prompt is cut afterwards.

    Attributes:
        keys: [num_layers, num_kv_heads, num_tokens, head_size] float32, after RoPE.
        values: As `keys`.
        queries: [num_layers, num_heads, num_tokens, head_size], after RoPE.
        logits: [num_judged, vocab_size], for the judged tokens.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    logits: torch.Tensor

    def until(self, cut: int) -> Captured:
        """What is known where the first `cut` tokens are compressed."""
        at = torch.arange(1, min(SAMPLED, cut) + 1) * cut // min(SAMPLED, cut) - 1
        return Captured(
            cut,
            self.keys[:, :, :cut].contiguous(),
            self.values[:, :, :cut].contiguous(),
            self.queries[:, :, cut - WINDOW : cut].contiguous(),
            self.queries[:, :, at],
            at,
            self.logits,
        )


Cache = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [num_kv_heads, num_kept, head_size] of each layer."""


class SearchModel:
    """A Llama-like model in float32 on one CPU thread.

    Args:
        name: Folder of the model, as Transformers takes it.
    """

    def __init__(self, name: str) -> None:
        from transformers import AutoModelForCausalLM

        self.name = name
        self.model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        self.num_layers: int = self.model.config.num_hidden_layers
        self.inv_freq: torch.Tensor = self.model.base_model.rotary_emb.inv_freq.float()

    def output_weights(self, layer: int) -> torch.Tensor:
        """W_O of a layer, [num_heads, head_size, hidden_size]."""
        weight: torch.Tensor = self.model.base_model.layers[layer].self_attn.o_proj.weight.detach()
        heads = self.model.config.num_attention_heads
        return weight.T.reshape(heads, -1, weight.shape[0])

    @torch.no_grad()
    def full_pass(self, ids: Sequence[int], judged_from: int) -> FullPass:
        """Read a case with full KV.

        Args:
            ids: Prompt and what is forced after it.
            judged_from: First token whose prediction is judged, in [1, len(ids)).
        """
        seen: list[tuple[torch.Tensor, ...]] = []

        def attend(
            _module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            _mask: torch.Tensor | None,
            **_others: Any,
        ) -> tuple[torch.Tensor, None]:
            seen.append((key[0], value[0], query[0]))
            output = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
            return output.transpose(1, 2), None

        with _attention(self.model, attend):
            hidden = self._hidden(torch.tensor([list(ids)]), torch.arange(len(ids)))
        logits = self.model.lm_head(hidden[0, judged_from - 1 : len(ids) - 1])
        keys, values, queries = (torch.stack(part) for part in zip(*seen, strict=True))
        return FullPass(keys, values, queries, logits)

    @torch.no_grad()
    def go_on(
        self, ids: Sequence[int], first: int, judged: int, caches: Sequence[Cache]
    ) -> torch.Tensor:
        """Predictions on sieved caches, teacher-forced.

        Args:
            ids: Tokens that follow the compressed ones.
            first: True position of `ids[0]`.
            judged: How many of the last tokens of `ids` give logits.
            caches: One cache per candidate.

        Returns:
            [num_candidates, judged, vocab_size].
        """
        new = len(ids)
        triangle = torch.ones(new, new, dtype=torch.bool).tril()

        def attend(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            _mask: torch.Tensor | None,
            **_others: Any,
        ) -> tuple[torch.Tensor, None]:
            output = torch.empty_like(query)
            for number, cache in enumerate(caches):
                old_key, old_value = cache[int(module.layer_idx)]  # type: ignore[arg-type]
                see = torch.ones(new, old_key.shape[1] + new, dtype=torch.bool)
                see[:, old_key.shape[1] :] = triangle
                output[number] = F.scaled_dot_product_attention(
                    query[number : number + 1],
                    torch.cat([old_key, key[number]], dim=1)[None],
                    torch.cat([old_value, value[number]], dim=1)[None],
                    attn_mask=see,
                    enable_gqa=True,
                )[0]
            return output.transpose(1, 2), None

        with _attention(self.model, attend):
            hidden = self._hidden(
                torch.tensor([list(ids)]).expand(len(caches), -1),
                torch.arange(first, first + new),
            )
        logits: torch.Tensor = self.model.lm_head(hidden[:, new - judged :])
        return logits

    def _hidden(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model.base_model(
            input_ids=ids, position_ids=positions[None].expand(ids.shape[0], -1), use_cache=False
        )[0]
        return hidden


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """No mask: our attention is causal by itself."""


@contextmanager
def _attention(model: Any, attend: Callable[..., Any]) -> Iterator[None]:
    """Let the model attend with `attend`, and put everything back."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(NAME, None)
        AttentionMaskInterface._global_mapping.pop(NAME, None)
