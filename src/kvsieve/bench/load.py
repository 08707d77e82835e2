"""The load generator: chats that are sent to one server, in a closed or an open loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsieve.bench.errors import BenchError
from kvsieve.bench.prompts import Script
from kvsieve.serving.client import Client, Completion
from kvsieve.serving.together import together


@dataclass(frozen=True)
class Answered:
    """One request that was answered.

    Attributes:
        chat: Number of its conversation.
        turn: Its place in it, from 0.
        late_s: How long after its planned time it was sent, in seconds; 0 in a closed loop.
        completion: The answer, with its times.
    """

    chat: int
    turn: int
    late_s: float
    completion: Completion


async def send(
    client: Client,
    scripts: Sequence[Script],
    *,
    concurrency: int | None = None,
    arrivals: Sequence[float] = (),
    on_answer: Callable[[], None] = lambda: None,
) -> list[Answered]:
    """Hold every chat, and return when the last answer is complete.

    In a closed loop `concurrency` clients hold one chat after another; in an open loop each
    chat begins when it is due, however many are running. The turns of a chat follow one
    another at once.

    Args:
        client: Talks to the server.
        scripts: The chats.
        concurrency: Clients of a closed loop; None for an open one.
        arrivals: When each chat of an open loop is due, in seconds from now.
        on_answer: Called after each answer.

    Raises:
        RequestError: A request failed. The others are given up.
        BenchError: An answer has another length than was asked for.
    """
    answered: list[Answered] = []
    started = time.perf_counter()

    async def hold(number: int, due: float | None) -> None:
        if due is not None:
            await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
        script, said = scripts[number], list[int]()
        for turn, (message, tokens) in enumerate(
            zip(script.messages, script.answer_tokens, strict=True)
        ):
            said += message
            completion = await client.complete(
                said,
                max_tokens=tokens,
                min_tokens=tokens,
                ignore_eos=True,
                stream=True,
                # The next turn repeats them; else they would only make the stream longer.
                token_ids=len(script.messages) > 1,
            )
            _check_lengths(completion, len(said), tokens)
            is_planned = due is not None and turn == 0
            late = completion.sent_at - started - (due or 0.0) if is_planned else 0.0
            answered.append(Answered(number, turn, max(late, 0.0), completion))
            on_answer()
            said += completion.token_ids

    if concurrency is None:
        if len(arrivals) != len(scripts):
            raise ValueError(f"{len(scripts)} chats, but {len(arrivals)} arrivals")
        await together(hold(number, due) for number, due in enumerate(arrivals))
    else:
        waiting = iter(range(len(scripts)))

        async def one_after_another() -> None:
            # One event loop: nobody else can take the same number.
            for number in waiting:
                await hold(number, None)

        await together(one_after_another() for _ in range(concurrency))
    return sorted(answered, key=lambda each: (each.chat, each.turn))


def _check_lengths(completion: Completion, prompt_tokens: int, output_tokens: int) -> None:
    """Refuse figures of another load than was planned.

    Raises:
        BenchError: Prompt or answer have another length.
    """
    got = (completion.prompt_tokens, completion.completion_tokens)
    if got != (prompt_tokens, output_tokens):
        raise BenchError(
            f"asked for {output_tokens} tokens after a prompt of {prompt_tokens}, and the server"
            f" counted {got[1]} after {got[0]} (finish_reason {completion.finish_reason!r});"
            " is --max-model-len too short for the workload?"
        )
