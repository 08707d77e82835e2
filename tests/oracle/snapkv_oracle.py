"""SnapKV as the product defines it, on plain Hugging Face Transformers.

Nothing here imports the product: the formula is written a second time, in the most literal way,
so that a mistake in one of the two shows as a difference. Keys and values are never dropped. They
stay in an ordinary cache at their original positions, and a sieved layer merely masks the
positions that it must not see; this is slower than the product and cannot have its paging bugs.

Hugging Face's modules do everything outside attention (norms, projections, biases, rotary
embedding, MLP, logits). Attention itself is `_attention` below, registered under its own name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from .snapkv_formula import (
    kept_difference,
    select_kept,
    sieve_start,
    snapkv_scores,
    window_attention,
)

__all__ = ["SUPPORTED_MODEL_TYPES", "Oracle", "OracleResult", "kept_difference", "sieve_start"]

# Only what tests/unit/test_oracle.py holds against `generate`: other architectures hand extra
# arguments to attention (soft caps, learned sinks) that `_attention` would silently ignore.
SUPPORTED_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma3_text"})

ATTENTION_NAME = "snapkv_oracle"

# Query rows handled at once in prefill; bounds the score matrix to heads * rows * P values.
PREFILL_ROWS = 256


@dataclass
class OracleResult:
    """What one `Oracle.run` yields. Every tensor is on the CPU."""

    start: int
    """Prompt tokens given up per KV head; kept = P - start. 0: nothing was sieved."""
    kept: dict[int, torch.Tensor]
    """Sieved layer -> LongTensor [num_kv_heads, P - start], ascending prompt positions."""
    scores: dict[int, torch.Tensor]
    """Sieved layer -> [num_kv_heads, P - W] pooled scores (raw for sinks, not raised), fp32."""
    token_ids: list[int]
    """The oracle's greedy choice at each step. With `forced_tokens` these are not what was fed."""
    logprobs: torch.Tensor
    """[max_new_tokens, vocab] fp32 natural log-probabilities of each step."""
    top2_gap: torch.Tensor
    """[max_new_tokens] fp32 difference of the two best logits of each step."""


@dataclass
class _Run:
    """Parameters of a run and what its prefill leaves for its decode steps."""

    prompt_len: int
    start: int
    full_layers: frozenset[int]
    window: int
    pool_size: int
    pooling: str
    num_sink_tokens: int
    forced_kept: dict[int, torch.Tensor] = field(default_factory=dict)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    scores: dict[int, torch.Tensor] = field(default_factory=dict)
    # Layer -> bool [num_kv_heads, P]: prompt positions hidden from queries at or after P.
    dropped: dict[int, torch.Tensor] = field(default_factory=dict)

    def sieve(self, layer: int, q: torch.Tensor, k: torch.Tensor, scaling: float) -> None:
        """Decides what `layer` keeps; q [num_heads, P, head_dim], k [num_kv_heads, P, head_dim]."""
        attention = window_attention(q[:, -self.window :], k, scaling)
        scores = snapkv_scores(attention, k.shape[0], self.pool_size, self.pooling)
        kept = select_kept(
            scores,
            prompt_len=self.prompt_len,
            num_kept=self.prompt_len - self.start,
            num_sink_tokens=self.num_sink_tokens,
        )
        dropped = torch.ones(k.shape[0], self.prompt_len, dtype=torch.bool, device=k.device)
        used = self.forced_kept.get(layer, kept).to(k.device)
        self.dropped[layer] = dropped.scatter(1, used, False)
        self.kept[layer] = kept.cpu()
        self.scores[layer] = scores.float().cpu()


def _masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, hidden: torch.Tensor
) -> torch.Tensor:
    """Attention with an explicit mask, in fp32 at least.

    q [num_heads, n, head_dim]; k, v [num_kv_heads, m, head_dim]; hidden bool [1 or num_kv_heads,
    n, m], True where a query must not see a key. Returns [num_heads, n, head_dim], q's dtype.
    """
    num_heads, rows, head_dim = q.shape
    num_kv_heads = k.shape[0]
    compute = torch.promote_types(q.dtype, torch.float32)
    # [num_kv_heads, group * n, head_dim], scaled here because q is smaller than the logits.
    grouped = (q.to(compute) * scaling).reshape(num_kv_heads, -1, head_dim)
    logits = torch.matmul(grouped, k.to(compute).transpose(1, 2))
    logits = logits.view(num_kv_heads, -1, rows, k.shape[1])
    logits.masked_fill_(hidden[:, None], float("-inf"))
    probs = logits.softmax(dim=-1).view(num_kv_heads, -1, k.shape[1])
    return torch.matmul(probs, v.to(compute)).view(num_heads, rows, head_dim).to(q.dtype)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    oracle_run: _Run,
    sliding_window: int | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for Transformers: query [1, heads, n, d], key and value [1, kv, m, d].

    `oracle_run` has no default, so that any use outside `Oracle.run` fails rather than answers.
    """
    assert attention_mask is None and query.shape[0] == 1
    q, k, v = query[0], key[0], value[0]
    layer: int = module.layer_idx  # type: ignore[assignment]
    rows, length, run = q.shape[1], k.shape[1], oracle_run
    first = length - rows  # position of the first query: the cache holds every key since 0
    key_pos = torch.arange(length, device=k.device)
    is_prefill = first == 0

    outputs = []
    for begin in range(0, rows, PREFILL_ROWS):
        end = min(rows, begin + PREFILL_ROWS)
        query_pos = torch.arange(first + begin, first + end, device=k.device)[:, None]
        seen = first + end  # later keys are in the future of this whole slice
        hidden = (key_pos[:seen] > query_pos)[None]
        if sliding_window is not None:
            hidden = hidden | (key_pos[:seen] <= query_pos - sliding_window)
        if layer in run.dropped:
            head_mask = torch.zeros(k.shape[0], 1, seen, dtype=torch.bool, device=k.device)
            head_mask[:, 0, : run.prompt_len] = run.dropped[layer]
            hidden = hidden | head_mask
        outputs.append(
            _masked_attention(q[:, begin:end], k[:, :seen], v[:, :seen], scaling, hidden)
        )

    # A sliding-window layer is bounded already and left alone. Filling run.dropped only after the
    # prompt's own attention is what makes prefill full attention in every layer.
    if is_prefill and sliding_window is None and layer not in run.full_layers:
        run.sieve(layer, q, k, scaling)
    return torch.cat(outputs, dim=1).transpose(0, 1)[None].contiguous(), None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """No mask: `_attention` builds its own.

    Without an entry of its name Transformers would hand out None as well, but by an accident of
    its lookup; this says so on purpose.
    """


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


class Oracle:
    """Greedy decoding of one sequence at a time with SnapKV-sieved layers.

    Args:
        model_path_or_model: a local checkpoint directory, or a causal LM of one of
            `SUPPORTED_MODEL_TYPES`, which is put in eval mode and converted to `dtype` in place.
        dtype: dtype of weights and activations. Attention and scores use fp32 at least.
    """

    def __init__(
        self,
        model_path_or_model: str | Path | PreTrainedModel,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if isinstance(model_path_or_model, (str, Path)):
            model = AutoModelForCausalLM.from_pretrained(
                model_path_or_model, dtype=dtype, local_files_only=True
            )
        else:
            model = model_path_or_model
            # Not model.to(dtype): that would round the rotary frequencies, a buffer, as well,
            # which from_pretrained leaves in fp32.
            for param in model.parameters():
                param.data = param.data.to(dtype)
        if model.config.model_type not in SUPPORTED_MODEL_TYPES:
            raise ValueError(f"the oracle is not checked for model type {model.config.model_type}")
        self.model = model.eval()

    @torch.no_grad()
    def run(
        self,
        prompt_token_ids: list[int],
        *,
        budget_tokens: int,
        block_size: int,
        full_layers: set[int],
        observation_window: int = 32,
        pool_size: int = 7,
        pooling: str = "max",
        num_sink_tokens: int = 4,
        max_new_tokens: int,
        forced_tokens: list[int] | None = None,
        forced_kept: dict[int, torch.Tensor] | None = None,
    ) -> OracleResult:
        """Prefills the prompt, sieves, and decodes exactly `max_new_tokens` steps.

        End-of-sequence tokens do not stop it (compare with `ignore_eos=True`). Step 0 comes from
        the prompt's own forward pass, which full attention serves; step i > 0 is the query at
        position P + i - 1. All lengths are in tokens.

        Args:
            forced_tokens: exactly `max_new_tokens` tokens, fed in place of the greedy choices, so
                that step i is conditioned on `forced_tokens[:i]`.
            forced_kept: per layer, positions [num_kv_heads, P - start] that decoding sees in
                place of the oracle's own choice. The choice itself is reported as ever.

        Raises:
            ValueError: for an unknown layer, a length that does not fit, or a budget that cannot
                hold window and sinks.
        """
        prompt_len = len(prompt_token_ids)
        if prompt_len < 1 or max_new_tokens < 1:
            raise ValueError("need at least one prompt token and one new token")
        if forced_tokens is not None and len(forced_tokens) != max_new_tokens:
            raise ValueError(f"{len(forced_tokens)} forced tokens for {max_new_tokens} steps")
        if not full_layers <= set(range(self.model.config.num_hidden_layers)):
            raise ValueError(f"no such layers: {sorted(full_layers)}")
        run = _Run(
            prompt_len=prompt_len,
            start=sieve_start(prompt_len, budget_tokens, block_size),
            full_layers=frozenset(full_layers),
            window=min(observation_window, prompt_len),
            pool_size=pool_size,
            pooling=pooling,
            num_sink_tokens=num_sink_tokens,
            forced_kept=forced_kept or {},
        )

        # Made without a config: with one, sliding-window layers would get a truncating cache.
        cache = DynamicCache()
        token_ids: list[int] = []
        logprobs, gaps = [], []
        feed, position = list(prompt_token_ids), 0
        with self._own_attention():
            for step in range(max_new_tokens):
                logits = self._forward(feed, position, cache, run)
                best = logits.topk(2)
                token_ids.append(int(best.indices[0]))
                logprobs.append(logits.log_softmax(dim=-1).float().cpu())
                gaps.append(float(best.values[0] - best.values[1]))
                position += len(feed)
                feed = [token_ids[-1] if forced_tokens is None else forced_tokens[step]]
        return OracleResult(
            start=run.start,
            kept=run.kept,
            scores=run.scores,
            token_ids=token_ids,
            logprobs=torch.stack(logprobs),
            top2_gap=torch.tensor(gaps, dtype=torch.float32),
        )

    def _forward(
        self, tokens: list[int], position: int, cache: DynamicCache, run: _Run
    ) -> torch.Tensor:
        """Logits [vocab] (fp32 at least) after `tokens`, the first of which is at `position`."""
        device = self.model.device
        positions = torch.arange(position, position + len(tokens), device=device)
        output = self.model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            oracle_run=run,
        )
        logits: torch.Tensor = output.logits[0, -1]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @contextlib.contextmanager
    def _own_attention(self) -> Iterator[None]:
        """Switches the model to `_attention`, and back, so that the caller can still use it."""
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(ATTENTION_NAME)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)
