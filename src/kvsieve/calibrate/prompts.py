"""Calibration prompts: several kinds, two lengths, made from the texts that kvsieve ships."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvsieve.core.errors import ConfigError
from kvsieve.evals.prompts import PromptMaker
from kvsieve.evals.tasks import TASKS
from kvsieve.evals.tasks.haystack import prose

PLAIN_TEXT = "text"
"""The kind that asks nothing: prose, which the model would go on with."""

KINDS = ("niah", "niah_multikey", PLAIN_TEXT)
"""In turn. Needles are tasks of `kvsieve eval`."""

LENGTHS = (1.25, 0.75)
"""In turn, of the mean length."""


@dataclass(frozen=True)
class CalibrationPrompt:
    """One prompt.

    Attributes:
        name: Its kind and number.
        token_ids: Its tokens.
    """

    name: str
    token_ids: tuple[int, ...]


def calibration_prompts(
    maker: PromptMaker, count: int, mean_tokens: int, seed: int = 0
) -> list[CalibrationPrompt]:
    """So many prompts, kinds and lengths in turn; the same arguments give the same ones.

    Args:
        maker: From texts to tokens.
        count: Prompts.
        mean_tokens: Their length on average, in tokens; a chat template comes on top.
        seed: What their content follows.

    Raises:
        ConfigError: They are too short for what is asked in them.
    """
    plan = [
        (KINDS[index % len(KINDS)], round(mean_tokens * LENGTHS[index % len(LENGTHS)]))
        for index in range(count)
    ]
    made = {
        (kind, length): iter(_prompts(maker, kind, length, number, seed))
        for (kind, length), number in Counter(plan).items()
    }
    return [
        CalibrationPrompt(f"{index}: {kind}", next(made[kind, length]))
        for index, (kind, length) in enumerate(plan, 1)
    ]


def _prompts(
    maker: PromptMaker, kind: str, length: int, count: int, seed: int
) -> list[tuple[int, ...]]:
    if kind == PLAIN_TEXT:
        return [_plain(maker, length, f"calibrate/{seed}/{index}") for index in range(count)]
    examples = TASKS[kind].generate(maker.count_tokens, length, count, seed)
    return [maker.item(example).prompt_ids for example in examples]


def _plain(maker: PromptMaker, length: int, seed: str) -> tuple[int, ...]:
    """The first tokens of shuffled prose. A word is a token at least, but for odd tokenizers."""
    words = length
    while len(ids := maker.encode(" ".join(prose(words, seed)))) < length:
        if words > 16 * length:
            raise ConfigError([f"{maker.model}'s tokenizer makes no {length} tokens of a text"])
        words *= 2
    return (*maker.beginning, *ids[: length - len(maker.beginning)])
