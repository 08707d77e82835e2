from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.strategies import booleans, data, integers

from kvsieve.engine.windows import (
    OpenWindows,
    largest_whole_prompt,
    num_ring_slots,
    watched_queries,
)
from kvsieve.policies import parse_settings, policy_from_config


def test_slots_follow_the_smallest_budget() -> None:
    config = parse_settings({"policy": "snapkv", "budget": 256, "min_budget": 200})
    snapkv = policy_from_config(config)
    assert num_ring_slots(config, snapkv, 32, 2048, 256) == 16
    assert num_ring_slots(config, snapkv, 32, 8192, 256) == 8192 // 256 + 2
    assert num_ring_slots(config, snapkv, 32, 8192, 4) == 4
    share = parse_settings({"policy": "snapkv", "budget": "10%"})
    assert num_ring_slots(share, snapkv, 32, 8192, 256) == 8192 // 68 + 2


def test_a_policy_that_gathers_has_few_slots_and_watches_every_query() -> None:
    config = parse_settings({"policy": "h2o", "budget": 256})
    h2o = policy_from_config(config)
    assert num_ring_slots(config, h2o, 32, 8192, 256) == 4
    assert num_ring_slots(config, h2o, 32, 8192, 2) == 2
    assert watched_queries(h2o) > 10**8
    assert watched_queries(policy_from_config(parse_settings({}))) == 32


class Steps(RuleBasedStateMachine):
    """Windows as a worker would see them never exceed the slots."""

    slots = 3

    def __init__(self) -> None:
        super().__init__()
        self.windows = OpenWindows(self.slots)
        self.worker: set[str] = set()
        self.running: set[str] = set()
        self.most = 0

    @rule(choices=data())
    def step(self, choices) -> None:  # type: ignore[no-untyped-def]
        self.running |= {str(choices.draw(integers(0, 9))) for _ in range(3)}
        gone = {r for r in sorted(self.running) if choices.draw(integers(0, 9)) == 0}
        self.running -= gone
        self.worker -= gone
        self.windows.begin_schedule(self.running.__contains__)
        granted = [r for r in sorted(self.running) if self.windows.claim(r)]
        # Some are granted and then not scheduled, for lack of blocks.
        scheduled = [r for r in granted if choices.draw(integers(0, 4))]
        complete = {r for r in scheduled if choices.draw(booleans())}
        for request_id in scheduled:
            self.windows.scheduled(request_id, is_complete=request_id in complete)
        self.worker |= set(scheduled)
        self.most = max(self.most, len(self.worker))
        self.worker -= complete
        self.running -= complete

    @invariant()
    def never_more_than_there_are(self) -> None:
        assert self.most <= self.slots


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(integers(1, 5))
def test_a_slot_comes_back(slots: int) -> None:
    windows = OpenWindows(slots)
    for turn in range(20):
        windows.begin_schedule(lambda _: True)
        assert windows.claim(f"{turn}")
        windows.scheduled(f"{turn}", is_complete=True)


@pytest.mark.parametrize(
    ("batched", "scheduled", "threshold", "largest"),
    [
        (2048, None, 0, 1984),
        (2048, 512, 0, 448),
        (2048, 4096, 0, 1984),
        (2048, None, 300, 300),
        (2048, None, 4000, 1984),
        (64, None, 0, 0),
    ],
)
def test_a_prompt_that_is_read_whole_leaves_room_for_all_who_decode(
    batched: int, scheduled: int | None, threshold: int, largest: int
) -> None:
    config = SimpleNamespace(
        max_num_batched_tokens=batched,
        max_num_scheduled_tokens=scheduled,
        long_prefill_token_threshold=threshold,
        max_num_seqs=64,
    )
    assert largest_whole_prompt(config) == largest
