"""The worker's part of pruning that lasts: parameters by method, and who is pruned in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from kvsieve.core.errors import SieveInvariantError
from kvsieve.core.pruning import Prune
from kvsieve.engine.pruning.carried import NUM_CARRIED, CarriedPrompts
from kvsieve.engine.pruning.host import PruningHost
from kvsieve.engine.pruning.prefill_pass import PrefillPass
from kvsieve.engine.pruning.prompt import PromptToPrune
from kvsieve.pruning import LayerChoice, ModelPruning, PruneSettings


class Pruner:
    """Runs the model's forward so that prompts are pruned on the way.

    Args:
        sieve: The worker's sieve.
        layers: The model's decoder layers, all of them sieved.
        pruning: The operator's parameters.
    """

    def __init__(self, sieve: PruningHost, layers: list[nn.Module], pruning: ModelPruning) -> None:
        self._sieve = sieve
        self._layers = layers
        self._pruning = pruning
        self._carried = CarriedPrompts()

    def settings(self, prune: Prune) -> PruneSettings:
        """The parameters of a method for this model."""
        return self._pruning.settings(prune, len(self._layers))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what is kept of prompts that were read, ended or were preempted."""
        self._carried.close(request_ids)

    @property
    def num_carried(self) -> int:
        """Prompts of which chunks are kept."""
        return len(self._carried)

    def scratch_bytes(self, vllm_config: Any) -> int:
        """Bytes that pruning needs beyond what scoring one layer takes (`Sieve.scratch_bytes`)."""
        model = vllm_config.model_config
        state = model.get_hidden_size() * torch.finfo(model.dtype).bits // 8
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        # Hidden states and residual, picked and spread out; ranks as float32 and float64.
        needed = 4 * tokens * state + 12 * tokens * len(self._layers)
        if self._pruning.prune.is_chunked:
            # Hidden states and residual of each prompt, in chunks and put together.
            needed += NUM_CARRIED * 2 * 2 * model.max_model_len * state
        return needed

    def around(self, forward: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
        """The model's forward, in a step of the runner or in a dummy run."""
        prompts = self._prompts()
        if not prompts:
            return forward(**inputs)
        prefill = PrefillPass(self._sieve, self._layers, prompts, inputs)
        output = prefill.run(forward)
        step = self._sieve.step
        assert step is not None
        step.pruned = prefill.results()
        return output

    def _prompts(self) -> list[PromptToPrune]:
        """The prompts that this step reads and that are to be pruned.

        Raises:
            SieveInvariantError: The scheduler has cut one that it must not cut.
        """
        step = self._sieve.step
        if step is None or step.rows is None:
            return []
        rows, prompts = step.rows, []
        # Most rows of most steps decode, and need not be looked at one by one.
        reads = (rows.num_computed < rows.prompt_lens) & (rows.query_lens > 0)
        for row in np.nonzero(reads)[0].tolist():
            request_id = rows.request_ids[row]
            plan = self._sieve.requests[request_id]
            if plan.treatment.prune is None:
                continue
            computed, tokens = int(rows.num_computed[row]), int(rows.query_lens[row])
            is_whole = computed == 0 and tokens == plan.prompt_tokens
            num_keep = plan.prompt_tokens - max(plan.planned)
            is_last = computed + tokens == plan.prompt_tokens
            can_be_cut = plan.treatment.prune.is_chunked and (not is_last or tokens >= num_keep)
            if not (is_whole or can_be_cut):
                raise SieveInvariantError(
                    f"request {request_id} is pruned by {plan.treatment.prune} and a step reads"
                    f" tokens {computed} to {computed + tokens} of its prompt of"
                    f" {plan.prompt_tokens}, of which {num_keep} are kept; this is a bug in"
                    " kvsieve, please report it with the server's flags"
                )
            choice = LayerChoice(
                self.settings(plan.treatment.prune),
                plan.prompt_tokens,
                num_keep,
                plan.treatment.spans,
            )
            carried = None if is_whole else self._carried.at(request_id, computed)
            prompts.append(PromptToPrune(row, choice, plan.prompt_tokens, tokens, is_last, carried))
        return prompts
