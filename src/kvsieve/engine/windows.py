"""How many observation windows may be open at once, and who may open one.

The worker's rings have a fixed number of slots, counted in the memory profile. The scheduler
hands them out: where all are taken, a chunk ends before its prompt's window begins, and the
prompt goes on in a later step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvsieve.core.config import SieveConfig
from kvsieve.core.notation import MAX_BUDGET
from kvsieve.core.tiers import smallest_budget_of
from kvsieve.policies import Policy

MIN_SLOTS = 16
"""Slots that are always there. Prompts that hit the prefix cache compute little more than
their window, so many can end in one step however large the budget is."""


GATHERING_SLOTS = 4
"""Slots for a policy that gathers from every query of a prompt: its state grows with the prompt,
in every layer. Chunks go to one prompt after the other, so few are being read at once."""


def watched_queries(policy: Policy) -> int:
    """Last queries of a prompt that must be computed, in tokens: a window, or all of them."""
    return policy.observation_window if policy.accumulator is None else MAX_BUDGET


def num_ring_slots(
    config: SieveConfig,
    policy: Policy,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> int:
    """Windows that can be open at once; scheduler and worker agree by computing it.

    A prompt that hits nothing computes at least the smallest budget of any layer, so a step ends
    at most `tokens // budget` of them, and one may be cut short before and one after.

    Args:
        config: The operator's settings.
        policy: The policy that they name.
        block_size: Block size of the cache manager, in tokens.
        max_num_batched_tokens: Tokens of one step.
        max_num_seqs: Requests in one step.
    """
    if policy.accumulator is not None:
        return min(max_num_seqs, GATHERING_SLOTS)
    budget = smallest_budget_of(config, block_size)
    return min(max_num_seqs, max(MIN_SLOTS, max_num_batched_tokens // budget + 2))


def largest_whole_prompt(scheduler_config: Any) -> int:
    """The longest prompt that a step is sure to be able to read at once, in tokens.

    Other requests may decode in the same step, each of them a token. Chunks of prompts that came
    before end, and those that came later wait. So whether a prompt is read whole depends on its
    length alone.

    Args:
        scheduler_config: vLLM's.
    """
    step = scheduler_config.max_num_batched_tokens
    if scheduler_config.max_num_scheduled_tokens is not None:
        step = min(step, scheduler_config.max_num_scheduled_tokens)
    largest = step - scheduler_config.max_num_seqs
    threshold = scheduler_config.long_prefill_token_threshold
    return max(0, min(largest, threshold) if threshold > 0 else largest)


class OpenWindows:
    """The scheduler's account of the worker's ring slots.

    Args:
        num_slots: Slots of the worker's rings.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        # Requests whose window is partly observed after the steps scheduled so far.
        self._open: set[str] = set()
        # Requests that may reach their window in the step that is being scheduled.
        self._claimed: set[str] = set()

    def begin_schedule(self, is_running: Callable[[str], bool]) -> None:
        """Forget requests that ended or were preempted; the worker closes their windows."""
        self._open = {request_id for request_id in self._open if is_running(request_id)}
        self._claimed.clear()

    def claim(self, request_id: str) -> bool:
        """Whether a request may compute queries of its window in this step."""
        if request_id in self._open or request_id in self._claimed:
            return True
        if len(self._open) + len(self._claimed) >= self._num_slots:
            return False
        self._claimed.add(request_id)
        return True

    def scheduled(self, request_id: str, *, is_complete: bool) -> None:
        """Note that a step computes queries of a request's window, perhaps the last ones."""
        self._claimed.discard(request_id)
        if is_complete:
            # The worker closes it at the end of that step, before the next one begins.
            self._open.discard(request_id)
        else:
            self._open.add(request_id)
