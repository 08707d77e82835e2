"""The worker's sieve: observe in forward, then score and compact after the model call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvsieve.engine.backends import adapter_for
from kvsieve.engine.observer import Observer
from kvsieve.engine.rows import RowReader
from kvsieve.engine.spec import SievedAttentionSpec
from kvsieve.engine.step import Step
from kvsieve.engine.worker_report import SievedRow
from kvsieve.policies import Policy


@dataclass(frozen=True)
class SievedLayer:
    """One sieved layer of the model.

    Attributes:
        name: vLLM's name of its `Attention` module.
        module: That module.
        spec: Its cache spec.
    """

    name: str
    module: Any
    spec: SievedAttentionSpec


class Sieve:
    """State of the sieve in one worker.

    Args:
        layers: The sieved layers, in model order.
        policy: How tokens are ranked and chosen.
        observer: Rings for the layers' window queries.
        rows: Reader for the worker's model runner.
    """

    def __init__(
        self, layers: list[SievedLayer], policy: Policy, observer: Observer, rows: RowReader
    ) -> None:
        self.layers = layers
        self.policy = policy
        self.observer = observer
        self.step: Step | None = None
        self._rows = rows
        self._spec_of = {layer.name: layer.spec for layer in layers}
        self._specs = tuple(dict.fromkeys(self._spec_of.values()))
        self._group_of: dict[str, str] = {}
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
        """Forget requests that ended or were preempted, and open a step."""
        self.observer.close(scheduler_output.finished_req_ids)
        self.observer.close(scheduler_output.preempted_req_ids or ())
        self.step = Step()

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
            step.observe(self.observer, self._specs)
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
        finishing = {row for view in step.views.values() for row in view.finishing.tolist()}
        for row in sorted(finishing):
            begin = time.perf_counter()
            request_id = step.rows.request_ids[row]
            stored, num_layers = self._sieve_row(step, row)
            self.observer.close([request_id])
            self._finished[request_id] = SievedRow(
                prompt_tokens=int(step.rows.prompt_lens[row]),
                stored_tokens=stored,
                num_layers=num_layers,
                seconds=time.perf_counter() - begin,
            )

    def _sieve_row(self, step: Step, row: int) -> tuple[int, int]:
        """Sieve one prompt in every layer; returns the stored tokens and the layers done."""
        assert step.rows is not None
        request_id = step.rows.request_ids[row]
        prompt_tokens = int(step.rows.prompt_lens[row])
        stored = num_layers = 0
        for layer in self.layers:
            start = int(step.view(layer.spec).prompt_starts[row])
            if not start:
                continue
            block_table, block_size = step.block_tables[self._group_of[layer.name]]
            blocks = block_table[row, : -(-prompt_tokens // block_size)]
            positions = adapter_for(layer.module.backend.name).sieve(
                layer.module.kv_cache,
                blocks,
                self.observer.queries(layer.name, request_id),
                layer.module.impl.scale,
                self.policy,
                prompt_tokens,
                start,
            )
            if self.on_select is not None:
                self.on_select(request_id, layer.name, positions)
            stored = positions.shape[1] + self.policy.observation_window
            num_layers += 1
        return stored, num_layers

    def take_finished(self) -> dict[str, SievedRow]:
        """Counts of the prompts sieved since the last call, by request id."""
        finished, self._finished = self._finished, {}
        return finished
