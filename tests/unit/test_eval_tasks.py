"""Generated tasks: they fit, they are sound, and they are the same everywhere."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvsieve.core.errors import KvsieveError
from kvsieve.evals.example import Example
from kvsieve.evals.metrics import SCORERS
from kvsieve.evals.tasks import TASKS, CountTokens
from kvsieve.evals.tasks.few_shot import KINDS, LABELS
from kvsieve.evals.tasks.fit import fit, prompt_text
from kvsieve.evals.tasks.frequent_words import MIN_WORDS, NOISE, word_counts
from kvsieve.evals.tasks.haystack import document_paragraphs, hide, prose, spread_depths
from kvsieve.evals.tasks.words import ADJECTIVES, NOUNS

NAMES = sorted(TASKS)
MIN_LENGTH = 260
"""Words in which every task can be asked."""

lengths = st.integers(MIN_LENGTH, 2000)
seeds = st.integers(0, 2**31)

# Tasks whose example says where in the prompt the answer stands, and what stands before it.
PLACED = {
    "niah": "",
    "niah_essay": "",
    "niah_multikey": "",
    "niah_uuid": "",
    "kv_retrieval": '"',
    "multi_turn": "",
    "second_question": "",
}
ONE_UNIT = 12
"""Words of the largest unit of filler: a needle with two UUIDs has 8, a sentence at most 7."""


def count_words(text: str) -> int:
    return len(text.split())


@cache
def byte_pairs() -> Tokenizer:
    """A byte-pair tokenizer such as models have (digits one by one), made from the document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    text = (sentence for paragraph in document_paragraphs() for sentence in paragraph)
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def count_byte_pairs(text: str) -> int:
    return len(byte_pairs().encode(text).ids)


def check_lengths(
    examples: list[Example], count_tokens: CountTokens, length: int, unit: int
) -> None:
    for example in examples:
        tokens = count_tokens(prompt_text(example))
        assert tokens <= length
        assert tokens >= min(0.97 * length, length - unit), example.example_id


def fingerprint(examples: list[Example]) -> str:
    return hashlib.sha256(repr(examples).encode()).hexdigest()


def test_a_task_stands_under_its_name() -> None:
    for name, task in TASKS.items():
        assert task.name == name and task.title
        assert 0 <= task.floor < 0.5


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(length=lengths, count=st.integers(1, 4), seed=seeds)
def test_examples_fit_and_are_distinct(name: str, length: int, count: int, seed: int) -> None:
    examples = TASKS[name].generate(count_words, length, count, seed)

    assert len(examples) == count
    check_lengths(examples, count_words, length, ONE_UNIT)
    assert len({example.example_id for example in examples}) == count
    assert len({prompt_text(example) for example in examples}) == count
    for example in examples:
        assert example.task == name
        assert example.tags["length"] == length
        assert example.example_id.startswith(f"{name}/{length}/")
        assert example.scorer in SCORERS
        assert example.references and len(set(example.references)) == len(example.references)
        assert example.answer_prefix == example.answer_prefix.rstrip()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=3, deadline=None)
@given(seed=seeds)
def test_the_right_answer_scores_1_and_an_empty_one_0(name: str, seed: int) -> None:
    for example in TASKS[name].generate(count_words, 400, 3, seed):
        score = SCORERS[example.scorer]
        assert score(f" {' '.join(example.references)}.", example) == 1
        assert score("", example) == 0


@pytest.mark.parametrize("name", NAMES)
def test_prompts_fit_by_a_byte_pair_tokenizer_in_few_calls(name: str) -> None:
    calls = 0

    def count_tokens(text: str) -> int:
        nonlocal calls
        calls += 1
        return count_byte_pairs(text)

    examples = TASKS[name].generate(count_tokens, 2048, 3, 1)

    assert calls / len(examples) < 20
    # A pair of UUIDs has at most 80 tokens by a tokenizer that takes every byte alone.
    check_lengths(examples, count_byte_pairs, 2048, 80)


@pytest.mark.long
def test_prompts_fit_by_the_tokenizer_of_the_demonstration_s_model() -> None:
    from transformers import AutoTokenizer

    from kvsieve.demo.model import find_gguf

    gguf = find_gguf()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    for task in TASKS.values():
        for length in (1024, 8000):
            check_lengths(task.generate(count_tokens, length, 3, 0), count_tokens, length, 80)


@pytest.mark.parametrize("name", NAMES)
def test_a_length_that_is_too_short_is_refused_with_the_least(name: str) -> None:
    with pytest.raises(KvsieveError, match=rf"the task {name} cannot be asked in 5 tok") as error:
        TASKS[name].generate(count_words, 5, 3, 0)
    least = re.search(r"at least (\d+)", str(error.value))
    assert least

    # The rest of a prompt is drawn by length, and may differ by a word or two.
    enough = int(least[1]) + 4
    examples = TASKS[name].generate(count_words, enough, 3, 0)
    assert all(count_words(prompt_text(example)) <= enough for example in examples)


def test_no_examples_is_no_error() -> None:
    for task in TASKS.values():
        assert task.generate(count_words, 1000, 0, 0) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_same_arguments_give_the_same_and_others_give_others(name: str) -> None:
    generate = TASKS[name].generate
    first = fingerprint(generate(count_words, 400, 2, 1))

    assert first == fingerprint(generate(count_words, 400, 2, 1))
    assert first != fingerprint(generate(count_words, 400, 2, 2))


def test_another_process_with_another_hash_seed_makes_the_same() -> None:
    code = (
        "import hashlib, json\n"
        "from kvsieve.evals.tasks import TASKS\n"
        "made = {name: TASKS[name].generate(lambda text: len(text.split()), 400, 3, 7)\n"
        "        for name in sorted(TASKS)}\n"
        "print(json.dumps({name: hashlib.sha256(repr(examples).encode()).hexdigest()\n"
        "                  for name, examples in made.items()}))\n"
    )
    here = {name: fingerprint(TASKS[name].generate(count_words, 400, 3, 7)) for name in NAMES}
    for hash_seed in ("1", "4711"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout) == here


@pytest.mark.parametrize("name", sorted(PLACED))
@settings(max_examples=5, deadline=None)
@given(length=st.integers(800, 2000), seed=seeds)
def test_the_depth_is_where_the_answer_stands(name: str, length: int, seed: int) -> None:
    examples = TASKS[name].generate(count_words, length, 11, seed)

    assert [example.tags["depth"] for example in examples] == [step / 10 for step in range(11)]
    for example in examples:
        # Before the haystack stands an instruction, set off by a blank line.
        hay = example.context.partition("\n\n")[2]
        (reference,) = example.references
        at = hay.index(PLACED[name] + reference) / (len(hay) - len(reference))
        # Half of the longest sentence, the needle's own words, and the other facts.
        assert at == pytest.approx(example.tags["depth"], abs=0.12)


@pytest.mark.parametrize("name", [*sorted(PLACED), "niah_multivalue", "niah_multiquery"])
@settings(max_examples=5, deadline=None)
@given(length=lengths, seed=seeds)
def test_what_is_asked_stands_in_the_context_once_and_nowhere_else(
    name: str, length: int, seed: int
) -> None:
    for example in TASKS[name].generate(count_words, length, 2, seed):
        rest = example.question + example.answer_prefix + example.after_sieve + example.system
        for reference in example.references:
            assert example.context.count(reference) == 1
            assert reference not in rest


def test_needles_by_kind() -> None:
    def values_by_key(name: str) -> dict[str, list[str]]:
        (example,) = TASKS[name].generate(count_words, 900, 1, 3)
        found: dict[str, list[str]] = {}
        for key, value in re.findall(r"The secret \w+ of ([\w -]+) is ([\w-]+)\.", example.context):
            found.setdefault(key, []).append(value)
        asked = [key for key in found if key in example.question]
        assert all(key in example.answer_prefix for key in asked)
        assert sorted(example.references) == sorted(value for key in asked for value in found[key])
        return found

    assert [len(values) for values in values_by_key("niah").values()] == [1]
    assert [len(values) for values in values_by_key("niah_essay").values()] == [1]
    assert [len(values) for values in values_by_key("niah_multikey").values()] == [1] * 4
    assert [len(values) for values in values_by_key("niah_multivalue").values()] == [4]
    assert [len(values) for values in values_by_key("niah_multiquery").values()] == [1] * 4
    assert len(values_by_key("niah_uuid")) > 50


@settings(max_examples=10, deadline=None)
@given(length=lengths, seed=seeds)
def test_variables_form_one_chain_in_order(length: int, seed: int) -> None:
    (example,) = TASKS["variable_tracking"].generate(count_words, length, 1, seed)

    known: dict[str, str] = {}
    for name, named, number in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))\.", example.context):
        known[name] = number or known[named]
    assert tuple(known) == example.references
    assert len(set(known.values())) == 1 and known[name] in example.question


@settings(max_examples=10, deadline=None)
@given(length=st.integers(MIN_LENGTH, 12_000), seed=seeds)
def test_common_words_are_ten_times_as_frequent(length: int, seed: int) -> None:
    (example,) = TASKS["common_words"].generate(count_words, length, 1, seed)

    counts = Counter(re.findall(r"\d+\. (\w+)", example.context))
    common = {counts.pop(word) for word in example.references}
    assert len(example.references) == 10 and len(common) == 1
    assert max(counts.values(), default=0) * 10 <= common.pop()


@settings(max_examples=10, deadline=None)
@given(length=lengths, seed=seeds)
def test_frequent_words_follow_the_noise(length: int, seed: int) -> None:
    (example,) = TASKS["frequent_words"].generate(count_words, length, 1, seed)

    ranked = Counter(example.context.partition("\n\n")[2].split()).most_common(5)
    assert [word for word, _ in ranked[:4]] == [NOISE, *example.references]
    assert all(more > less for (_, more), (_, less) in pairwise(ranked))


@given(st.integers(MIN_WORDS, 100_000))
def test_the_asked_words_are_never_tied(words: int) -> None:
    counts = [*word_counts(words), 0]

    assert counts[0] > counts[1] > counts[2] > counts[3] > counts[4]
    assert sum(counts) <= words


@settings(max_examples=10, deadline=None)
@given(length=lengths, seed=seeds)
def test_few_shots_explain_the_label_and_do_not_show_the_thing(length: int, seed: int) -> None:
    examples = TASKS["few_shot"].generate(count_words, length, 4, seed)

    kind_of = {thing: kind for kind, things in enumerate(KINDS) for thing in things}
    asked = {kind_of[example.question.rstrip(":")] for example in examples}
    assert asked == set(range(len(KINDS)))
    for example in examples:
        thing = example.question.rstrip(":")
        shots = re.findall(r"^(\w+): (\w+)$", example.context, re.MULTILINE)
        labels = {kind_of[shot]: label for shot, label in shots}
        assert thing not in dict(shots)
        assert all(labels[kind_of[shot]] == label for shot, label in shots)
        assert len(set(labels.values())) == len(KINDS)
        assert example.references == (labels[kind_of[thing]],)
        assert set(example.choices) == set(labels.values()) <= set(LABELS)


def test_json_of_kv_retrieval_holds_the_pair() -> None:
    for example in TASKS["kv_retrieval"].generate(count_words, 300, 3, 0):
        pairs = json.loads(example.context.partition("\n\n")[2])
        (key,) = [key for key in pairs if key in example.question]
        assert example.references == (pairs[key],)


def test_questions_of_a_conversation_are_about_different_facts() -> None:
    for name in ("multi_turn", "second_question"):
        for example in TASKS[name].generate(count_words, 600, 5, 0):
            text = prompt_text(example) + example.after_sieve
            facts = dict(re.findall(r"The ([\w ]+) is (\d{7})\.", example.context))
            first, second = re.findall(r"what is the ([\w ]+)\?", text)
            assert len(facts) == 4 and first != second
            # The first answer is in the conversation, and right; the second is what is wanted.
            assert f"The {first} is {facts[first]}." in text.removeprefix(example.context)
            assert example.references == (facts[second],)
            sees_it = name == "multi_turn"
            assert (f"what is the {second}?" in prompt_text(example)) is sees_it
            assert text.endswith(f"The {second} is")


def test_only_the_system_message_says_the_code_word() -> None:
    for example in TASKS["instruction"].generate(count_words, 600, 5, 0):
        (word,) = example.references
        assert f"Code word: {word}" in example.system
        assert "Code word" not in example.context + example.question + example.answer_prefix
        assert example.after_sieve.endswith("\nCode word:")


@given(st.integers(0, 6000), st.text(max_size=5))
@settings(max_examples=20, deadline=None)
def test_prose_has_as_many_words_as_wanted(words: int, seed: str) -> None:
    sentences = prose(words, seed)

    assert count_words(" ".join(sentences)) == words
    assert all(sentence == sentence.strip() and sentence for sentence in sentences)


def test_prose_is_the_whole_document_before_anything_comes_twice() -> None:
    sentences = [sentence for paragraph in document_paragraphs() for sentence in paragraph]
    words = count_words(" ".join(sentences))

    assert Counter(prose(words, "a")) == Counter(sentences)
    assert prose(words, "a") != prose(words, "b")


@given(
    st.lists(st.sampled_from(["a.", "bb bb.", "c" * 30 + "."]), max_size=30),
    st.lists(st.floats(0, 1), min_size=1, max_size=4),
)
def test_hiding_keeps_the_haystack_and_the_order_of_depths(
    hay: list[str], depths: list[float]
) -> None:
    needles = [(depth, f"<{index}>") for index, depth in enumerate(depths)]
    parts = re.findall(r"<\d>|[^<>]+?\.", hide(needles, hay))
    found = [part for part in parts if part.startswith("<")]

    assert [part.strip() for part in parts if part not in found] == hay
    assert found == [needle for _, needle in sorted(needles, key=lambda needle: needle[0])]
    total = sum(map(len, hay))
    for depth, needle in needles:
        before = [part for part in parts[: parts.index(needle)] if part not in found]
        place = sum(len(part.strip()) for part in before)
        assert abs(place - depth * total) <= max(map(len, hay), default=0) / 2


@given(st.integers(1, 100))
def test_depths_are_spread_from_end_to_end(count: int) -> None:
    depths = spread_depths(count)

    assert len(depths) == count
    if count > 1:
        assert min(depths) == 0 and max(depths) == 1
        times = Counter(depths).values()
        assert max(times) - min(times) <= 1


@settings(deadline=None)
@given(
    bare=st.integers(0, 50),
    unit=st.integers(1, 40),
    length=st.integers(50, 20_000),
    jitter=st.integers(0, 10),
)
def test_fitting_finds_the_most_units_in_few_calls(
    bare: int, unit: int, length: int, jitter: int
) -> None:
    """Also where units differ in length."""
    calls = 0

    def tokens_of(units: int) -> int:
        return bare + unit * units + units * units % (jitter + 1)

    def build(units: int) -> Example:
        return Example(str(units), "t", str(tokens_of(units)), "", ("a",), "exact", 1)

    def count_tokens(text: str) -> int:
        nonlocal calls
        calls += 1
        return int(text)

    (example,) = fit("t", [build], count_tokens, length)

    tokens = tokens_of(int(example.example_id))
    assert tokens <= length
    assert tokens >= min(0.99 * length, length - unit - jitter)
    assert calls < 30


def test_words_are_distinct_and_plain() -> None:
    for words in (ADJECTIVES, NOUNS, *KINDS, LABELS):
        assert len(set(words)) == len(words)
        assert all(word.isalnum() for word in words)
    everything = [thing for kind in KINDS for thing in kind]
    assert len(set(everything)) == len(everything)
    assert not set(ADJECTIVES) & set(NOUNS)
