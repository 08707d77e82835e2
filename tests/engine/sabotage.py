"""Bugs planted on purpose, to prove that the tests would catch them.

Each function breaks one rule of docs/design.md, which `BUGS` names. They run inside an
engine's process and are undone there afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_undo: list[tuple[Any, str, Any]] = []


def _replace(owner: Any, name: str, value: Any) -> Any:
    """Replace an attribute until `undo`; returns what was there."""
    stock = getattr(owner, name)
    _undo.append((owner, name, stock))
    setattr(owner, name, value)
    return stock


def plant(name: str) -> None:
    """Plant a bug by its function's name."""
    globals()[name]()


def undo() -> None:
    """Take every bug out again."""
    while _undo:
        owner, name, stock = _undo.pop()
        setattr(owner, name, stock)


def free_without_compaction() -> None:
    """Rows are not moved, but the blocks before the start are given back."""
    from kvsieve.kernels import cpu

    _replace(cpu, "compact", lambda *args, **kwargs: None)


def start_off_by_one_block() -> None:
    """The worker believes that the kept region starts one block later."""
    from kvsieve.engine import step

    def sieved_view(spec: Any, rows: Any, requests: Any) -> Any:
        view = stock(spec, rows, requests)
        view.start[view.start > 0] += spec.manager_block_size
        return view

    stock = _replace(step, "sieved_view", sieved_view)


def lengths_of_another_layer() -> None:
    """The kernel is shown a length that is not that of the layer: a block is missing."""
    import dataclasses

    from kvsieve.engine import step

    def row_shift(view: Any, common: Any, block_size: int) -> Any:
        shift = stock(view, common, block_size)
        # Never longer than what is there: the kernel would read what lies behind the table.
        return dataclasses.replace(shift, seq_lens=(shift.seq_lens - block_size).clamp(min=1))

    stock = _replace(step, "row_shift", row_shift)


def remember_who_was_compacted() -> None:
    """Once compacted, a request counts as compacted, also while it is read again."""
    from kvsieve.engine import step

    compacted: set[str] = set()

    def sieved_view(spec: Any, rows: Any, requests: Any) -> Any:
        view = stock(spec, rows, requests)
        for row, request_id in enumerate(rows.request_ids):
            if view.start[row]:
                compacted.add(request_id)
            elif request_id in compacted:
                view.start[row] = view.planned[row]
        return view

    stock = _replace(step, "sieved_view", sieved_view)


def prompt_grows_with_the_answer() -> None:
    """After a preemption the worker takes prompt and answer for the prompt."""
    from kvsieve.engine.requests import PlannedRequests
    from kvsieve.engine.sieve import Sieve

    def begin_step(self: Any, scheduler_output: Any) -> None:
        stock(self, scheduler_output)
        resumed = getattr(scheduler_output.scheduled_cached_reqs, "resumed_req_ids", ())
        for request_id in resumed:
            plan = self.requests[request_id]
            PlannedRequests.add(self.requests, request_id, plan.prompt_tokens + 40, plan.treatment)

    stock = _replace(Sieve, "begin_step", begin_step)


def chunks_run_past_the_prompt() -> None:
    """A request that is read again gets prompt and answer in one chunk."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvsieve.engine.scheduler import SieveSchedulerMixin

    _replace(
        SieveSchedulerMixin, "_reserve_prefill_lookahead", Scheduler._reserve_prefill_lookahead
    )


def stale_queries() -> None:
    """The second and later windows in a slot are not written: the last request's stay."""
    from kvsieve.engine.observer import Observer

    seen: set[tuple[str, int]] = set()

    def record(self: Any, layer_name: str, query: Any, observation: Any) -> None:
        slots = {(layer_name, int(row) // self.window) for row in observation.target}
        if not slots <= seen:
            seen.update(slots)
            stock(self, layer_name, query, observation)

    stock = _replace(Observer, "record", record)


def windows_of_the_gone_stay() -> None:
    """Nothing is forgotten when requests end, are aborted or are preempted."""
    from kvsieve.engine.sieve import Sieve

    def begin_step(self: Any, scheduler_output: Any) -> None:
        close, self.observer.close = self.observer.close, lambda request_ids: None
        try:
            stock(self, scheduler_output)
        finally:
            self.observer.close = close

    stock = _replace(Sieve, "begin_step", begin_step)


def free_before_processed() -> None:
    """Blocks are freed in the step that finishes the prompt, not after it."""
    from kvsieve.engine.manager import SievedManager

    def allocate_new_blocks(
        self: Any, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        blocks = stock(self, request_id, num_tokens, *args, **kwargs)
        if num_tokens >= self._requests[request_id].prompt_tokens:
            self._remove_blocks_in_range(request_id, 0, self.first_kept_block(request_id))
        return blocks

    stock = _replace(SievedManager, "allocate_new_blocks", allocate_new_blocks)


def free_while_allocating() -> None:
    """Blocks are freed row by row, while a schedule allocates, and not before it."""
    from kvsieve.engine.scheduler import SieveSchedulerMixin

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._to_free.clear()
        return stock(self, *args, **kwargs)

    stock = _replace(SieveSchedulerMixin, "schedule", schedule)


def publish_the_kept_region() -> None:
    """Blocks of the kept region go to the prefix cache as if they held the prompt."""
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    from kvsieve.engine.manager import SievedManager

    _replace(SievedManager, "cache_blocks", SingleTypeKVCacheManager.cache_blocks)


def publish_the_answer() -> None:
    """Decoded KV of full layers goes to the prefix cache, though a sieved layer lies below."""
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator

    from kvsieve.engine import scheduler

    def bind(kv_cache_manager: Any, requests: Any) -> None:
        stock(kv_cache_manager, requests)
        coordinator = kv_cache_manager.coordinator
        coordinator.cache_blocks = HybridKVCacheCoordinator.cache_blocks.__get__(coordinator)

    stock = _replace(scheduler, "bind_prefix_cache_rules", bind)


def hit_the_window() -> None:
    """A sieved request takes prefix hits of any length."""
    from kvsieve.engine import scheduler

    _replace(scheduler, "bind_prefix_cache_rules", lambda *args: None)


def overwrite_shared_blocks() -> None:
    """A request takes no private copies of what its kept rows will overwrite."""
    from kvsieve.engine.manager import SievedManager

    _replace(SievedManager, "overwritten", lambda self, request_id, hit: ())


def copy_what_is_not_computed() -> None:
    """Private copies are made of blocks that a sibling computes in the same step."""
    from kvsieve.engine.manager import SievedManager

    def cache_blocks(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.published.clear()

    stock = _replace(SievedManager, "cache_blocks", cache_blocks)


def publish_tails_after_compaction() -> None:
    """Tails go to the prefix cache with the kept rows in them."""
    from kvsieve.engine.sieve import Sieve

    def end_step(self: Any) -> None:
        copies, self._message.tail_copies = self._message.tail_copies, []
        stock(self)
        self._copier.copy(copies)

    stock = _replace(Sieve, "end_step", end_step)


def move_row_by_row() -> None:
    """Rows are moved one after the other, so that later ones find theirs overwritten."""
    from kvsieve.kernels import cpu

    def compact(
        key_pages: Any, value_pages: Any, keys: Any, blocks: Any, positions: Any, start: int
    ) -> None:
        size = key_pages.shape[3]
        for head, row in enumerate(positions.tolist()):
            for target, source in enumerate(row, start):
                to, of = blocks[target // size], blocks[source // size]
                value_pages[to, head, target % size] = value_pages[of, head, source % size]
        for head in range(len(positions)):
            kept = keys[head][:, positions[head]]
            for index in range(kept.shape[1]):
                target = start + index
                key_pages[blocks[target // size], head, :, target % size] = kept[:, index]

    _replace(cpu, "compact", compact)


def sieve_what_fits() -> None:
    """A prompt that fits its budget loses a block all the same."""
    from kvsieve.engine import spec

    _replace(
        spec,
        "sieve_start",
        lambda prompt, budget, size: max(
            size if prompt > 3 * size else 0, (prompt - budget) // size * size
        ),
    )


def keep_the_worst() -> None:
    """Selection keeps the tokens with the lowest scores."""
    from kvsieve.policies import policy

    def select_positions(scores: torch.Tensor, num_keep: int) -> torch.Tensor:
        order = scores.argsort(dim=1, descending=False, stable=True)
        return order[:, :num_keep].sort(dim=1).values

    _replace(policy, "select_positions", select_positions)


def worker_knows_no_wishes() -> None:
    """The worker sieves every request to the operator's budget, whatever it asked for."""
    from kvsieve.core.treatment import Treatment
    from kvsieve.engine.sieve import Sieve

    def begin_step(self: Any, scheduler_output: Any) -> None:
        stock(self, scheduler_output)
        for request_id, (prompt, treatment) in self._message.new_requests.items():
            self.requests.add(request_id, prompt, Treatment(treatment.mode))

    stock = _replace(Sieve, "begin_step", begin_step)


def worker_does_nothing() -> None:
    """The worker never sieves: a silent no-op."""
    from kvsieve.engine.sieve import Sieve

    def end_step(self: Any) -> None:
        self.step = None

    _replace(Sieve, "end_step", end_step)


BUGS: dict[Callable[[], None], str] = {
    publish_the_kept_region: "prefix cache: sieved groups publish up to the start",
    publish_the_answer: "prefix cache: all groups publish up to the prompt's end",
    hit_the_window: "prefix cache: hits end before the window",
    overwrite_shared_blocks: "prefix cache: what will be overwritten is private",
    copy_what_is_not_computed: "prefix cache: only what is computed is copied",
    publish_tails_after_compaction: "prefix cache: tails are copied before rows are moved",
    free_before_processed: "free on processed counts only",
    free_while_allocating: "free before anything is allocated",
    move_row_by_row: "gather, then scatter",
    remember_who_was_compacted: "compacted is a function of counts",
    prompt_grows_with_the_answer: "P is the original prompt length",
    chunks_run_past_the_prompt: "a chunk ends at P",
    stale_queries: "state is keyed by request",
    windows_of_the_gone_stay: "state is dropped on finish, abort and preemption",
    start_off_by_one_block: "scheduler and worker agree on the start",
    lengths_of_another_layer: "position, stored length and budget are three numbers",
    sieve_what_fits: "B >= P is stock",
    keep_the_worst: "the best tokens are kept",
    free_without_compaction: "rows are moved before blocks are freed",
    worker_knows_no_wishes: "settings of a request reach both sides",
    worker_does_nothing: "reported counts are counted where rows move",
}
"""The rule that each bug breaks, in the words of docs/design.md."""


def store_pruned_rows_in_their_own_slots() -> None:
    """What goes deeper is stored where the tokens were, and not in the tail region."""
    from kvsieve.engine.pruning.layout import Layout

    def metadata(layout: Any, common: Any, starts: Any, block_size: int) -> Any:
        made = stock(layout, common, starts, block_size)
        slots = made.slot_mapping.clone()
        begin = 0
        for row, count in zip(layout.rows, layout.query_lens.tolist(), strict=True):
            if row in layout.kept:
                first = int(layout.slots[begin + count - 1]) + 1 - int(common.seq_lens[row])
                own = (layout.kept[row].positions + first).clamp(min=0)
                slots[begin : begin + count] = common.slot_mapping[own]
            begin += count
        return made.replace(slot_mapping=slots)

    stock = _replace(Layout, "metadata", metadata)


def number_pruned_rows_anew() -> None:
    """What goes deeper takes the positions of the tail region, as if it were moved text."""
    from kvsieve.engine.pruning import prefill_pass

    def moved(positions: torch.Tensor, is_moved: bool = False) -> Any:
        return stock(positions, is_moved=True)

    stock = _replace(prefill_pass, "Kept", moved)


def observe_rows_where_they_were() -> None:
    """After a cut the other prompts' window queries are taken from where they were before it."""
    import dataclasses

    from kvsieve.engine.pruning.layout import Layout

    def observation(layout: Any, whole: Any, num_tokens: int) -> Any:
        if whole is None:
            return None
        return dataclasses.replace(whole, source=whole.source.clamp(max=len(layout.slots) - 1))

    _replace(Layout, "observation", observation)


def publish_pruned_prompts() -> None:
    """A pruned prompt is published like a sieved one."""
    from kvsieve.engine.requests import PlannedRequest

    _replace(PlannedRequest, "is_pruned", property(lambda plan: False))


def score_with_the_chunks_queries() -> None:
    """The window is taken from the last chunk alone."""
    from kvsieve.engine.pruning.carried import CarriedPrompt

    def add(prompt: Any, hidden: Any, residual: Any, queries: Any, window: int) -> None:
        stock(prompt, hidden, residual, queries, window)
        prompt.queries = queries[-window:].clone()
        prompt.queries[:-1] = 0

    stock = _replace(CarriedPrompt, "add", add)


def keep_hidden_states_of_the_last_request() -> None:
    """What chunks left behind is kept by nobody in particular."""
    from kvsieve.engine.pruning.carried import CarriedPrompts

    def at(prompts: Any, request_id: str, num_computed: int) -> Any:
        return stock(prompts, "anybody", num_computed)

    stock = _replace(CarriedPrompts, "at", at)


PRUNING_BUGS: dict[Callable[[], None], str] = {
    store_pruned_rows_in_their_own_slots: "kept rows lie in the tail region",
    number_pruned_rows_anew: "kept tokens keep their positions",
    observe_rows_where_they_were: "windows are observed in the rows that are left",
    publish_pruned_prompts: "a pruned request publishes nothing, and is read whole",
    score_with_the_chunks_queries: "the window may straddle chunks",
    keep_hidden_states_of_the_last_request: "chunks are kept by request",
}
"""Bugs of pruning, and the rules that they break."""
