"""The worker's sieve: observe in forward, then score and compact after the model call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from kvsieve.core.errors import SieveInvariantError
from kvsieve.engine.accumulation import Accumulation
from kvsieve.engine.backends import CachedPrompt, adapter_for
from kvsieve.engine.block_copies import MAX_COPY_BYTES, BlockCopier
from kvsieve.engine.layers import SievedLayer
from kvsieve.engine.observer import Observer
from kvsieve.engine.pruning.host import QueryWatcher
from kvsieve.engine.pruning.layout import Layout
from kvsieve.engine.pruning.pruner import Pruner
from kvsieve.engine.requests import PlannedRequests
from kvsieve.engine.rows import RowReader
from kvsieve.engine.spec import SievedAttentionSpec
from kvsieve.engine.step import GroupStep, Step
from kvsieve.engine.step_message import StepMessage, read_message
from kvsieve.engine.worker_report import SievedRow
from kvsieve.policies import Chunk, Evidence, Policy, attention_mass_lost


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
        self._layer_of = {layer.name: layer for layer in layers}
        self._gathers = Accumulation(policy.accumulator) if policy.accumulator else None
        self._layer_by_number = {layer.number: layer for layer in layers}
        self._group_of: dict[str, str] = {}
        self._layers_of_group: dict[str, list[str]] = {}
        self.pruner: Pruner | None = None
        self.prefill: QueryWatcher | None = None
        """The pass that prunes prompts, while it runs."""
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
        self._layers_of_group[layer_names[0]] = layer_names
        return self._layer_of[layer_names[0]].spec

    def begin_step(self, scheduler_output: Any) -> None:
        """Forget requests that ended or were preempted, learn of new ones, open a step."""
        self._forget(scheduler_output.finished_req_ids)
        self._forget(scheduler_output.preempted_req_ids or ())
        # An id may end and come again in one step: forget first.
        self.requests.forget(scheduler_output.finished_req_ids)
        self._message = read_message(scheduler_output)
        for request_id, (prompt_tokens, treatment) in self._message.new_requests.items():
            self.requests.add(request_id, prompt_tokens, treatment)
        self.step = Step(self.requests)

    def _forget(self, request_ids: Iterable[str]) -> None:
        """Drop what was seen of prompts that were scored, ended or were preempted."""
        request_ids = list(request_ids)
        self.observer.close(request_ids)
        if self.pruner is not None:
            self.pruner.forget(request_ids)
        if self._gathers is not None:
            self._gathers.close(request_ids)

    def enter_group(self, first_layer: str, group: GroupStep) -> None:
        """Note what a group's metadata is built from.

        The first group of a step also reads the rows and plans the observation.
        """
        step = self.step
        assert step is not None
        if step.rows is None:
            step.rows = self._rows.read(group.common)
            step.observe(self.observer)
        step.groups[first_layer] = group

    def observe(self, layer_name: str, query: torch.Tensor) -> None:
        """Copy a layer's window queries, if the step has any. Called in `forward`."""
        if self.prefill is not None:
            self.prefill.query = query
        if self.step is not None and self.step.rows is not None:
            observation = self.step.seen.observation
            if observation is not None:
                self.observer.record(layer_name, query, observation)

    def gather(self, layer_name: str, query: torch.Tensor) -> None:
        """Let the policy look at a step's prompt queries. Called after a layer's attention.

        By then the step's keys are in the cache, whoever writes them.

        Args:
            layer_name: The layer.
            query: [num_tokens, num_heads, head_size] or flattened, rotary embedding applied.
        """
        step = self.step
        if self._gathers is None or step is None or step.rows is None:
            return
        layer = self._layer_of[layer_name]
        queries = query.view(-1, layer.module.num_heads, layer.module.head_size)

        def make_chunk(row: int, tokens: slice, first: int, prompt_tokens: int) -> Chunk:
            prompt = self._prompt(step, layer, row, prompt_tokens)
            return adapter_for(layer.module.backend.name).chunk(prompt, queries[tokens], first)

        self._gathers.record(layer_name, step.seen.rows, step.seen.being_read, make_chunk)

    def _prompt(self, step: Step, layer: SievedLayer, row: int, prompt_tokens: int) -> CachedPrompt:
        group = step.groups[self._group_of[layer.name]]
        blocks = group.common.block_table_tensor[row, : -(-prompt_tokens // group.block_size)]
        return CachedPrompt(layer, blocks, prompt_tokens)

    def evidence(self, layer_number: int, row: int, window: torch.Tensor) -> Evidence:
        """What is known in one layer of a prompt that is complete there.

        Args:
            layer_number: The layer.
            row: The prompt's row in the step.
            window: [window, num_heads, head_size], the prompt's last queries.
        """
        step = self.step
        assert step is not None
        assert step.rows is not None
        layer = self._layer_by_number[layer_number]
        prompt = self._prompt(step, layer, row, int(step.rows.prompt_lens[row]))
        return adapter_for(layer.module.backend.name).evidence(prompt, window, None)

    def layout_metadata(self, layout: Layout) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Attention metadata and slots of every sieved layer for the rows of a layout, by name."""
        step = self.step
        assert step is not None
        metadata: dict[str, Any] = {}
        slots: dict[str, torch.Tensor] = {}
        built: dict[Any, Any] = {}
        for first_layer, group in step.groups.items():
            view = step.view(self._layer_of[first_layer].spec)
            starts = view.start.copy()
            for row in layout.kept:
                starts[row] = view.planned[row]
            common = layout.metadata(group.common, starts, group.block_size)
            key = (self._layer_of[first_layer].spec, group.block_size, type(group.builder))
            if key in built:
                shown = group.builder.adapter.with_blocks(
                    built[key], common.block_table_tensor, common.slot_mapping
                )
            else:
                shown = built[key] = group.builder.build_as_given(common)
            for name in self._layers_of_group[first_layer]:
                metadata[name], slots[name] = shown, common.slot_mapping
        return metadata, slots

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
            self._forget([request_id])

    def _sieve_row(self, step: Step, row: int) -> SievedRow:
        """Score one prompt in every layer, and move its rows unless it is only watched."""
        begin = time.perf_counter()
        assert step.rows is not None
        request_id = step.rows.request_ids[row]
        prompt_tokens = int(step.rows.prompt_lens[row])
        treatment = self.requests[request_id].treatment
        pruned = step.pruned.get(row)
        if treatment.prune is not None and pruned is None:
            raise SieveInvariantError(
                f"the prompt of request {request_id} was to be pruned and was not; this is a bug in"
                " kvsieve, please report it with the server's flags"
            )
        stored: list[int] = []
        numbers: list[int] = []
        scored: list[int] = []
        mass_lost: list[torch.Tensor] = []
        for layer in self.layers:
            start = int(step.view(layer.spec).planned[row])
            if not start:
                continue
            numbers.append(layer.number)
            if pruned is not None and layer.number >= pruned.first_layer:
                # It never had the others, and has these where the sieve would have moved them.
                assert pruned.positions is not None
                stored.append(len(pruned.positions))
                if self.on_select is not None:
                    shared = pruned.positions.expand(layer.module.num_kv_heads, -1)
                    self.on_select(request_id, layer.name, shared)
                continue
            scored.append(layer.number)
            gathered = None
            if self._gathers is not None:
                gathered = self._gathers.state(layer.name, request_id, prompt_tokens)
            evidence = adapter_for(layer.module.backend.name).evidence(
                self._prompt(step, layer, row, prompt_tokens),
                self.observer.queries(layer.name, request_id, prompt_tokens),
                gathered,
            )
            positions = self.policy.choose(evidence, prompt_tokens - start, treatment.spans)
            mass_lost.append(attention_mass_lost(evidence.window_attention(), positions))
            if treatment.mode == "sieve":
                evidence.compact(positions, start)
            if self.on_select is not None:
                self.on_select(request_id, layer.name, positions)
            stored.append(positions.shape[1])
        return SievedRow(
            mode=treatment.mode,
            prompt_tokens=prompt_tokens,
            stored_tokens=tuple(stored),
            layers=tuple(numbers),
            scored_layers=tuple(scored),
            # One transfer from the device for all layers.
            mass_lost=tuple(torch.stack(mass_lost).tolist() if mass_lost else ()),
            seconds=time.perf_counter() - begin,
            pruned=None if pruned is None else pruned.report,
        )

    def scratch_bytes(self, vllm_config: Any) -> int:
        """Bytes that gathering, scoring, compacting and copying need, beyond cache and rings.

        Scoring takes one layer at a time. What a policy gathers stays until its prompt ends, for
        as many prompts as may be read at once.
        """
        longest = vllm_config.model_config.max_model_len
        at_once = max(
            MAX_COPY_BYTES,
            *(
                adapter_for(layer.module.backend.name).scratch_bytes(
                    layer.module, self.policy, longest
                )
                for layer in self.layers
            ),
        )
        if self.pruner is not None:
            at_once += self.pruner.scratch_bytes(vllm_config)
        if self.policy.accumulator is None:
            return at_once
        gathered = sum(
            self.policy.accumulator.num_bytes(
                longest,
                layer.module.num_heads,
                layer.module.num_kv_heads,
                layer.module.head_size,
            )
            for layer in self.layers
        )
        return at_once + self.observer.num_slots * gathered

    def take_finished(self) -> dict[str, SievedRow]:
        """Counts of the prompts sieved since the last call, by request id."""
        finished, self._finished = self._finished, {}
        return finished
