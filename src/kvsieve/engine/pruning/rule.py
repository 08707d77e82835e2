"""Which prompts are pruned: a rule of the request and the settings, never of who else is there."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request

from kvsieve.core.protection import count_protected
from kvsieve.core.pruning import parse_prune
from kvsieve.engine.requests import PlannedRequest
from kvsieve.engine.settings import model_pruning, sieve_config
from kvsieve.engine.windows import largest_whole_prompt


class PruningRule:
    """The rule of one engine.

    Args:
        vllm_config: vLLM's configuration, with our settings.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._pruning = model_pruning(vllm_config)
        self._num_layers = vllm_config.model_config.get_total_num_hidden_layers()
        self._largest_whole = largest_whole_prompt(vllm_config.scheduler_config)
        prune = parse_prune(sieve_config(vllm_config).prune)
        # Memory to read prompts in chunks is set aside for the operator's method alone.
        self._reads_chunks = prune is not None and prune.is_chunked

    @property
    def is_on(self) -> bool:
        """Whether any prompt may be pruned."""
        return self._pruning is not None

    def __str__(self) -> str:
        chunked = "; fastkv reads longer ones in chunks" if self._reads_chunks else ""
        return (
            f"prompts of up to {self._largest_whole} tokens are pruned, which a step can be sure to"
            f" read at once{chunked}. Raise max_num_batched_tokens, or lower max_num_seqs, for more"
        )

    def reads_chunks(self, plan: PlannedRequest) -> bool:
        """Whether a prompt that is pruned may be read in chunks."""
        prune = plan.treatment.prune
        return prune is not None and prune.is_chunked and self._reads_chunks

    def objection(self, request: Request, plan: PlannedRequest) -> str | None:
        """Why a prompt that is to be pruned cannot be; None if it can."""
        if not plan.is_sieved:
            return "the prompt fits its budget"
        prune, params = plan.treatment.prune, request.sampling_params
        assert prune is not None
        assert self._pruning is not None
        settings = self._pruning.settings(prune, self._num_layers)
        kept = plan.prompt_tokens - max(plan.starts)
        protected = count_protected(
            plan.prompt_tokens,
            plan.treatment.spans,
            settings.num_sink_tokens,
            settings.num_recent,
        )
        # In chunks, as many tokens must be read at once as go on from the last one.
        at_once = kept if self.reads_chunks(plan) else plan.prompt_tokens
        if protected >= kept:
            return (
                f"{protected} tokens are protected or belong to the method's window, and of the"
                f" {kept} that go on one at least must be chosen"
            )
        if at_once > self._largest_whole:
            return (
                f"{at_once} tokens must be read at once, and {self._largest_whole} are the most"
                " that a step can be sure to read: max_num_batched_tokens (or"
                " max_num_scheduled_tokens) less max_num_seqs, or long_prefill_token_threshold"
            )
        if params is not None and params.prompt_logprobs is not None:
            return "prompt_logprobs need every token in every layer"
        return None
