"""The load: a sequence of requests that depends on a seed alone."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

# No word of a tokenizer is special in this range, and every vocabulary has it.
FIRST_ID, LAST_ID = 1_000, 30_000
SENTENCE = (
    "the library keeps a record of every letter that the archive received last year and asks"
    " who wrote it when it was read why the page is missing and what the reader found in it"
)

GOOD_BUDGETS: tuple[Any, ...] = (128, 256, 256.0, "512", 4096, 0.2, "10%", "50%", "full")
BAD_BUDGETS: tuple[Any, ...] = (0, -5, 1, "banana", "", "0%", "150%", 1.5, -0.1, [256], "1e3")
BUDGET_SHARE = 0.4
"""Share of the good requests that bring a budget of their own."""

SHARED_PREFIXES = 4


@dataclass(frozen=True)
class Job:
    """One request and what its answer must look like.

    Attributes:
        number: Its place in the sequence.
        kind: What it tries.
        chat: Whether it goes to chat completions.
        body: Arguments of the client's `create`, without model and stream.
        extra: Fields of the body that the OpenAI API does not have.
        stream: Whether the answer is streamed.
        leave_after: Chunks of the stream after which the client disconnects; None: never.
        leave_seconds: The same in seconds, for an answer that is not streamed.
        choices: Choices in the answer.
        exactly: Completion tokens per choice, if they are fixed.
        at_least: Fewest completion tokens per choice.
        refused: Whether the server must answer 400 and a sentence.
        budget: `kv_budget` for servers that know it; None for none.
        sieve_only: Whether only such a server gets it.
    """

    number: int
    kind: str
    chat: bool
    body: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    leave_after: int | None = None
    leave_seconds: float | None = None
    choices: int = 1
    exactly: int | None = None
    at_least: int = 0
    refused: bool = False
    budget: Any = None
    sieve_only: bool = False


# Kind and weight. Each has a method of that name in `Load`.
KINDS = {
    "completion": 14,
    "completion_stream": 14,
    "chat": 10,
    "chat_stream": 10,
    "several_prompts": 5,
    "two_choices": 5,
    "stop_string": 5,
    "min_tokens": 5,
    "ignore_eos": 5,
    "logprobs": 5,
    "disconnect": 7,
    "shared_prefix": 12,
    "whole_context": 1,
    "one_token_prompt": 3,
    "bad_request": 6,
    "bad_budget": 4,
}


class Load:
    """An endless sequence of jobs.

    Args:
        seed: Equal seeds give equal sequences.
        max_model_len: Longest request, in tokens.
        budgets: Whether requests bring budgets of their own.
    """

    def __init__(self, seed: int, max_model_len: int, budgets: bool) -> None:
        self._seed = seed
        self._max_model_len = max_model_len
        self._kinds = [kind for kind in KINDS if budgets or kind != "bad_budget"]
        self._weights = [KINDS[kind] for kind in self._kinds]
        self._budgets = budgets
        generator = random.Random(f"{seed}/prefixes")
        longest = max_model_len // 2
        self._prefixes = [
            self._ids(generator, generator.randint(longest // 4, longest))
            for _ in range(SHARED_PREFIXES)
        ]

    def __iter__(self) -> Iterator[Job]:
        number = 0
        while True:
            yield self.job(number)
            number += 1

    def job(self, number: int) -> Job:
        """The job at this place of the sequence."""
        # Of its own, so that a change in one kind leaves the other jobs as they were.
        generator = random.Random(f"{self._seed}/{number}")
        kind = generator.choices(self._kinds, self._weights)[0]
        job: Job = getattr(self, f"_{kind}")(generator)
        job = replace(job, number=number, kind=kind)
        if self._budgets and job.budget is None and generator.random() < BUDGET_SHARE:
            job = replace(job, budget=generator.choice(GOOD_BUDGETS))
        return job

    def _length(self, generator: random.Random, room: int) -> int:
        """A prompt's length from 1 to what leaves `room`, small ones more often."""
        longest = self._max_model_len - room
        return max(1, min(longest, int(math.exp(generator.uniform(0, math.log(longest + 1))))))

    @staticmethod
    def _ids(generator: random.Random, length: int) -> list[int]:
        return [generator.randrange(FIRST_ID, LAST_ID) for _ in range(length)]

    @staticmethod
    def _text(generator: random.Random, words: int) -> str:
        known = SENTENCE.split()
        return " ".join(generator.choice(known) for _ in range(words))

    def _completion(self, generator: random.Random) -> Job:
        out = generator.randint(1, 64)
        prompt = self._ids(generator, self._length(generator, 64))
        temperature = generator.choice((0.0, 0.0, 0.7))
        return Job(
            0,
            "",
            chat=False,
            body={
                "prompt": prompt,
                "max_tokens": out,
                # No seed: where a chunk ends inside the prompt of a seeded request that samples,
                # vLLM 0.32's first model runner dies of it on a CPU ("CPU Generator does not
                # use offset"), with or without kvsieve.
                "temperature": temperature,
            },
            at_least=1,
        )

    def _completion_stream(self, generator: random.Random) -> Job:
        return replace(self._completion(generator), stream=True)

    def _chat(self, generator: random.Random) -> Job:
        out = generator.randint(1, 64)
        # A word is less than two tokens, and the template needs room.
        words = self._length(generator, self._max_model_len // 8) // 2
        messages = [
            {"role": "system", "content": "You answer in one sentence."},
            {"role": "user", "content": self._text(generator, words + 1)},
        ]
        if generator.random() < 0.3:
            messages += [
                {"role": "assistant", "content": self._text(generator, 20)},
                {"role": "user", "content": self._text(generator, 10)},
            ]
        body = {"messages": messages, "max_tokens": out, "temperature": 0.0}
        return Job(0, "", chat=True, body=body, at_least=1)

    def _chat_stream(self, generator: random.Random) -> Job:
        return replace(self._chat(generator), stream=True)

    def _several_prompts(self, generator: random.Random) -> Job:
        count = generator.randint(2, 4)
        prompts = [
            self._ids(generator, self._length(generator, self._max_model_len // 2))
            for _ in range(count)
        ]
        body = {"prompt": prompts, "max_tokens": 12, "temperature": 0.0}
        return Job(0, "", chat=False, body=body, choices=count, at_least=1)

    def _two_choices(self, generator: random.Random) -> Job:
        job = generator.choice((self._completion, self._chat))(generator)
        body = {**job.body, "n": 2, "temperature": 0.8}
        return replace(job, body=body, choices=2, stream=generator.random() < 0.5)

    def _stop_string(self, generator: random.Random) -> Job:
        job = generator.choice((self._completion, self._chat))(generator)
        stop = generator.choice((["e"], [" the", "a"], ["\n"], ["never in an answer \u2603"]))
        return replace(job, body={**job.body, "stop": stop}, stream=generator.random() < 0.5)

    def _min_tokens(self, generator: random.Random) -> Job:
        job = self._completion(generator)
        least = generator.randint(1, job.body["max_tokens"])
        return replace(job, extra={"min_tokens": least}, at_least=least)

    def _ignore_eos(self, generator: random.Random) -> Job:
        job = generator.choice((self._completion, self._completion_stream))(generator)
        return replace(job, extra={"ignore_eos": True}, exactly=job.body["max_tokens"])

    def _logprobs(self, generator: random.Random) -> Job:
        job = generator.choice((self._completion, self._chat))(generator)
        asked = {"logprobs": True, "top_logprobs": 3} if job.chat else {"logprobs": 3}
        return replace(job, body={**job.body, **asked})

    def _disconnect(self, generator: random.Random) -> Job:
        job = generator.choice((self._completion, self._chat, self._two_choices))(generator)
        job = replace(job, body={**job.body, "max_tokens": 64}, at_least=0)
        if generator.random() < 0.4:
            seconds = generator.choice((0.05, 0.3, 1.0, 3.0))
            return replace(job, stream=False, leave_seconds=seconds)
        # 0: before anything came, which is while the prompt is read.
        chunks = generator.choice((0, 0, 1, 2, 5, 10))
        return replace(job, stream=True, leave_after=chunks)

    def _shared_prefix(self, generator: random.Random) -> Job:
        prefix = generator.choice(self._prefixes)
        tail = self._ids(generator, generator.randint(1, 64))
        job = Job(
            0,
            "",
            chat=False,
            body={"prompt": [*prefix, *tail], "max_tokens": 16, "temperature": 0.0},
            at_least=1,
        )
        return replace(job, stream=generator.random() < 0.5)

    def _whole_context(self, generator: random.Random) -> Job:
        out = generator.choice((1, 8))
        prompt = self._ids(generator, self._max_model_len - out)
        body = {"prompt": prompt, "max_tokens": out, "temperature": 0.0}
        return Job(0, "", chat=False, body=body, at_least=1)

    def _one_token_prompt(self, generator: random.Random) -> Job:
        body = {"prompt": self._ids(generator, 1), "max_tokens": 16, "temperature": 0.0}
        return Job(0, "", chat=False, body=body, at_least=1)

    def _bad_request(self, generator: random.Random) -> Job:
        ids = self._ids(generator, 8)
        completion = {"prompt": ids, "max_tokens": 8}
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        wrong: tuple[tuple[bool, dict[str, Any], dict[str, Any]], ...] = (
            (False, {**completion, "prompt": self._ids(generator, self._max_model_len + 1)}, {}),
            (False, {**completion, "prompt": [2**31 - 1]}, {}),
            (False, {**completion, "max_tokens": self._max_model_len + 1}, {}),
            (False, {**completion, "temperature": -1}, {}),
            (False, {**completion, "top_p": 2.0}, {}),
            (False, {**completion, "n": 0}, {}),
            (False, completion, {"min_tokens": 9}),
            (True, {**chat, "messages": "Hello"}, {}),
            (True, {**chat, "temperature": "hot"}, {}),
            (True, {**chat, "max_tokens": -3}, {}),
        )
        is_chat, body, extra = generator.choice(wrong)
        return Job(
            0,
            "",
            chat=is_chat,
            body=body,
            extra=extra,
            stream=generator.random() < 0.3,
            refused=True,
        )

    def _bad_budget(self, generator: random.Random) -> Job:
        job = generator.choice((self._completion, self._chat))(generator)
        return replace(
            job,
            stream=generator.random() < 0.3,
            refused=True,
            budget=generator.choice(BAD_BUDGETS),
            sieve_only=True,
        )
