"""What the requests of a workload look like: lengths only, no text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

MIN_PROMPT_TOKENS = 8
MIN_ANSWER_TOKENS = 2
"""The time per output token is the time between two tokens."""


@dataclass(frozen=True)
class Chat:
    """One conversation; a single request is a conversation of one turn.

    Attributes:
        shared_tokens: Tokens at the start of its first prompt that every chat of the
            workload shares.
        message_tokens: Per turn, tokens that the client adds to what was said before.
        answer_tokens: Per turn, tokens that the server is made to generate.
    """

    shared_tokens: int
    message_tokens: tuple[int, ...]
    answer_tokens: tuple[int, ...]

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Length of each turn's prompt, in tokens: all that was said, and the new message."""
        lengths, said = [], self.shared_tokens
        for message, answer in zip(self.message_tokens, self.answer_tokens, strict=True):
            lengths.append(said + message)
            said += message + answer
        return tuple(lengths)

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest request, its answer included."""
        return self.prompt_lengths[-1] + self.answer_tokens[-1]


@dataclass(frozen=True)
class Workload:
    """A kind of load.

    Attributes:
        name: As `--workload` takes it.
        summary: One line for people.
        draw: One chat, drawn with a seeded generator, at full scale.
        turns: Requests of a chat.
    """

    name: str
    summary: str
    draw: Callable[[Random], Chat]
    turns: int = 1

    def plan(self, random: Random, requests: int, scale: float) -> tuple[Chat, ...]:
        """Chats that come to `requests` requests, or a few more where a chat has several.

        Args:
            random: Seeded; the same one gives the same chats.
            requests: At least 1.
            scale: What every length is multiplied with.
        """
        chats = math.ceil(requests / self.turns)
        return tuple(_scaled(self.draw(random), scale) for _ in range(chats))


def _scaled(chat: Chat, scale: float) -> Chat:
    def tokens(count: int, least: int) -> int:
        return max(least, round(count * scale))

    return Chat(
        shared_tokens=tokens(chat.shared_tokens, 0),
        message_tokens=tuple(tokens(n, MIN_PROMPT_TOKENS) for n in chat.message_tokens),
        answer_tokens=tuple(tokens(n, MIN_ANSWER_TOKENS) for n in chat.answer_tokens),
    )


def _fixed(prompt: int, answer: int) -> Callable[[Random], Chat]:
    return lambda random: Chat(0, (prompt,), (answer,))


def _shared_prefix(random: Random) -> Chat:
    return Chat(2000, (random.randint(100, 300),), (200,))


def _log_normal(random: Random, median: int, sigma: float, least: int, most: int) -> int:
    drawn = round(random.lognormvariate(math.log(median), sigma))
    return min(max(drawn, least), most)


def _mixed(random: Random) -> Chat:
    # The spread of chat logs: most prompts are short, a few are very long.
    prompt = _log_normal(random, median=1000, sigma=1.0, least=64, most=6000)
    return Chat(0, (prompt,), (_log_normal(random, median=200, sigma=0.7, least=16, most=1000),))


_TURNS = 5


def _multi_turn(random: Random) -> Chat:
    later = tuple(random.randint(100, 300) for _ in range(_TURNS - 1))
    return Chat(0, (1000, *later), (150,) * _TURNS)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("long-prompt", "4,000 prompt tokens, 500 output tokens", _fixed(4000, 500)),
        Workload("long-output", "500 prompt tokens, 2,000 output tokens", _fixed(500, 2000)),
        Workload(
            "shared-prefix",
            "a system prompt of 2,000 tokens that all requests share, 100-300 tokens of their"
            " own, 200 output tokens",
            _shared_prefix,
        ),
        Workload(
            "mixed",
            "log-normal lengths: prompts of 64-6,000 tokens (median 1,000), outputs of 16-1,000"
            " (median 200)",
            _mixed,
        ),
        Workload(
            "multi-turn",
            f"chats of {_TURNS} turns: 1,000 tokens first, then 100-300 in a turn; answers of 150"
            " tokens stay in the prompt",
            _multi_turn,
            turns=_TURNS,
        ),
    )
}
