"""One pass of a prompt through a model, with an ear at every layer.

Transformers lets attention be replaced by name (`AttentionInterface`). Ours computes the same
in slices and hands what it sees to a listener, layer by layer, so that nothing of the size of
heads x tokens has to be kept. The model is as before when the pass ends, also when it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kvsieve.core.errors import ConfigError, KvsieveError
from kvsieve.inspect.model import SLIDING, LoadedModel
from kvsieve.inspect.sliced import (
    LayerAttention,
    LayerHeads,
    sampled_queries,
    slice_bytes_for,
    sliced_attention,
)

NAME = "kvsieve_inspect"
"""The name of our attention in Transformers, while a pass runs."""

CHECK_TOKENS = 64
"""Tokens of the prompt on which our attention is compared with the model's own."""


class Listener(Protocol):
    """Takes what a pass sees, in the order of the layers."""

    def on_attention(self, attention: LayerAttention, heads: LayerHeads) -> None:
        """A layer with full attention has attended."""

    def on_sliding(self, layer: int) -> None:
        """A layer with a sliding window has attended."""

    def on_hidden(self, layer: int, hidden: torch.Tensor) -> None:
        """A decoder layer has ended with this hidden state [num_tokens, hidden_size]."""


@dataclass
class Survey:
    """What a short pass tells of a model's layers.

    Attributes:
        layers: Layers with full attention, ascending.
        untouched: Layers with a sliding window, ascending.
        num_heads: Query heads of a layer.
        num_kv_heads: KV heads of a layer.
        cached_numbers: Numbers that a layer caches per token.
    """

    layers: list[int] = field(default_factory=list)
    untouched: list[int] = field(default_factory=list)
    num_heads: int = 0
    num_kv_heads: int = 0
    cached_numbers: int = 0

    def on_attention(self, attention: LayerAttention, heads: LayerHeads) -> None:
        """Note a layer with full attention."""
        self.layers.append(attention.layer)
        self.num_heads = attention.window_mass.shape[0]
        self.num_kv_heads = attention.num_kv_heads
        self.cached_numbers = attention.cached_numbers

    def on_sliding(self, layer: int) -> None:
        """Note a layer with a sliding window."""
        self.untouched.append(layer)

    def on_hidden(self, layer: int, hidden: torch.Tensor) -> None:
        """Nothing to note."""


def run_pass(
    loaded: LoadedModel,
    token_ids: list[int],
    listener: Listener,
    *,
    observation_window: int,
    num_sampled: int,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a prompt through the model's layers, once, and let the listener hear of each.

    Args:
        loaded: The model.
        token_ids: The prompt.
        listener: Hears of every layer.
        observation_window: Last queries of the prompt that are summed, at most all of it.
        num_sampled: Queries spread over the prompt that are summed.
        positions: [num_tokens] int64, ascending, what the rotary embedding is told; None counts
            from 0.

    Returns:
        The model's last hidden state, [num_tokens, hidden_size].
    """
    sampled = sampled_queries(len(token_ids), num_sampled)

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **_others: Any,
    ) -> tuple[torch.Tensor, None]:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        heads = LayerHeads(module, query[0], key[0], value[0], scale)
        output, attention = sliced_attention(
            heads.query,
            heads.key,
            heads.value,
            scale,
            layer=layer,
            observation_window=observation_window,
            sampled=sampled,
            sliding_window=sliding_window,
            slice_bytes=slice_bytes_for(query.device),
        )
        if sliding_window is None and not _is_sliding(loaded.model.config, layer):
            listener.on_attention(attention, heads)
        else:
            listener.on_sliding(layer)
        return output.transpose(0, 1)[None], None

    with _attention(loaded.model, attend), _hidden_states(loaded.layers, listener.on_hidden):
        return _forward(loaded, token_ids, positions)


def survey(loaded: LoadedModel, token_ids: list[int]) -> Survey:
    """Look at a model's layers, and compare our attention with its own.

    A model may do to its logits what Transformers' interface does not show us: learned sinks,
    caps, biases. Then its figures would be another model's.

    Args:
        loaded: The model.
        token_ids: A prompt; its first `CHECK_TOKENS` tokens are used.

    Raises:
        ConfigError: The two differ by more than rounding explains, or no layer has full
            attention.
        KvsieveError: The model's numbers are not finite.
    """
    ids = token_ids[:CHECK_TOKENS]
    seen = Survey()
    theirs = _forward(loaded, ids).float()
    if not bool(theirs.isfinite().all()):
        raise KvsieveError(
            f"the hidden states of {loaded.name} are not finite: its weights or their type are"
            " broken, and no figure would mean anything"
        )
    ours = run_pass(loaded, ids, seen, observation_window=1, num_sampled=1).float()
    difference = float((theirs - ours).norm() / theirs.norm().clamp_min(1e-30))
    bound = 1e-3 if loaded.dtype == torch.float32 else 5e-2
    # A comparison with something that is not a number is false.
    if not difference <= bound:
        raise ConfigError(
            [
                f"{loaded.name} cannot be inspected: its hidden states differ by {difference:.2g}"
                " (relative) when its attention is computed as plain causal softmax, so its"
                " attention does something else (sinks, caps, biases)"
            ]
        )
    if not seen.layers:
        raise ConfigError(
            [f"{loaded.name} has no layer with full attention, so there is nothing to sieve"]
        )
    return seen


@torch.no_grad()
def _forward(
    loaded: LoadedModel, token_ids: list[int], positions: torch.Tensor | None = None
) -> torch.Tensor:
    """The last hidden state [num_tokens, hidden_size]; no logits are computed, nothing cached."""
    ids = torch.tensor([token_ids], device=loaded.device)
    told = {} if positions is None else {"position_ids": positions.to(loaded.device)[None]}
    hidden: torch.Tensor = loaded.model.base_model(input_ids=ids, use_cache=False, **told)[0][0]
    return hidden


def _is_sliding(config: Any, layer: int) -> bool:
    kinds = getattr(config, "layer_types", None) or ()
    return layer < len(kinds) and kinds[layer] == SLIDING


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """No mask: our attention is causal by itself."""


@contextmanager
def _attention(model: Any, attend: Callable[..., Any]) -> Iterator[None]:
    """Let the model attend with `attend`, and put everything back.

    Raises:
        ConfigError: The model does not let its attention be replaced.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)
    try:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            # Transformers only warns.
            raise ConfigError([f"{type(model).__name__} does not let its attention be replaced"])
        yield
    finally:
        model.set_attn_implementation(before)
        # The registries have no way to take a name back; a left-over one would hold the prompt.
        AttentionInterface._global_mapping.pop(NAME, None)
        AttentionMaskInterface._global_mapping.pop(NAME, None)


@contextmanager
def _hidden_states(
    layers: tuple[torch.nn.Module, ...], on_hidden: Callable[[int, torch.Tensor], None]
) -> Iterator[None]:
    """Hand each layer's output to `on_hidden`, with the layer's number."""

    def hook(number: int) -> Callable[..., None]:
        def after(_module: Any, _inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            on_hidden(number, hidden[0])

        return after

    handles = [layer.register_forward_hook(hook(n)) for n, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
