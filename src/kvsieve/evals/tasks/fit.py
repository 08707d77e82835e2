"""Fit: as much filler as a prompt of the wanted length has room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvsieve.core.errors import ConfigError
from kvsieve.evals.example import Example
from kvsieve.evals.tasks.task import CountTokens

Build = Callable[[int], Example]
"""The example with so many units of filler; the same number gives the same example, and more
units give a longer prompt."""

GOOD_SHARE = 0.99
"""A prompt with this share of the wanted length is long enough; looking on costs calls."""

_PROBE_UNITS = 8


def prompt_text(example: Example) -> str:
    """The prompt without a chat template, whose length is what a task fits."""
    parts = (example.system, example.context, example.question)
    text = "\n\n".join(part for part in parts if part)
    return f"{text}\n{example.answer_prefix}" if example.answer_prefix else text


def fit(
    task: str, builds: Sequence[Build], count_tokens: CountTokens, length: int
) -> list[Example]:
    """Every example with the most filler that `length` tokens have room for.

    The result is the longest prompt that was seen to fit: at least `GOOD_SHARE` of `length`,
    or within one unit of it. About ten calls of `count_tokens` for each example.

    Args:
        task: Name of the task, for the message.
        builds: One per example.
        count_tokens: Length of a text in tokens.
        length: Most tokens of the prompt, as `prompt_text` writes it.

    Raises:
        ConfigError: A prompt is longer than `length` without any filler; it says the least.
    """
    bare = [count_tokens(prompt_text(build(0))) for build in builds]
    if bare and max(bare) > length:
        raise ConfigError(
            [
                f"the task {task} cannot be asked in {length} tokens: by this model's tokenizer it"
                f" takes at least {max(bare)}. Ask for longer prompts, or leave the task out"
            ]
        )
    return [
        build(_most_units(build, tokens, count_tokens, length))
        for build, tokens in zip(builds, bare, strict=True)
    ]


def _most_units(build: Build, bare_tokens: int, count_tokens: CountTokens, length: int) -> int:
    """Units of filler, by interpolation between what is known to fit and what does not.

    Args:
        build: Makes the example.
        bare_tokens: Length with no filler, in tokens; at most `length`.
        count_tokens: Length of a text in tokens.
        length: Most tokens.
    """
    fits, fits_tokens = 0, bare_tokens
    above: tuple[int, int] | None = None
    units = _PROBE_UNITS
    turn = 0
    while above is None or above[0] - fits > 1:
        tokens = count_tokens(prompt_text(build(units)))
        if tokens > length:
            above = units, tokens
        else:
            fits, fits_tokens = units, tokens
            if tokens >= GOOD_SHARE * length:
                break
        turn += 1
        if above is None:
            # Nothing is known to be too long yet: aim at `length`, at most 16 times as far.
            per_unit = max((fits_tokens - bare_tokens) / fits, 0.1)
            units = min(fits + max(1, int((length - fits_tokens) / per_unit)), 16 * fits)
        elif turn % 4 == 3:
            # A step of bisection now and then bounds the number of calls.
            units = (fits + above[0]) // 2
        else:
            share = (length - fits_tokens) / (above[1] - fits_tokens)
            units = fits + int(share * (above[0] - fits))
        if above is not None:
            units = min(max(units, fits + 1), above[0] - 1)
    return fits
