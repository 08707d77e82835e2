"""Cases: what is read, where it is compressed, and what is judged after that."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvsieve.evals.prompts import PromptMaker
from kvsieve.evals.tasks import TASKS
from kvsieve.evals.tasks.haystack import hide, spread_depths

CONTINUATION = 33
"""Tokens of real text that are forced: 32 predictions on the sieved cache."""

PASSAGE, CUE, RECALLED = 160, 16, 65
"""Of a recall: the passage that comes twice, what begins its second copy, what is judged."""

HELD_OUT_FILLER = (
    "Snow lay on the roof of the mill.",
    "Two dogs slept beside the gate.",
    "The train left at a quarter past nine.",
    "Somebody had painted the fence green.",
)

HELD_OUT_THINGS = (
    *("Lisbon", "Oslo", "Nairobi", "Lima", "Quebec", "Jakarta", "Vienna", "Dublin"),
    *("Havana", "Athens", "Seoul", "Tunis", "Warsaw", "Ankara", "Geneva", "Bogota"),
    *("Manila", "Prague", "Cairo", "Riga", "Delhi", "Perth", "Boston", "Kyoto"),
)


When = Literal["context", "question", "prefix"]
"""After what a prompt is compressed: the context, the question too, or the answer's first words
as well (they are part of RULER's prompts; a chat's user writes none)."""


@dataclass(frozen=True)
class Case:
    """One prompt with what is forced after it.

    Attributes:
        case_id: Unique.
        task: What results are summed by, such as "needle/1024".
        ids: All tokens.
        cut: Tokens that are compressed.
        judged_from: First token whose prediction is judged; where it is `cut`, its own
            prediction comes from full KV in any case, and only later ones count.
    """

    case_id: str
    task: str
    ids: tuple[int, ...]
    cut: int
    judged_from: int

    @property
    def sha256(self) -> str:
        """What is read, as a hash; the same wherever it is cut."""
        return hashlib.sha256(repr((self.ids, self.judged_from)).encode()).hexdigest()


def plain_text(path: Path) -> str:
    """A text file with lines joined to paragraphs."""
    paragraphs = re.split(r"\n\s*\n", path.read_text(encoding="utf-8", errors="ignore"))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def search_cases(
    maker: PromptMaker, *, lengths: Sequence[int], count: int, seed: int, when: When
) -> Iterator[Case]:
    """Needles of the three easy kinds, as `kvsieve eval` makes them."""
    for length in lengths:
        for name in ("niah", "niah_essay", "niah_multikey"):
            # A run of 11 examples goes through the depths once.
            examples = TASKS[name].generate(maker.count_tokens, length, count, seed)
            for number, example in enumerate(examples):
                yield _needle(
                    maker,
                    f"{name}/{length}/{_style(maker, when)}/{seed}/{number}",
                    name,
                    example.context,
                    example.question,
                    example.answer_prefix,
                    example.references[0],
                    when,
                )


def held_out_cases(
    maker: PromptMaker,
    text: str,
    *,
    lengths: Sequence[int],
    count: int,
    seed: int,
    when: When,
) -> Iterator[Case]:
    """Needles of the same kinds with another haystack, other sentences and other words."""
    sentences = re.split(r"(?<=[.?!]) +(?=[A-Z])", " ".join(text.split()))
    for length in lengths:
        for name, keys in (("niah", 1), ("niah_essay", 1), ("niah_multikey", 4)):
            for number, depth in enumerate(spread_depths(count)):
                rng = random.Random(f"held out/{name}/{length}/{seed}/{number}")
                things = rng.sample(HELD_OUT_THINGS, keys)
                values = [str(rng.randrange(10**6, 10**7)) for _ in things]
                depths = [depth, *(rng.random() for _ in things[1:])]
                needles = [
                    (at, f"One of the special magic numbers for {thing} is: {value}.")
                    for at, thing, value in zip(depths, things, values, strict=True)
                ]
                start = rng.randrange(len(sentences) // 2)
                hay = HELD_OUT_FILLER * 400 if name == "niah" else sentences[start:]
                context = _fitted(maker, needles, hay, length - 60)
                yield _needle(
                    maker,
                    f"{name}/{length}/{_style(maker, when)}/{seed}/{number}",
                    name,
                    "Some special magic numbers are hidden within the following text. Make sure to"
                    f" memorize them. You will be quizzed about them afterwards.\n\n{context}",
                    f"What is the special magic number for {things[0]} mentioned in the provided"
                    " text?",
                    f"The special magic number for {things[0]} mentioned in the provided text is",
                    values[0],
                    when,
                )


def text_cases(
    maker: PromptMaker,
    text: str,
    *,
    lengths: Sequence[int],
    count: int,
    seed: int,
    when: When,
) -> Iterator[Case]:
    """Real text and its continuation, and passages that come twice."""
    ids = maker.encode(text)
    for length in lengths:
        rng = random.Random(f"text/{length}/{seed}")
        for number in range(count):
            at = rng.randrange(len(ids) - length - 400)
            piece = ids[at : at + length + CONTINUATION]
            yield Case(f"text/{length}/{seed}/{number}", "text", tuple(piece), length, length)
        for number in range(count):
            at = rng.randrange(len(ids) - length - 400)
            passage, rest = ids[at : at + PASSAGE], ids[at + PASSAGE :]
            gap = rest[: length - PASSAGE - CUE]
            again = passage[: CUE + RECALLED]
            end = length - CUE if when == "context" else length
            yield Case(
                f"recall/{length}/{seed}/{number}",
                "recall",
                (*passage, *gap, *again),
                end,
                length,
            )


def _fitted(maker: PromptMaker, needles: list[Any], hay: Sequence[str], length: int) -> str:
    low, high = 1, len(hay)
    while low < high:
        middle = (low + high + 1) // 2
        if maker.count_tokens(hide(needles, hay[:middle])) <= length:
            low = middle
        else:
            high = middle - 1
    return hide(needles, hay[:low])


def _needle(
    maker: PromptMaker,
    case_id: str,
    task: str,
    context: str,
    question: str,
    prefix: str,
    value: str,
    when: When,
) -> Case:
    if maker.chat:
        mark = "<<context>>"
        templated = maker.tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{mark}\n\n{question}"}],
            tokenize=False,
            add_generation_prompt=True,
        )
        before, after = templated.split(mark)
        context, tail = before + context, after + prefix
    else:
        tail = f"\n\n{question}\n{prefix}"
    # Split at every place where a prompt may be cut, so that all of them read the same tokens.
    asked = tail.removesuffix(prefix)
    pieces = [maker.encode(piece) for piece in (context, asked, prefix, f" {value}")]
    ends = list(itertools.accumulate(map(len, pieces)))
    cut = ends[{"context": 0, "question": 1, "prefix": 2}[when]]
    return Case(case_id, task, tuple(itertools.chain(*pieces)), cut, ends[2])


def _style(maker: PromptMaker, when: When) -> str:
    style = "chat" if maker.chat else "raw"
    return f"{style}-open" if when == "question" else style
