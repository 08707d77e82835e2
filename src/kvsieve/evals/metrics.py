"""Scorers: how an answer is judged against an example's references.

Each follows a published metric, named in its docstring with what is different here, and gives a
score in [0, 1] (most papers print it times 100). Where an example has several references and
nothing else is said, the best one counts. Scorers are pure: the same answer and example give the
same score anywhere, and none raises for an answer, whatever it says.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from decimal import Decimal

from kvsieve.evals.example import Example
from kvsieve.evals.overlap import characters_of, lcs_f1, normalise, token_f1, words_of

Scorer = Callable[[str, Example], float]
"""`score(answer, example)`, in [0, 1]."""


def contains_all(answer: str, example: Example) -> float:
    """The share of the references that the answer contains, whatever the case.

    RULER's `string_match_all` (needles, variables, common and frequent words), of one example.
    RULER turns control characters of an answer into line breaks first; no reference has any.
    """
    text = answer.lower()
    found = sum(reference.lower() in text for reference in example.references)
    return found / max(1, len(example.references))


def contains_any(answer: str, example: Example) -> float:
    """1 if the answer contains a reference, whatever the case.

    RULER's `string_match_part` (its question answering) and InfiniteBench's rule of En.Dia.
    """
    return float(contains_all(answer, example) > 0)


def starts_with(answer: str, example: Example) -> float:
    """1 if the answer, after white space, begins with a reference, whatever the case.

    No published metric: for answers that a prefix has begun, where what follows is free.
    """
    text = answer.lstrip().lower()
    return float(any(text.startswith(reference.lower()) for reference in example.references))


def prefix_choice(answer: str, example: Example) -> float:
    """1 if the first of `choices` that the answer names is a reference, whatever the case.

    No published metric. A choice counts where it stands as a word of its own; of two that begin
    at the same place, the longer one.
    """
    longest_first = sorted(filter(None, example.choices), key=len, reverse=True)
    if not longest_first:
        return 0.0
    named = "|".join(re.escape(choice.lower()) for choice in longest_first)
    found = re.search(rf"(?<!\w)(?:{named})(?!\w)", answer.lower())
    references = {reference.lower() for reference in example.references}
    return float(found is not None and found[0] in references)


def exact(answer: str, example: Example) -> float:
    """1 if the answer is a reference, both in SQuAD's normal form: SQuAD's exact match."""
    return _best(lambda reference: normalise(answer) == normalise(reference), example)


def f1(answer: str, example: Example) -> float:
    """F1 of words in SQuAD's normal form.

    LongBench's `qa_f1_score` and InfiniteBench's En.QA. SQuAD 2.0 differs where a text has no
    words left: it compares the texts, and these give 0.
    """
    words = normalise(answer).split()
    return _best(lambda reference: token_f1(words, normalise(reference).split()), example)


def f1_first_line(answer: str, example: Example) -> float:
    """F1 of the answer's first line: LongBench's triviaqa."""
    return f1(_first_line(answer), example)


def f1_zh(answer: str, example: Example) -> float:
    """F1 of Chinese characters: InfiniteBench's Zh.QA.

    LongBench's `qa_f1_zh_score` compares words that jieba cuts instead, so its figures are
    mostly lower. Punctuation is what Unicode calls so, rather than a list.
    """
    characters = characters_of(answer)
    return _best(lambda reference: token_f1(characters, characters_of(reference)), example)


def rouge_l(answer: str, example: Example) -> float:
    """ROUGE-L, as the package rouge-score computes it without a stemmer.

    LongBench uses the package `rouge`, which cuts sentences at full stops and counts distinct
    words only; InfiniteBench's En.Sum uses ROUGE-Lsum, which joins the lines' subsequences.
    Compare settings by it, not with those tables.
    """
    words = words_of(answer)
    return _best(lambda reference: lcs_f1(words, words_of(reference)), example)


def rouge_l_first_line(answer: str, example: Example) -> float:
    """ROUGE-L of the answer's first line: LongBench's samsum, with `rouge_l`'s difference."""
    return rouge_l(_first_line(answer), example)


def rouge_l_zh(answer: str, example: Example) -> float:
    """ROUGE-L of Chinese characters, where LongBench's dureader and vcsum have jieba's words."""
    characters = characters_of(answer)
    return _best(lambda reference: lcs_f1(characters, characters_of(reference)), example)


def classification(answer: str, example: Example) -> float:
    """One over the number of `choices` that the answer's first line names, if one is right.

    LongBench's `classification_score` (trec, lsht). A name that is a part of the right one does
    not count against it; as published, the name after one so dropped is not looked at. (The
    published code falls back on the most similar name, on a condition that is never met.)
    """
    line = _first_line(answer)
    named = [choice for choice in example.choices if choice in line]

    def share(reference: str) -> float:
        left = list(named)
        for place in range(len(left)):
            if place < len(left) and left[place] in reference and left[place] != reference:
                del left[place]
        return 1 / len(left) if reference in left else 0.0

    return _best(share, example)


def retrieval(answer: str, example: Example) -> float:
    """The share of the answer's numbers that are the one in the reference ("Paragraph 7").

    LongBench's `retrieval_score` and `retrieval_zh_score`.
    """

    def share(reference: str) -> float:
        number = re.search(r"\d+", reference)
        return _share_of_numbers(answer, number[0]) if number else 0.0

    return _best(share, example)


def count(answer: str, example: Example) -> float:
    """The share of the answer's numbers that are the reference: LongBench's `count_score`."""
    return _best(lambda reference: _share_of_numbers(answer, reference), example)


def code_sim(answer: str, example: Example) -> float:
    """Similarity of the answer's first line of code and the reference, in whole per cent.

    LongBench's `code_sim_score`: the first line without a backquote, "#" or "//". Its
    fuzzywuzzy takes the ratio from `difflib`, as here, unless python-Levenshtein is installed,
    which aligns the two lines in the best way and gives some more.
    """
    lines = answer.lstrip("\n").split("\n")
    code = (line for line in lines if not any(mark in line for mark in ("`", "#", "//")))
    line = next(code, "")
    return _best(
        lambda reference: round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100,
        example,
    )


def digits(answer: str, example: Example) -> float:
    """1 if the answer's first run of digits is a reference.

    InfiniteBench's Retrieve.PassKey and Retrieve.Number.
    """
    found = re.search(r"[0-9]+", answer)
    return float(found is not None and found[0] in example.references)


def kv(answer: str, example: Example) -> float:
    """1 if a reference is one of the answer's words, with the marks of JSON for spaces.

    InfiniteBench's Retrieve.KV.
    """
    words = re.split(r"[\s:\"'.,?!{}]+", answer)
    return float(any(reference in words for reference in example.references))


def option(answer: str, example: Example) -> float:
    """1 if the first letter of an option that stands alone in the answer is a reference.

    The letters are `choices`, or A to D. MMLU compares the letters' probabilities instead, so
    that some option is always chosen. InfiniteBench's En.MC and Code.Debug also accept an
    option's text or look behind "answer is:" first. A sentence that begins with the article "A"
    chooses A, as with InfiniteBench.
    """
    letters = "|".join(map(re.escape, example.choices)) or "[A-D]"
    found = re.search(rf"(?<!\w)(?:{letters})(?!\w)", answer)
    return float(found is not None and found[0] in example.references)


def number(answer: str, example: Example) -> float:
    """1 if the answer's first number, whole or decimal and without its sign, is a reference.

    InfiniteBench's Math.Find, which fails on a decimal number where a whole one is right.
    """
    found = re.search(r"[0-9]+(?:\.[0-9]+)?", answer)
    return _best(lambda reference: found is not None and _same_number(found[0], reference), example)


def last_integer(answer: str, example: Example) -> float:
    """1 if the answer's last word is a whole number and a reference: InfiniteBench's Code.Run."""
    last = (re.sub(r"[.`'\":]", " ", answer).split() or [""])[-1]
    is_whole = re.fullmatch(r"[+-]?[0-9]+", last) is not None
    return _best(lambda reference: is_whole and _same_number(last, reference), example)


def number_list(answer: str, example: Example) -> float:
    """The share of the references that the answer's numbers agree with, up to the first error.

    InfiniteBench's Math.Calc: the references are one list, in order. As there, signs are lost.
    """
    agreed = 0
    for found, reference in zip(re.findall(r"[0-9]+", answer), example.references, strict=False):
        if not _same_number(found, reference):
            break
        agreed += 1
    return agreed / max(1, len(example.references))


SCORERS: dict[str, Scorer] = {
    scorer.__name__: scorer
    for scorer in (
        contains_all,
        contains_any,
        starts_with,
        prefix_choice,
        exact,
        f1,
        f1_first_line,
        f1_zh,
        rouge_l,
        rouge_l_first_line,
        rouge_l_zh,
        classification,
        retrieval,
        count,
        code_sim,
        digits,
        kv,
        option,
        number,
        last_integer,
        number_list,
    )
}
"""Every scorer by the name that `Example.scorer` has."""


def _best(score: Callable[[str], float], example: Example) -> float:
    """The best score that one of the references gives, or 0 without any."""
    return float(max(map(score, example.references), default=0.0))


def _first_line(answer: str) -> str:
    """What LongBench keeps of few-shot answers: the first line after leading line breaks."""
    return answer.lstrip("\n").split("\n")[0]


def _share_of_numbers(answer: str, right: str) -> float:
    numbers = re.findall(r"\d+", answer)
    return numbers.count(right) / len(numbers) if numbers else 0.0


def _same_number(found: str, reference: str) -> bool:
    """Whether two texts are the same decimal number; of any length, which `int` refuses."""
    try:
        return Decimal(found) == Decimal(reference)
    except ArithmeticError:
        return False
