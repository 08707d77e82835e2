"""vLLM's workers with a sieve. vLLM loads one of these by `worker_cls`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from kvsieve.engine.install import install_sieve
from kvsieve.engine.sieve import Sieve
from kvsieve.engine.worker_report import attach_rows

# A mixin's methods call those of the class beside it, which only the checker must know.
if TYPE_CHECKING:
    from typing import Any as _Base
else:
    _Base = object


class SieveWorkerMixin(_Base):
    """Installs the sieve after the model is loaded and runs it after each model call."""

    sieve: Sieve

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then turn its layers into full and sieved ones."""
        super().load_model(*args, **kwargs)
        self.sieve = install_sieve(self.model_runner, self.vllm_config, self.use_v2_model_runner)

    def determine_available_memory(self) -> int:
        """What vLLM measures for the cache, less what the sieve will need beside it.

        The rings are there already and were measured. A size that the user gave is kept:
        then vLLM measures nothing either.
        """
        available: int = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes is not None:
            return available
        return available - self.sieve.scratch_bytes(self.vllm_config)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the model on a step, then sieve the prompts that it finished."""
        self.sieve.begin_step(scheduler_output)
        output = super().execute_model(scheduler_output)
        self.sieve.end_step()
        return self._with_rows(output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and send the step's counts with the result."""
        return self._with_rows(super().sample_tokens(grammar_output))

    def _with_rows(self, output: Any) -> Any:
        if not isinstance(output, ModelRunnerOutput | AsyncModelRunnerOutput):
            return output
        rows = self.sieve.take_finished()
        return attach_rows(output, rows) if rows else output


class SieveCPUWorker(SieveWorkerMixin, CPUWorker):
    """The CPU worker with a sieve."""
