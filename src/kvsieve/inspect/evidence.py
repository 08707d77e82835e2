"""What a policy may look at while a prompt passes through a model (`policies.Evidence`).

The window's attention is there already, from the pass itself; everything else is computed when
a policy asks for it, in tiles (`kernels.cpu_scores`, on any device), and what a choice may ask
for is kept, since a policy chooses once for every budget.
"""

from __future__ import annotations

import copy
import sys
from functools import cached_property
from inspect import signature
from itertools import product
from typing import Any, Literal

import torch

from kvsieve.core.errors import ConfigError
from kvsieve.inspect.model import FULL, LoadedModel
from kvsieve.inspect.sliced import LayerAttention, LayerHeads
from kvsieve.kernels import call
from kvsieve.policies import Accumulator, Policy, Rotary
from kvsieve.policies.rotation import rotate

CHUNK_TOKENS = 256
"""Queries that an accumulator sees at once."""

POSITIONS_AHEAD = 8192
"""Positions after the prompt that the rotary table has, as far as the model knows them."""

PROBED_POSITIONS = 8


class LayerEvidence:
    """A prompt in one layer of a pass (`policies.Evidence`).

    Args:
        attention: Where the layer's attention went.
        heads: What it attended with.
        output_projection: [num_heads, value_size, hidden_size] float32, for who looks at it.
        rotary: The layer's rotary embedding, for who looks at it.
        accumulator: The policy's, if it has one.
    """

    def __init__(
        self,
        attention: LayerAttention,
        heads: LayerHeads,
        *,
        output_projection: torch.Tensor | None = None,
        rotary: Rotary | None = None,
        accumulator: Accumulator | None = None,
    ) -> None:
        self.num_kv_heads, self.num_tokens, _ = heads.key.shape
        self.layer = attention.layer
        self._heads = heads
        first_of_window = self.num_tokens - attention.observation_window
        self._window = heads.query[:, first_of_window:].transpose(0, 1)
        self._window_attention = {1: attention.window_attention}
        self._output_projection = output_projection
        self._rotary = rotary
        self._accumulator = accumulator

    def window_attention(self, power: Literal[1, 2] = 1) -> torch.Tensor:
        """See `Evidence`."""
        if power not in self._window_attention:
            self._window_attention[power] = call.window_scores(
                self._window, self._heads.key, self._heads.scale, impl="cpu", power=power
            )
        return self._window_attention[power]

    def grouped_window_mean(self) -> torch.Tensor:
        """See `Evidence`."""
        return call.grouped_window_mean(
            self._window, self._heads.key, self._heads.scale, impl="cpu"
        )

    def keys(self) -> torch.Tensor:
        """See `Evidence`."""
        return self._heads.key.float()

    def values(self) -> torch.Tensor:
        """See `Evidence`."""
        return self._heads.value.float()

    def key_redundancy(self) -> torch.Tensor:
        """See `Evidence`."""
        return self._key_redundancy

    @cached_property
    def _key_redundancy(self) -> torch.Tensor:
        return call.key_redundancy(self._heads.key, impl="cpu")

    def output_norms(self) -> torch.Tensor:
        """See `Evidence`.

        Raises:
            ValueError: The policy did not say that it looks at them.
        """
        return self._output_norms

    @cached_property
    def _output_norms(self) -> torch.Tensor:
        if self._output_projection is None:
            raise ValueError("it asks for output norms and does not say so (looks_at)")
        return call.output_norms(self._heads.value, self._output_projection, impl="cpu")

    def accumulated(self) -> Any:
        """See `Evidence`.

        Raises:
            ValueError: The policy has no accumulator.
        """
        return self._accumulated

    @cached_property
    def _accumulated(self) -> Any:
        if self._accumulator is None:
            raise ValueError("it asks for what it accumulated and has no accumulator")
        state = None
        for first in range(0, self.num_tokens, CHUNK_TOKENS):
            chunk = LayerChunk(self._heads, self._rotary, first)
            if first == 0:
                state = self._accumulator.start(chunk)
            state = self._accumulator.add(state, chunk)
        return state


class LayerChunk:
    """Some queries of a prompt in one layer of a pass (`policies.Chunk`).

    Args:
        heads: What the layer attended with.
        rotary: Its rotary embedding, for who looks at it.
        first: Position of the first query.
    """

    def __init__(self, heads: LayerHeads, rotary: Rotary | None, first: int) -> None:
        self.num_kv_heads, self.prompt_tokens, _ = heads.key.shape
        self.num_queries_per_kv = heads.query.shape[0] // self.num_kv_heads
        self.first = first
        self.num_queries = min(CHUNK_TOKENS, self.prompt_tokens - first)
        self.rotary = rotary
        end = first + self.num_queries
        self._queries = heads.query[:, first:end].transpose(0, 1)
        self._keys = heads.key[:, :end]
        self._scale = heads.scale

    def queries(self) -> torch.Tensor:
        """See `Chunk`."""
        return self._queries

    def attention_sums(
        self, noise: torch.Tensor | None = None, temperature: float = 1.0
    ) -> torch.Tensor:
        """See `Chunk`."""
        return call.attention_sums(
            self._queries, self._keys, self._scale, impl="cpu", noise=noise, temperature=temperature
        )


def layer_evidence(
    policy: Policy, attention: LayerAttention, heads: LayerHeads, rotary: Rotary | None
) -> LayerEvidence:
    """The evidence of a layer that has attended.

    Args:
        policy: Who will look at it.
        attention: Where the layer's attention went.
        heads: What it attended with.
        rotary: From `find_rotary`, if the policy looks at it.

    Raises:
        ConfigError: The policy looks at something that the layer does not show.
    """
    projection = None
    if "output_norms" in policy.looks_at:
        projection = _output_projection(heads)
        if projection is None:
            raise ConfigError(
                [
                    f"the policy {policy.name} needs the output projection of layer"
                    f" {attention.layer}, and there is no o_proj beside its attention; choose"
                    " another policy"
                ]
            )
    return LayerEvidence(
        attention,
        heads,
        output_projection=projection,
        rotary=rotary,
        accumulator=policy.accumulator,
    )


@torch.no_grad()
def _output_projection(heads: LayerHeads) -> torch.Tensor | None:
    """The output projection per query head: [num_heads, value_size, hidden_size] float32."""
    projection: Any = getattr(heads.module, "o_proj", None)
    if projection is None:
        return None
    num_heads, value_size = heads.query.shape[0], heads.value.shape[-1]
    # What it does to unit vectors: quantised weights are packed in ways of their own.
    unit = torch.eye(num_heads * value_size, dtype=heads.query.dtype, device=heads.query.device)
    weight: torch.Tensor = projection(unit).float()
    if projection.bias is not None:
        weight = weight - projection.bias.float()
    return weight.view(num_heads, value_size, -1)


def rotary_for(loaded: LoadedModel, policy: Policy, num_tokens: int) -> Rotary | None:
    """The rotary embedding of a model's layers with full attention, if a policy looks at it.

    Args:
        loaded: The model.
        policy: The policy.
        num_tokens: Length of the prompt, in tokens.

    Raises:
        ConfigError: There is none that can be read.
    """
    if "rotary" not in policy.looks_at:
        return None
    num_positions = num_tokens + POSITIONS_AHEAD
    if loaded.max_tokens is not None:
        # vLLM's table ends there, too.
        num_positions = min(num_positions, loaded.max_tokens)
    rotary = find_rotary(loaded, num_positions)
    if rotary is None:
        raise ConfigError(
            [
                f"the policy {policy.name} needs the rotary embedding of {loaded.name}, and there"
                " is none that can be read; choose another policy"
            ]
        )
    return rotary


@torch.no_grad()
def find_rotary(loaded: LoadedModel, num_positions: int) -> Rotary | None:
    """The rotary embedding of a model's layers with full attention.

    Transformers' models differ in how cosines and sines lie in their tables and in which
    dimensions make a pair, so each way is compared with what the model's own function does.

    Returns:
        Its table of `num_positions` positions; None if there is none as we know it, or a layer
        does not use it (SmolLM3).
    """
    attentions = [getattr(layer, "self_attn", None) for layer in loaded.layers]
    if not all(getattr(attention, "use_rope", True) for attention in attentions):
        return None
    module = getattr(loaded.model.base_model, "rotary_emb", None)
    apply = getattr(sys.modules[type(loaded.layers[0]).__module__], "apply_rotary_pos_emb", None)
    if module is None or apply is None:
        return None
    # Some change their frequencies with the last position that they saw.
    module = copy.deepcopy(module)
    of_layer = {"layer_type": FULL} if "layer_type" in signature(module.forward).parameters else {}
    positions = torch.arange(num_positions, device=loaded.device)[None]
    like = torch.zeros(1, dtype=torch.float32, device=loaded.device)
    tables = module(like, positions, **of_layer)
    if not isinstance(tables, tuple) or len(tables) != 2:
        return None
    cos, sin = (table.float() for table in tables)
    if cos.shape[:2] != (1, num_positions):
        return None
    probe = torch.randn(
        (1, 1, min(PROBED_POSITIONS, num_positions), cos.shape[-1]),
        generator=torch.Generator().manual_seed(0),
    ).to(loaded.device)
    probed = probe.shape[2]
    theirs, _ = apply(probe, probe, cos[:, :probed], sin[:, :probed])
    half = cos.shape[-1] // 2
    for pick, is_neox in product((slice(0, half), slice(0, None, 2)), (True, False)):
        mine = cos[0, :, pick], sin[0, :, pick]
        ours = rotate(probe, mine[0][:probed], mine[1][:probed], is_neox)
        if ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-4):
            return Rotary(torch.cat(mine, dim=-1), is_neox)
    return None
