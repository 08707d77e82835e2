"""The text of a workload: seeded, new in every repeat, the same for every arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from random import Random

from kvsieve.bench.workload import Chat

PHRASE_TOKENS = (4, 8)
"""Length of the pieces that a text is made of: long enough to be words in a row, and so short that
a block of 16 tokens holds several: no two texts then begin with the same block."""


@dataclass(frozen=True)
class Script:
    """One chat's side of the client, in token ids.

    Attributes:
        messages: Per turn, what the client adds; the first begins with what is shared.
        answer_tokens: Per turn, tokens that the server is made to generate.
    """

    messages: tuple[tuple[int, ...], ...]
    answer_tokens: tuple[int, ...]


def document() -> str:
    """Real English prose, which ships with the package."""
    # By path: the demonstration's own code is not wanted here.
    return files("kvsieve").joinpath("demo/document.txt").read_text(encoding="utf-8").strip()


def seeded(seed: int, *names: str | int) -> Random:
    """A generator of its own for everything that has a name, the same on every machine."""
    return Random("/".join(map(str, (seed, *names))))


def write_scripts(
    chats: Sequence[Chat], words: Sequence[int], seed: int, *names: str | int
) -> tuple[Script, ...]:
    """Give every chat its words.

    Args:
        chats: Their lengths.
        words: Token ids of a long text that phrases are taken from.
        seed: The run's seed.
        names: What the scripts are for, such as workload and repeat; other names, other text.
    """
    longest = max((chat.shared_tokens for chat in chats), default=0)
    shared = phrases(seeded(seed, *names, "shared"), words, longest)
    scripts = []
    for number, chat in enumerate(chats):
        random = seeded(seed, *names, "chat", number)
        messages = [phrases(random, words, count) for count in chat.message_tokens]
        messages[0] = shared[: chat.shared_tokens] + messages[0]
        scripts.append(Script(tuple(map(tuple, messages)), chat.answer_tokens))
    return tuple(scripts)


def phrases(random: Random, words: Sequence[int], count: int) -> list[int]:
    """`count` token ids: phrases from random places of `words`, one after another."""
    text: list[int] = []
    while len(text) < count:
        length = min(random.randint(*PHRASE_TOKENS), len(words))
        start = random.randrange(len(words) - length + 1)
        text.extend(words[start : start + length])
    return text[:count]
