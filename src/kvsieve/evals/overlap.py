"""How much two texts share: the token overlaps that published metrics are made of."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Hashable, Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """SQuAD's normal form: lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def words_of(text: str) -> list[str]:
    """The words that ROUGE compares: runs of a-z and 0-9, lower case, not stemmed."""
    return re.findall(r"[a-z0-9]+", text.lower())


def characters_of(text: str) -> list[str]:
    """The characters of a Chinese text, one token each: no spaces, punctuation or symbols."""
    return [
        character
        for character in text.lower()
        if not character.isspace() and unicodedata.category(character)[0] not in "PS"
    ]


def token_f1(answer: Sequence[Hashable], reference: Sequence[Hashable]) -> float:
    """Harmonic mean of precision and recall over the multiset of shared tokens."""
    shared = sum((Counter(answer) & Counter(reference)).values())
    return _f1(shared, len(answer), len(reference))


def lcs_f1(answer: Sequence[Hashable], reference: Sequence[Hashable]) -> float:
    """The same over the longest common subsequence: ROUGE-L of one sentence (Lin 2004)."""
    return _f1(longest_common_subsequence(answer, reference), len(answer), len(reference))


def longest_common_subsequence(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Length of the longest common subsequence, in tokens.

    Bit-parallel (Hyyrö 2004): one row of the usual table is one integer, so that summaries of
    some thousand words take milliseconds.
    """
    places: dict[Hashable, int] = {}
    for place, token in enumerate(first):
        places[token] = places.get(token, 0) | 1 << place
    full = (1 << len(first)) - 1
    row = full
    for token in second:
        matches = row & places.get(token, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(first) - row.bit_count()


def _f1(shared: int, answer: int, reference: int) -> float:
    """2 P R / (P + R), written so that it needs no special case but 0."""
    return 2 * shared / (answer + reference) if shared else 0.0
