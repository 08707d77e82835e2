"""The worker's part of pruning that lasts: parameters by method, and who is pruned in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from kvsieve.core.errors import SieveInvariantError
from kvsieve.core.pruning import Prune
from kvsieve.engine.pruning.prefill_pass import PrefillPass, PromptToPrune
from kvsieve.pruning import LayerChoice, ModelPruning, PruneSettings

if TYPE_CHECKING:
    from kvsieve.engine.sieve import Sieve


class Pruner:
    """Runs the model's forward so that prompts are pruned on the way.

    Args:
        sieve: The worker's sieve.
        layers: The model's decoder layers, all of them sieved.
        pruning: The operator's parameters.
    """

    def __init__(self, sieve: Sieve, layers: list[nn.Module], pruning: ModelPruning) -> None:
        self._sieve = sieve
        self._layers = layers
        self._pruning = pruning

    def settings(self, prune: Prune) -> PruneSettings:
        """The parameters of a method for this model."""
        return self._pruning.settings(prune, len(self._layers))

    def around(self, forward: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
        """The model's forward, in a step of the runner or in a dummy run."""
        prompts = self._prompts()
        if not prompts:
            return forward(**inputs)
        prefill = PrefillPass(self._sieve, self._layers, prompts)
        output = prefill.run(forward, inputs)
        step = self._sieve.step
        assert step is not None
        step.pruned = prefill.results()
        return output

    def _prompts(self) -> list[PromptToPrune]:
        """The prompts that this step reads and that are to be pruned.

        Raises:
            SieveInvariantError: One of them is not read whole: the scheduler has cut it.
        """
        step = self._sieve.step
        if step is None or step.rows is None:
            return []
        rows, prompts = step.rows, []
        for row, request_id in enumerate(rows.request_ids):
            plan = self._sieve.requests[request_id]
            computed, tokens = int(rows.num_computed[row]), int(rows.query_lens[row])
            if plan.treatment.prune is None or computed >= plan.prompt_tokens or not tokens:
                continue
            if computed or tokens != plan.prompt_tokens:
                raise SieveInvariantError(
                    f"request {request_id} is to be pruned and a step reads tokens {computed} to"
                    f" {computed + tokens} of its prompt of {plan.prompt_tokens}"
                )
            start = max(plan.planned)
            choice = LayerChoice(
                self.settings(plan.treatment.prune),
                plan.prompt_tokens,
                plan.prompt_tokens - start,
                plan.treatment.spans,
            )
            prompts.append(PromptToPrune(row, choice, start, plan.prompt_tokens))
        return prompts
