"""Bugs planted on purpose, to prove that the fuzz would catch them.

Each function changes the engine's process for good, so a sabotaged engine needs a host
of its own. Each names the rule of docs/design.md that it breaks.
"""

from __future__ import annotations

import torch


def free_without_compaction() -> None:
    """Rows are not moved, but the blocks before the start are given back."""
    from kvsieve.kernels import cpu

    cpu.compact = lambda *args, **kwargs: None


def start_off_by_one_block() -> None:
    """The worker believes that the kept region starts one block later."""
    from kvsieve.engine import step

    stock = step.sieved_view

    def sieved_view(spec, rows, requests):  # type: ignore[no-untyped-def]
        view = stock(spec, rows, requests)
        view.start[view.start > 0] += spec.manager_block_size
        return view

    step.sieved_view = sieved_view


def stale_queries() -> None:
    """The second and later windows in a slot are not written: the last request's stay."""
    from kvsieve.engine.observer import Observer

    stock = Observer.record
    seen: set[tuple[str, int]] = set()

    def record(self, layer_name, query, observation):  # type: ignore[no-untyped-def]
        slots = {(layer_name, int(row) // self.window) for row in observation.target}
        if not slots <= seen:
            seen.update(slots)
            stock(self, layer_name, query, observation)

    Observer.record = record


def free_before_processed() -> None:
    """Blocks are freed in the step that finishes the prompt, not after it."""
    from kvsieve.engine.manager import SievedManager

    stock = SievedManager.allocate_new_blocks

    def allocate_new_blocks(self, request_id, num_tokens, *args, **kwargs):  # type: ignore[no-untyped-def]
        blocks = stock(self, request_id, num_tokens, *args, **kwargs)
        start = self.first_kept_block(request_id)
        if num_tokens < self._requests[request_id].prompt_tokens:
            start = 0
        self._remove_blocks_in_range(request_id, 0, start)
        return blocks

    SievedManager.allocate_new_blocks = allocate_new_blocks


def publish_the_kept_region() -> None:
    """Blocks of the kept region go to the prefix cache as if they held the prompt."""
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    from kvsieve.engine.manager import SievedManager

    SievedManager.cache_blocks = SingleTypeKVCacheManager.cache_blocks


def hit_beyond_the_start() -> None:
    """A sieved request takes prefix hits of any length."""
    from kvsieve.engine import scheduler

    scheduler.bind_prefix_cache_rules = lambda *args: None


def keep_the_worst() -> None:
    """Selection keeps the tokens with the lowest scores."""
    from kvsieve.policies import policy

    def select_positions(scores: torch.Tensor, num_keep: int) -> torch.Tensor:
        order = scores.argsort(dim=1, descending=False, stable=True)
        return order[:, :num_keep].sort(dim=1).values

    policy.select_positions = select_positions
