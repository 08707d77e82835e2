"""The worker's sieve: observe in forward, then score and compact after the model call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvsieve.engine.backends import adapter_for
from kvsieve.engine.block_copies import MAX_COPY_BYTES, BlockCopier
from kvsieve.engine.observer import Observer
from kvsieve.engine.requests import PlannedRequests
from kvsieve.engine.rows import RowReader
from kvsieve.engine.spec import SievedAttentionSpec
from kvsieve.engine.step import Step
from kvsieve.engine.step_message import StepMessage, read_message
from kvsieve.engine.worker_report import SievedRow
from kvsieve.policies import Policy


@dataclass(frozen=True)
class SievedLayer:
    """One sieved layer of the model.

    Attributes:
        name: vLLM's name of its `Attention` module.
        number: Its number in the model.
        module: That module.
        spec: Its cache spec.
    """

    name: str
    number: int
    module: Any
    spec: SievedAttentionSpec


class Sieve:
    """State of the sieve in one worker.

    Args:
        layers: The sieved layers, in model order.
        policy: How tokens are ranked and chosen.
        observer: Rings for the layers' window queries.
        rows: Reader for the worker's model runner.
        copier: Copies blocks of the worker's cache.
    """

    def __init__(
        self,
        layers: list[SievedLayer],
        policy: Policy,
        observer: Observer,
        rows: RowReader,
        copier: BlockCopier,
    ) -> None:
        self.layers = layers
        self.policy = policy
        self.observer = observer
        self.requests = PlannedRequests(layer.spec for layer in layers)
        self.step: Step | None = None
        self._rows = rows
        self._copier = copier
        self._spec_of = {layer.name: layer.spec for layer in layers}
        self._group_of: dict[str, str] = {}
        self._message = StepMessage()
        self._finished: dict[str, SievedRow] = {}
        self.on_select: Callable[[str, str, torch.Tensor], None] | None = None
        """Called with request id, layer name and kept positions; for inspection and tests."""

    def join_group(self, layer_names: list[str]) -> SievedAttentionSpec:
        """Note that these layers share a block table, named after the first of them.

        Returns:
            Their spec.
        """
        self._group_of.update(dict.fromkeys(layer_names, layer_names[0]))
        return self._spec_of[layer_names[0]]

    def begin_step(self, scheduler_output: Any) -> None:
        """Forget requests that ended or were preempted, learn of new ones, open a step."""
        self.observer.close(scheduler_output.finished_req_ids)
        self.observer.close(scheduler_output.preempted_req_ids or ())
        # An id may end and come again in one step: forget first.
        self.requests.forget(scheduler_output.finished_req_ids)
        self._message = read_message(scheduler_output)
        for request_id, (prompt_tokens, treatment) in self._message.new_requests.items():
            self.requests.add(request_id, prompt_tokens, treatment)
        self.step = Step(self.requests)

    def enter_group(
        self, first_layer: str, common: CommonAttentionMetadata, block_size: int
    ) -> None:
        """Note a group's block table while its metadata is built.

        The first group of a step also reads the rows and plans the observation.
        """
        step = self.step
        assert step is not None
        if step.rows is None:
            step.rows = self._rows.read(common)
            step.observe(self.observer)
        step.block_tables[first_layer] = (common.block_table_tensor, block_size)

    def observe(self, layer_name: str, query: torch.Tensor) -> None:
        """Copy a layer's window queries, if the step has any. Called in `forward`."""
        if self.step is not None and self.step.observation is not None:
            self.observer.record(layer_name, query, self.step.observation)

    def end_step(self) -> None:
        """Score and compact every prompt that ended in the step.

        It runs after the model call and outside any graph. That equals doing it in each
        layer's forward, since a layer's cache is read by that layer alone.
        """
        step, self.step = self.step, None
        if step is None or step.rows is None:
            return
        # The prompts' own tails, before anything is moved over them.
        self._copier.copy(self._message.tail_copies)
        finishing = {row for view in step.views.values() for row in view.finishing.tolist()}
        for row in sorted(finishing):
            request_id = step.rows.request_ids[row]
            self._finished[request_id] = self._sieve_row(step, row)
            self.observer.close([request_id])

    def _sieve_row(self, step: Step, row: int) -> SievedRow:
        """Score one prompt in every layer, and move its rows unless it is only watched."""
        begin = time.perf_counter()
        assert step.rows is not None
        request_id = step.rows.request_ids[row]
        prompt_tokens = int(step.rows.prompt_lens[row])
        mode = self.requests[request_id].treatment.mode
        stored = 0
        numbers: list[int] = []
        mass_lost: list[torch.Tensor] = []
        for layer in self.layers:
            start = int(step.view(layer.spec).planned[row])
            if not start:
                continue
            block_table, block_size = step.block_tables[self._group_of[layer.name]]
            selection = adapter_for(layer.module.backend.name).sieve(
                layer.module.kv_cache,
                block_table[row, : -(-prompt_tokens // block_size)],
                self.observer.queries(layer.name, request_id),
                layer.module.impl.scale,
                self.policy,
                prompt_tokens,
                start,
                move=mode == "sieve",
            )
            if self.on_select is not None:
                self.on_select(request_id, layer.name, selection.positions)
            stored = selection.positions.shape[1] + self.policy.observation_window
            numbers.append(layer.number)
            mass_lost.append(selection.mass_lost)
        return SievedRow(
            mode=mode,
            prompt_tokens=prompt_tokens,
            stored_tokens=stored,
            layers=tuple(numbers),
            # One transfer from the device for all layers.
            mass_lost=tuple(torch.stack(mass_lost).tolist()),
            seconds=time.perf_counter() - begin,
        )

    def scratch_bytes(self, vllm_config: Any) -> int:
        """Bytes that scoring, compacting and copying hold at once, beyond cache and rings."""
        longest = vllm_config.model_config.max_model_len
        return max(
            MAX_COPY_BYTES,
            *(
                adapter_for(layer.module.backend.name).scratch_bytes(
                    layer.module, self.policy, longest
                )
                for layer in self.layers
            ),
        )

    def take_finished(self) -> dict[str, SievedRow]:
        """Counts of the prompts sieved since the last call, by request id."""
        finished, self._finished = self._finished, {}
        return finished
