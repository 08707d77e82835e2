"""The channel from the scheduler to the worker: what a step's requests need beyond vLLM's own.

The message rides on the step's `SchedulerOutput` as one extra attribute. vLLM carries that
object to the worker by reference or by pickle; both keep instance attributes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput

from kvsieve.core.treatment import Treatment

_ATTRIBUTE = "kvsieve_message"


@dataclass
class StepMessage:
    """What the worker must know of a step.

    Attributes:
        new_requests: Prompt length (tokens) and treatment of each request that the worker
            sees for the first time, or again after a preemption.
        tail_copies: Blocks (from, to) that are copied after the model call and before
            anything is compacted: the tails of prompts that go to the prefix cache.
    """

    new_requests: dict[str, tuple[int, Treatment]] = field(default_factory=dict)
    tail_copies: list[tuple[int, int]] = field(default_factory=list)


def attach_message(output: SchedulerOutput, message: StepMessage) -> None:
    """Send a message with a step."""
    setattr(output, _ATTRIBUTE, message)


def read_message(output: SchedulerOutput) -> StepMessage:
    """The message of a step; an empty one if it has none."""
    message: StepMessage | None = getattr(output, _ATTRIBUTE, None)
    return message or StepMessage()
