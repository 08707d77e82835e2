"""What the load consists of: lengths, words and arrivals, all of them seeded."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.bench.arrivals import poisson_arrivals
from kvsieve.bench.errors import BenchError
from kvsieve.bench.load import send
from kvsieve.bench.prompts import document, phrases, seeded, write_scripts
from kvsieve.bench.workload import WORKLOADS, Chat
from kvsieve.serving.client import Completion, RequestError

WORDS = range(1000, 4000)


@pytest.mark.parametrize("name", WORKLOADS)
@given(seed=st.integers(), requests=st.integers(1, 40), scale=st.floats(0.001, 2))
@settings(max_examples=25)
def test_a_plan_has_the_requests_and_legal_lengths(
    name: str, seed: int, requests: int, scale: float
) -> None:
    workload = WORKLOADS[name]
    chats = workload.plan(Random(seed), requests, scale)
    assert chats == workload.plan(Random(seed), requests, scale)
    count = sum(len(chat.message_tokens) for chat in chats)
    assert requests <= count < requests + workload.turns
    for chat in chats:
        assert len(chat.prompt_lengths) == workload.turns
        assert min(chat.message_tokens) >= 8 and min(chat.answer_tokens) >= 2
        assert list(chat.prompt_lengths) == sorted(chat.prompt_lengths)
        assert chat.context_tokens > max(chat.prompt_lengths)


def test_the_lengths_are_those_that_are_promised() -> None:
    def first(name: str) -> Chat:
        return WORKLOADS[name].plan(Random(0), 1, 1.0)[0]

    assert first("long-prompt") == Chat(0, (4000,), (500,))
    assert first("long-output") == Chat(0, (500,), (2000,))
    assert first("shared-prefix").shared_tokens == 2000
    mixed = WORKLOADS["mixed"].plan(Random(0), 400, 1.0)
    prompts = [chat.prompt_lengths[0] for chat in mixed]
    assert 800 < statistics.median(prompts) < 1250
    assert min(prompts) < 256 < 1024 < max(prompts) <= 6000


def test_a_chat_repeats_what_was_said() -> None:
    assert Chat(10, (5, 6, 7), (2, 3, 4)).prompt_lengths == (15, 23, 33)
    assert Chat(10, (5, 6, 7), (2, 3, 4)).context_tokens == 37


@given(st.integers(1, 500), st.integers(0, 2**32))
def test_phrases_have_the_length_and_come_from_the_text(count: int, seed: int) -> None:
    text = phrases(Random(seed), WORDS, count)
    assert len(text) == count and set(text) <= set(WORDS)
    assert text == phrases(Random(seed), WORDS, count)


def test_scripts_share_what_they_should_and_nothing_else() -> None:
    chats = [Chat(64, (40,), (4,)), Chat(64, (50,), (4,))]
    one, two = (script.messages[0] for script in write_scripts(chats, WORDS, 0, "x", 0))
    assert (len(one), len(two)) == (104, 114)
    assert one[:64] == two[:64] and one[64:96] != two[64:96]
    again = write_scripts(chats, WORDS, 0, "x", 0)
    assert again[0].messages[0] == one
    for other in (write_scripts(chats, WORDS, 0, "x", 1), write_scripts(chats, WORDS, 1, "x", 0)):
        # The prefix cache works in blocks: the very first one must differ.
        assert other[0].messages[0][:16] != one[:16]


def test_no_two_prompts_begin_with_the_same_block() -> None:
    chats = WORKLOADS["long-prompt"].plan(Random(0), 200, 0.05)
    starts = [
        script.messages[0][:16]
        for repeat in range(5)
        for script in write_scripts(chats, WORDS, 0, "long-prompt", repeat)
    ]
    assert len(set(starts)) == len(starts)


def test_the_words_are_prose() -> None:
    assert len(document().split()) > 2000


@given(st.integers(0, 2**32), st.floats(0.01, 100), st.integers(1, 50))
def test_arrivals_ascend_from_zero(seed: int, rate: float, count: int) -> None:
    times = poisson_arrivals(Random(seed), rate, count)
    assert len(times) == count and times[0] == 0
    assert all(one <= two for one, two in itertools.pairwise(times))
    assert times == poisson_arrivals(Random(seed), rate, count)


def test_arrivals_come_at_the_rate_and_vary_like_a_poisson_process() -> None:
    times = poisson_arrivals(seeded(0, "arrivals"), 4.0, 4001)
    gaps = [two - one for one, two in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.08)


class Failing:
    """A server that fails one request, and never answers the others."""

    def __init__(self, answer: Completion | None = None) -> None:
        self.sent = self.given_up = 0
        self.answer = answer

    async def complete(self, prompt: list[int], **_: Any) -> Completion:
        self.sent += 1
        if self.answer is not None:
            return self.answer
        if self.sent == 2:
            raise RequestError("the server answered 500: out of order", 500)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        raise AssertionError("this takes a minute")


@pytest.mark.parametrize("loop", [{"concurrency": 3}, {"arrivals": (0.0, 0.0, 0.0)}])
def test_one_failed_request_ends_the_run(loop: dict[str, Any]) -> None:
    scripts = write_scripts([Chat(0, (8,), (2,))] * 3, WORDS, 0)
    client: Any = Failing()
    with pytest.raises(RequestError, match="out of order"):
        asyncio.run(send(client, scripts, **loop))
    assert client.given_up == client.sent - 1


def test_an_answer_of_another_length_is_no_measurement() -> None:
    short = Completion("", (), 8, 1, None, "stop", None, sent_at=0.0, token_times=(1.0,))
    scripts = write_scripts([Chat(0, (8,), (2,))], WORDS, 0)
    client: Any = Failing(short)
    with pytest.raises(BenchError, match="asked for 2 tokens after a prompt of 8, and the server"):
        asyncio.run(send(client, scripts, concurrency=1))


def test_every_chat_of_an_open_loop_needs_an_arrival() -> None:
    client: Any = Failing()
    with pytest.raises(ValueError, match="1 chats, but 0 arrivals"):
        asyncio.run(send(client, write_scripts([Chat(0, (8,), (2,))], WORDS, 0)))
