"""Make a request say given tokens: a logits processor for each of vLLM's model runners.

Log-probabilities that vLLM reports are taken before logits processors by default
(`logprobs_mode` "raw_logprobs"), so they stay the model's own. vLLM's trace replay
(`trace_decode_token_ids`) forces tokens too, but needs Model Runner V2 and ends with the
last forced token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from kvsieve.core.forcing import forced_tokens


def install_forcing(vllm_config: Any) -> None:
    """Add the logits processor of the runner in use to a finished configuration."""
    kind = ForcedTokensV2 if vllm_config.use_v2_model_runner else ForcedTokensV1
    name = f"{kind.__module__}:{kind.__qualname__}"
    model_config = vllm_config.model_config
    given = list(model_config.logits_processors or ())
    if name not in given:
        model_config.logits_processors = [*given, name]


def _force(logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int]) -> None:
    """Leave one token possible in each of the rows of `logits` [num_rows, vocab_size]."""
    logits[rows] = float("-inf")
    logits[rows, tokens] = 0.0


def _force_next(
    tokens: list[int], output_token_ids: list[int], logits: torch.Tensor
) -> torch.Tensor:
    """One request's step of V1: `logits` [vocab_size], in place."""
    step = len(output_token_ids)
    if step < len(tokens):
        _force(logits.unsqueeze(0), [0], [tokens[step]])
    return logits


class ForcedTokensV1(AdapterLogitsProcessor):
    """For Model Runner V1, which hands each request its output so far."""

    def is_argmax_invariant(self) -> bool:
        """Greedy sampling must ask this processor too."""
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        """What forces the tokens of a new request, or None."""
        tokens = forced_tokens(params.extra_args)
        return partial(_force_next, tokens) if tokens else None


class ForcedTokensV2(LogitsProcessor):
    """For Model Runner V2, whose requests live in slots.

    Which token comes next follows from lengths that the host knows, so nothing waits for
    the device.
    """

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        super().__init__(vllm_config, req_states)
        self._prompt_len = req_states.prompt_len
        self._tokens: dict[int, list[int]] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Take over a slot; returns whether its request forces tokens."""
        tokens = forced_tokens(sampling_params.extra_args)
        if tokens:
            self._tokens[req_idx] = tokens
        else:
            self._tokens.pop(req_idx, None)
        return bool(tokens)

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Force the next token of each row whose request has one left, in place.

        Speculative decoding is refused with kvsieve, so a request has one row, and the
        host's length of its sequence is exact.
        """
        rows: list[int] = []
        forced: list[int] = []
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            tokens = self._tokens.get(slot)
            if tokens is None:
                continue
            step = int(ctx.seq_lens_upper_bound_np[row]) - int(self._prompt_len.np[slot])
            if 0 <= step < len(tokens):
                rows.append(row)
                forced.append(tokens[step])
        if rows:
            _force(logits, rows, forced)
        return logits
