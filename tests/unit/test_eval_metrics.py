"""Scorers: worked examples of the published definitions, and what holds for any answer."""

from __future__ import annotations

import difflib
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.evals.example import Example
from kvsieve.evals.metrics import SCORERS
from kvsieve.evals.overlap import longest_common_subsequence, normalise


def example(*references: str, choices: tuple[str, ...] = (), scorer: str = "exact") -> Example:
    return Example("id", "task", "context", "question", references, scorer, 8, choices=choices)


# From LongBench's trec: a class whose name is a part of another's.
CLASSES = ("Description of something", "Other entity", "Other number", "number")

# Worked by hand from the published definitions.
CASES = [
    # RULER: the share of needles found, whatever the case.
    ("contains_all", "they are 12 and ABC.", ("12", "abc", "77", "9"), 2 / 4),
    ("contains_all", "", ("12",), 0.0),
    ("contains_any", "It is paris, France", ("London", "Paris"), 1.0),
    ("contains_any", "It is Rome", ("London", "Paris"), 0.0),
    ("starts_with", "\n 4711 and so on", ("4711",), 1.0),
    ("starts_with", "the 4711", ("4711",), 0.0),
    # SQuAD: lower case, no punctuation, no articles.
    ("exact", "The  Cat, sat.", ("a cat sat",), 1.0),
    ("exact", "cat sits", ("a cat sat", "cat sits!"), 1.0),
    ("exact", "the cats", ("cat",), 0.0),
    # precision 2/4, recall 2/3: 2 * (1/2 * 2/3) / (1/2 + 2/3) = 4/7.
    ("f1", "The big red cat sat.", ("cat sat down",), 4 / 7),
    ("f1", "cat cat cat", ("cat", "cat cat dog"), 2 / 3),
    ("f1", "nothing shared", ("else",), 0.0),
    ("f1", "a the!", ("the",), 0.0),
    ("f1", "one\ntwo", ("one",), 2 / 3),
    ("f1_first_line", "\n\none\ntwo", ("one",), 1.0),
    # One character one token: 3 shared of 4 and of 5 (the stop and the space do not count).
    ("f1_zh", "北京大学。", ("北京 大城市",), 2 * 3 / 9),
    ("f1_zh", "《北京》、", ("北京",), 1.0),
    # Longest common subsequence "the cat the mat" of 6 and 5 words: 2 * 4 / 11.
    ("rouge_l", "The cat sat on the mat.", ("the cat, is the mat",), 8 / 11),
    ("rouge_l", "b a", ("a b",), 1 / 2),
    ("rouge_l", "", ("a",), 0.0),
    ("rouge_l_first_line", "\nSam left.\nDialogue: more", ("Sam left",), 1.0),
    ("rouge_l_zh", "今天开会讨论", ("今天讨论",), 2 * 4 / 10),
    # LongBench's passage retrieval and count: wrong numbers dilute a right one.
    ("retrieval", "Paragraph 7", ("Paragraph 7",), 1.0),
    ("retrieval", "It is Paragraph 7 or 8, not 17", ("Paragraph 7",), 1 / 3),
    ("retrieval", "段落12", ("段落12",), 1.0),
    ("retrieval", "seven", ("Paragraph 7",), 0.0),
    ("count", "There are 5 of 5, or 4", ("5",), 2 / 3),
    ("count", "none", ("5",), 0.0),
    # LongBench's code: the first line that is no comment, in whole per cent.
    ("code_sim", "\n# note\n// more\n```\nreturn x\nrest", ("return x",), 1.0),
    ("code_sim", "abcd", ("bcde",), 0.75),
    ("code_sim", "abc", ("abd",), 0.67),
    ("code_sim", "# only a note", ("x",), 0.0),
    # InfiniteBench.
    ("digits", "The pass key is 71432. 5", ("71432",), 1.0),
    ("digits", "5 and 71432", ("71432",), 0.0),
    ("digits", "171432", ("71432",), 0.0),
    ("kv", '{"key": "c73b-5a"}', ("c73b-5a",), 1.0),
    ("kv", "xc73b-5a", ("c73b-5a",), 0.0),
    ("number", "It is 12.50, not 3", ("12.5",), 1.0),
    ("number", "007", ("7",), 1.0),
    ("number", "3 or 7", ("7",), 0.0),
    ("number", "none", ("7",), 0.0),
    ("last_integer", "f(3) is: '-10'.", ("-10",), 1.0),
    ("last_integer", "-10 it is", ("-10",), 0.0),
    ("last_integer", "...", ("3",), 0.0),
    ("number_list", "[1, 4, 9, 8]", ("1", "4", "8", "8"), 2 / 4),
    ("number_list", "1", ("1", "4"), 1 / 2),
    ("number_list", "[5, -3]", ("5", "-3"), 1 / 2),
]


@pytest.mark.parametrize(("scorer", "answer", "references", "expected"), CASES)
def test_worked_examples(
    scorer: str, answer: str, references: tuple[str, ...], expected: float
) -> None:
    assert SCORERS[scorer](answer, example(*references)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("Other number", "Other number", 1.0),  # "number" is a part of it and does not count
        ("\nOther number\nOther entity", "Other number", 1.0),
        ("Other number or Other entity", "Other number", 1 / 2),
        ("Other entity", "Other number", 0.0),
        ("Other number", "number", 1 / 2),
        ("something else", "number", 0.0),
    ],
)
def test_classes_share_the_point(answer: str, reference: str, expected: float) -> None:
    assert SCORERS["classification"](answer, example(reference, choices=CLASSES)) == expected


def test_the_class_after_a_dropped_one_is_not_looked_at() -> None:
    # Both parts of the right name are named; LongBench drops the first and passes the second.
    choices = ("human", "being", "human being")

    assert SCORERS["classification"]("human being", example("human being", choices=choices)) == 0.5


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        (" B", "B", 1.0),
        ("The answer is (C).", "C", 1.0),
        ("Because of D", "B", 0.0),
        ("b", "B", 0.0),
        ("A dog, so B", "B", 0.0),  # as with InfiniteBench: the article is option A
        ("E", "E", 0.0),
        ("", "A", 0.0),
    ],
)
def test_the_first_letter_that_stands_alone_is_the_option(answer, reference, expected) -> None:
    assert SCORERS["option"](answer, example(reference)) == expected
    assert SCORERS["option"](answer, example(reference, choices=tuple("ABCD"))) == expected


def test_options_may_have_other_letters() -> None:
    assert SCORERS["option"]("E", example("E", choices=tuple("ABCDE"))) == 1
    assert SCORERS["option"]("C, then A", example("A", choices=tuple("AB"))) == 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Yes, it is not", 1.0),
        ("I know: no", 0.0),
        ("know; then yes", 1.0),
        ("not yes", 1.0),
        ("", 0.0),
    ],
)
def test_the_first_choice_named_counts(answer: str, expected: float) -> None:
    assert SCORERS["prefix_choice"](answer, example("yes", choices=("no", "yes"))) == expected


def test_of_two_choices_at_one_place_the_longer_is_named() -> None:
    choices = ("light", "light blue")

    assert SCORERS["prefix_choice"]("Light blue.", example("light blue", choices=choices)) == 1
    assert SCORERS["prefix_choice"]("light bluer", example("light", choices=choices)) == 1


texts = st.text(max_size=40) | st.text("aA1.7-#\n Paragh 段落北", max_size=40)


@pytest.mark.parametrize("name", sorted(SCORERS))
@settings(max_examples=40)
@given(texts, st.lists(texts, max_size=4), st.lists(texts, max_size=4))
def test_any_answer_has_a_score(name: str, answer: str, references: list, choices: list) -> None:
    asked = example(*references, choices=tuple(choices))
    score = SCORERS[name](answer, asked)

    assert isinstance(score, float) and 0 <= score <= 1
    assert SCORERS[name](answer, asked) == score
    if not references:
        assert score == 0


# Not those that share the point among references, or read them as one list.
BEST_OF = sorted(SCORERS.keys() - {"contains_all", "number_list"})


@pytest.mark.parametrize("name", BEST_OF)
@settings(max_examples=40)
@given(texts, st.lists(texts, min_size=1, max_size=4), st.lists(texts, max_size=4))
def test_the_best_reference_counts(name: str, answer: str, references: list, choices: list) -> None:
    separately = [
        SCORERS[name](answer, example(reference, choices=tuple(choices)))
        for reference in references
    ]

    assert SCORERS[name](answer, example(*references, choices=tuple(choices))) == max(separately)


@given(st.text("ab", max_size=9), st.text("abc", max_size=9))
def test_the_longest_common_subsequence_is_the_recursions(first: str, second: str) -> None:
    @cache
    def longest(i: int, j: int) -> int:
        if i == len(first) or j == len(second):
            return 0
        if first[i] == second[j]:
            return 1 + longest(i + 1, j + 1)
        return max(longest(i + 1, j), longest(i, j + 1))

    assert longest_common_subsequence(first, second) == longest(0, 0)
    assert longest_common_subsequence(second, first) == longest(0, 0)


@given(texts)
def test_the_normal_form_is_final(text: str) -> None:
    once = normalise(text)

    assert normalise(once) == once
    assert not {"a", "an", "the"} & set(once.split())
    assert "  " not in once and "." not in once


@given(st.text("abcdef =()", max_size=30), st.text("abcdef =()", min_size=1, max_size=30))
def test_code_is_compared_as_fuzzywuzzy_does(line: str, reference: str) -> None:
    ratio = difflib.SequenceMatcher(None, line, reference).ratio()

    assert SCORERS["code_sim"](line, example(reference)) == pytest.approx(ratio, abs=0.005001)
