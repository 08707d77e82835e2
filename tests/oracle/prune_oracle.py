"""Pruning a prompt while it is read, as published, on plain Hugging Face Transformers.

ASL (arXiv 2601.07667), its two-pass form, FastKV (2502.01068) and GemFilter (2409.17422), written
from their definitions. Nothing here imports the product. One request, float32, dense attention:
a loop over the model's layers, in which queries, keys and hidden states are at hand. The modules
of the model do norms, projections, biases and the MLP; rotation and attention are below. A layer's
cache is two tensors that hold exactly the rows it may see, already rotated, so that a decoded token
sees all of them and no mask can hide a mistake.

Deviations from the authors, all on purpose: ranks break ties by the higher position (theirs by an
unstable sort), `sinks` and `max_layer` can be asked for, and every layer that saw the whole prompt
keeps `kept` tokens too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import PreTrainedModel

from .prune_formula import Pool, gemfilter_score, policy_score, rank_variance, ranks, window_score
from .snapkv_formula import select_kept

__all__ = ["SUPPORTED_MODEL_TYPES", "PruneParams", "PruneResult", "run"]

SUPPORTED_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})

Method = Literal["asl", "fastkv", "gemfilter", "asl-two-pass"]
Reason = Literal["fixed", "threshold", "deepest", "never"]

FIXED = ("fastkv", "gemfilter")
TWO_PASS = ("gemfilter", "asl-two-pass")


@dataclass(frozen=True)
class PruneParams:
    """What to prune and how. Layers count from 0, lengths are in tokens."""

    method: Method
    kept: int
    """k, prompt tokens that go on after the selection, the window included. A prompt of at most
    this many tokens is not pruned."""
    window: int
    """W, last queries that score, and last tokens that are forced. GemFilter ignores it."""
    pool: Pool
    """Pooling of the scores, per query head (GemFilter: of the sum), and its odd width."""
    layer: int | None = None
    """The selection layer of FastKV and GemFilter."""
    min_layer: int = 10
    """ASL: the layer whose variance is 1, relatively. The next can be selected."""
    observed_layers: int = 8
    """ASL: layers over which ranks vary, the current one included."""
    threshold: float = 0.3
    """ASL: the first relative variance strictly below it selects."""
    max_layer: int | None = None
    """ASL: prune here if no layer was selected before. None: then do not prune."""
    sinks: int = 0
    """First tokens that are forced, within `kept`. 0 is what all authors do. Ranks, and so the
    variance, do not know of it."""
    contiguous_from: int = 0
    """Two passes: position of the first kept token in the second pass."""
    policy_window: int = 32
    """Last queries that score what a layer keeps which saw the whole prompt (SnapKV)."""
    policy_pool: Pool = ("max", 7)
    policy_sinks: int = 4
    policy_recent: int = 32

    def __post_init__(self) -> None:
        if self.method not in ("asl", "fastkv", "gemfilter", "asl-two-pass"):
            raise ValueError(f"no such method: {self.method!r}")
        for kind, size in (self.pool, self.policy_pool):
            if kind not in ("avg", "max") or size < 1 or size % 2 == 0:
                raise ValueError(f"a pool is avg or max and odd, got {kind!r} of {size}")
        if min(self.window, self.policy_window, self.observed_layers) < 1:
            raise ValueError("a window and the observed layers are at least 1")
        if min(self.sinks, self.policy_sinks, self.policy_recent, self.contiguous_from) < 0:
            raise ValueError("sinks, recent tokens and positions are not negative")
        if self.free < max(1, self.sinks):
            raise ValueError(
                f"{self.kept} kept tokens cannot hold a window of {self.forced_end}, "
                f"{self.sinks} sinks and one token that is chosen"
            )
        if self.method not in TWO_PASS and self.kept < self.policy_recent + self.policy_sinks:
            raise ValueError(
                f"{self.kept} kept tokens cannot hold {self.policy_recent} recent ones "
                f"and {self.policy_sinks} sinks of the policy"
            )
        if (self.layer is None) == (self.method in FIXED):
            raise ValueError(f"{self.method} with layer={self.layer}: only {FIXED} have one")
        if self.method not in FIXED and self.min_layer < self.observed_layers - 1:
            raise ValueError(
                f"min_layer {self.min_layer} leaves fewer than {self.observed_layers} to observe"
            )
        if self.max_layer is not None and (self.method in FIXED or self.max_layer < self.min_layer):
            raise ValueError(
                f"{self.method} with max_layer={self.max_layer}: ASL's, from min_layer"
            )

    @property
    def forced_end(self) -> int:
        """Last tokens that are kept whatever their score, and have none."""
        return 0 if self.method == "gemfilter" else self.window

    @property
    def free(self) -> int:
        """Tokens that the selection chooses: k - W, for GemFilter k."""
        return self.kept - self.forced_end

    def policy_kept(self, q: torch.Tensor, k: torch.Tensor, scaling: float) -> torch.Tensor:
        """Positions [num_kv_heads, kept] that a layer keeps which saw the whole prompt."""
        return select_kept(
            policy_score(q, k, scaling, self.policy_window, self.policy_pool, self.policy_recent),
            prompt_len=k.shape[1],
            num_kept=self.kept,
            num_sink_tokens=self.policy_sinks,
        )


@dataclass(frozen=True, eq=False)
class PruneResult:
    """What one `run` yields."""

    selected_layer: int | None
    """The layer whose scores chose `positions`. None: nothing was pruned."""
    reason: Reason
    """A prompt of at most k tokens is "never" too, and so are two passes whose first reached the
    last layer, which then chose."""
    positions: torch.Tensor | None
    """[k] prompt positions that go on, ascending. None: nothing was pruned."""
    variances: dict[int, float]
    """ASL: layer -> rank variance, for every layer from min_layer that was reached unpruned."""
    relative: dict[int, float]
    """The same divided by the variance at min_layer; NaN where that is 0."""
    scores: torch.Tensor | None
    """[P - W], for GemFilter [P]: the shared scores that chose `positions`; they tell near ties."""
    deep_inputs: torch.Tensor | None
    """[k, hidden] hidden states that enter the layer after the selection, or in two passes the
    embeddings that enter the second. None: nothing was pruned."""
    kept_per_layer: list[torch.Tensor]
    """[num_kv_heads, n] prompt positions, ascending, that decoding sees in layer 0, 1, ... up to
    the selection; of all layers if nothing was pruned. Empty after two passes."""
    tokens: list[int]
    """Greedy choices."""
    logprobs: torch.Tensor
    """[num_tokens, vocab] natural log-probabilities of each step."""


# --- the choice of layer and tokens --------------------------------------------------------------


@dataclass
class _Choice:
    """Looks at one layer after the other until `positions` are chosen."""

    params: PruneParams
    num_layers: int
    layer: int | None = None
    reason: Reason = "never"
    positions: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    ranks: list[torch.Tensor] = field(default_factory=list)
    variances: dict[int, float] = field(default_factory=dict)
    relative: dict[int, float] = field(default_factory=dict)

    def look(self, layer: int, q: torch.Tensor, k: torch.Tensor, scaling: float) -> None:
        """Scores the prompt in `layer`, and selects if it is the one."""
        params = self.params
        if params.method in FIXED and layer != params.layer:
            return
        if params.method == "gemfilter":
            scores = gemfilter_score(q, k, params.pool)
        else:
            scores = window_score(q, k, scaling, params.window, params.pool)
        reason: Reason = "fixed" if params.method in FIXED else self._asl(layer, scores)
        is_last = layer == self.num_layers - 1
        if reason != "never" or (is_last and params.method in TWO_PASS):
            self.layer, self.reason, self.scores = layer, reason, scores
            self.positions = select_kept(
                scores[None],
                prompt_len=k.shape[1],
                num_kept=params.kept,
                num_sink_tokens=params.sinks,
            )[0]

    def _asl(self, layer: int, scores: torch.Tensor) -> Reason:
        """Whether ASL selects `layer`, and why."""
        params = self.params
        self.ranks.append(ranks(scores))
        if layer < params.min_layer:
            return "never"
        self.variances[layer] = rank_variance(self.ranks[-params.observed_layers :], params.free)
        first = self.variances[params.min_layer]
        self.relative[layer] = self.variances[layer] / first if first > 0 else math.nan
        # After the last layer nothing is left to save.
        if layer == self.num_layers - 1:
            return "never"
        # NaN is not below anything: without variance at min_layer there is nothing to fall.
        if layer > params.min_layer and self.relative[layer] < params.threshold:
            return "threshold"
        return "deepest" if layer == params.max_layer else "never"


# --- the model -----------------------------------------------------------------------------------

Rows = tuple[torch.Tensor, torch.Tensor]
"""Keys, rotated, and values: [num_kv_heads, n, head_dim] each."""


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates [1, heads, n, head_dim]: coordinate i turns with coordinate i + head_dim / 2."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def _layer(
    model: PreTrainedModel,
    index: int,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    past: Rows | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Rows]:
    """One decoder layer over n new rows, which see all rows of `past` and their predecessors.

    Returns:
        hidden states [n, hidden], queries [num_heads, n, head_dim], and `past` with the new rows.
    """
    layer = model.model.layers[index]
    attn, n = layer.self_attn, len(hidden)
    x = layer.input_layernorm(hidden[None])
    q, k, v = (
        project(x).view(1, n, -1, attn.head_dim)
        for project in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    if hasattr(attn, "q_norm"):
        q, k = attn.q_norm(q), attn.k_norm(k)
    cos, sin = (table[:, None] for table in model.model.rotary_emb(x, positions[None]))
    q, k = _rotated(q.transpose(1, 2), cos, sin), _rotated(k.transpose(1, 2), cos, sin)
    v = v.transpose(1, 2)
    if past is not None:
        k, v = torch.cat([past[0][None], k], dim=2), torch.cat([past[1][None], v], dim=2)

    group = q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(group, dim=1).transpose(2, 3) * attn.scaling
    length = k.shape[2]
    future = torch.ones(n, length, dtype=torch.bool, device=x.device).triu(length - n + 1)
    weights = logits.masked_fill(future, -math.inf).softmax(dim=-1)
    mixed = weights @ v.repeat_interleave(group, dim=1)
    hidden = hidden + attn.o_proj(mixed.transpose(1, 2).reshape(1, n, -1))[0]
    hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden[None]))[0]
    return hidden, q[0], (k[0], v[0])


def _gathered(rows: Rows, kept: torch.Tensor) -> Rows:
    """The rows at kept [num_kv_heads, n] of each head."""
    heads = torch.arange(len(kept), device=kept.device)[:, None]
    return rows[0][heads, kept], rows[1][heads, kept]


@dataclass
class _Prefill:
    """What reading the prompt leaves: caches by layer, and the last row's hidden state."""

    hidden: torch.Tensor
    positions: torch.Tensor
    cache: list[Rows] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    deep_inputs: torch.Tensor | None = None

    def whole(self, model: PreTrainedModel) -> None:
        """All layers on all rows; nothing is sieved."""
        for index in range(len(model.model.layers)):
            self.hidden, _, rows = _layer(model, index, self.hidden, self.positions)
            self.cache.append(rows)

    def pruned(self, model: PreTrainedModel, choice: _Choice) -> None:
        """Layers up to the selection on all rows, each sieved by the policy; the others on k."""
        for index, layer in enumerate(model.model.layers):
            self.hidden, q, rows = _layer(model, index, self.hidden, self.positions)
            if choice.positions is not None:
                self.cache.append(rows)
                continue
            scaling = layer.self_attn.scaling
            self.kept.append(choice.params.policy_kept(q, rows[0], scaling))
            self.cache.append(_gathered(rows, self.kept[-1]))
            choice.look(index, q, rows[0], scaling)
            if choice.positions is not None:
                self.positions = choice.positions
                self.hidden = self.deep_inputs = self.hidden[choice.positions]


def _first_pass(model: PreTrainedModel, hidden: torch.Tensor, choice: _Choice) -> torch.Tensor:
    """Runs layers until the choice is made, keeps nothing of them, and returns the positions."""
    positions = torch.arange(len(hidden), device=hidden.device)
    for index, layer in enumerate(model.model.layers):
        hidden, q, rows = _layer(model, index, hidden, positions)
        choice.look(index, q, rows[0], layer.self_attn.scaling)
        if choice.positions is not None:
            return choice.positions
    raise AssertionError("the last layer always chooses")


def _check(model: PreTrainedModel, params: PruneParams) -> None:
    config = model.config
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(f"the oracle is not checked for model type {config.model_type}")
    if getattr(config, "sliding_window", None) is not None:
        raise ValueError(
            f"the oracle knows no sliding window, the model has {config.sliding_window}"
        )
    if model.dtype != torch.float32:
        raise ValueError(f"the oracle computes in float32, the model is {model.dtype}")
    # FastKV in the last layer would save nothing; GemFilter's second pass still would.
    layers = len(model.model.layers) - (params.method == "fastkv")
    asked = params.layer if params.method in FIXED else params.min_layer
    if asked is None or not 0 <= asked < layers:
        raise ValueError(
            f"{params.method} cannot select at layer {asked} of {config.num_hidden_layers}"
        )


@torch.no_grad()
def run(
    model: PreTrainedModel, prompt_ids: Sequence[int], params: PruneParams, num_tokens: int
) -> PruneResult:
    """Reads the prompt, prunes it, and decodes exactly `num_tokens` tokens greedily.

    The first token comes from the prompt's own pass, from the last row that was kept. The token at
    step t is fed at position P + t; after two passes at `contiguous_from` + k + t. It sees what
    each layer kept and every token decoded before it.

    Raises:
        ValueError: for a model that this file does not cover, a layer that it does not have, and a
            prompt or number of tokens below 1.
    """
    _check(model, params)
    prompt_len = len(prompt_ids)
    if prompt_len < 1 or num_tokens < 1:
        raise ValueError("need at least one prompt token and one new token")
    embed = model.model.embed_tokens
    ids = torch.tensor(list(prompt_ids), device=model.device)
    everything = torch.arange(prompt_len, device=model.device)
    choice = _Choice(params, len(model.model.layers))
    state = _Prefill(embed(ids), everything)
    position = prompt_len
    if prompt_len <= params.kept:
        state.whole(model)
        state.kept = [everything.repeat(len(keys), 1) for keys, _ in state.cache]
    elif params.method in TWO_PASS:
        inputs = embed(ids[_first_pass(model, state.hidden, choice)])
        position = params.contiguous_from + params.kept
        slots = torch.arange(params.contiguous_from, position, device=model.device)
        state = _Prefill(inputs, slots, deep_inputs=inputs)
        state.whole(model)
    else:
        state.pruned(model, choice)

    tokens: list[int] = []
    logprobs = []
    hidden = state.hidden[-1:]
    while True:
        logits = model.lm_head(model.model.norm(hidden[None]))[0, 0]
        logprobs.append(logits.log_softmax(dim=-1))
        tokens.append(int(logits.argmax()))
        if len(tokens) == num_tokens:
            break
        hidden = embed(ids.new_tensor(tokens[-1:]))
        here = ids.new_tensor([position])
        for index, past in enumerate(state.cache):
            hidden, _, state.cache[index] = _layer(model, index, hidden, here, past)
        position += 1
    return PruneResult(
        selected_layer=choice.layer,
        reason=choice.reason,
        positions=choice.positions,
        variances=choice.variances,
        relative=choice.relative,
        scores=choice.scores,
        deep_inputs=state.deep_inputs,
        kept_per_layer=state.kept,
        tokens=tokens,
        logprobs=torch.stack(logprobs),
    )
