"""The published formats of example files: what becomes of their fields, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve.evals.files import Limits
from kvsieve.evals.files.longbench import DATASETS, GENERIC
from kvsieve.evals.files.template import BETWEEN, Template
from kvsieve.evals.metrics import SCORERS
from tests.unit.eval_records import (
    infinite_record,
    load,
    longbench_record,
    prompt_of,
    reasons_of,
    ruler_record,
    write,
)

# --- LongBench


def test_longbench_without_its_prompts_is_asked_in_our_words(tmp_path: Path) -> None:
    [example] = load("longbench", write(tmp_path / "hotpotqa.jsonl", [longbench_record()]))

    assert example.context == "Ann came. Bob left."
    assert "Who came?" in example.question
    assert example.references == ("Ann", "Ann Lee")
    assert (example.task, example.scorer, example.max_tokens) == ("longbench/hotpotqa", "f1", 32)
    assert example.example_id == f"longbench/{tmp_path.name}/hotpotqa/1"
    assert example.tags == {"template": "generic", "words": 4, "language": "en", "id": "0f3a"}
    assert SCORERS[example.scorer]("Ann.", example) == 1


@pytest.mark.parametrize("place", ["data", "data/config", "config"])
def test_longbenchs_own_prompts_are_found_near_the_data(tmp_path: Path, place: str) -> None:
    data = write(tmp_path / "data" / "hotpotqa.jsonl", [longbench_record()])
    folder = tmp_path / place
    folder.mkdir(exist_ok=True)
    template = "Read.\n{context}\n\nNow: {input}\n{{Answer}}:"
    (folder / "dataset2prompt.json").write_text(
        json.dumps({"hotpotqa": template, "lcc": "{context}"})
    )
    (folder / "dataset2maxlen.json").write_text('{"hotpotqa": 99}', encoding="utf-8-sig")

    for given_path in (data, data.parent):
        [example] = load("longbench", given_path)
        assert example.context == "Read.\nAnn came. Bob left."
        assert example.question == "Now: Who came?\n{Answer}:"
        assert example.max_tokens == 99
        assert example.tags["template"] == "dataset2prompt.json"


names = st.sampled_from(["{context}", "{input}", "{language}", "\n", "\n\n", "a", "{{", "}}"])


@given(st.lists(names, max_size=6), st.lists(names, max_size=6), st.text("x\n", max_size=4))
def test_a_template_gives_its_own_text(before: list[str], after: list[str], question: str) -> None:
    rest = [piece for piece in (*before, "{context}", *after) if piece != "{context}"]
    rest.insert(len([piece for piece in before if piece != "{context}"]), "{context}")
    text = "".join(rest)
    fields = {"context": "long\n\ntext", "input": question, "language": "en"}
    context, asked = Template.parse(text).fill(fields)

    assert BETWEEN.join(part for part in (context, asked) if part) == text.format(**fields)
    if asked:
        assert context.endswith("long\n\ntext")


def test_every_longbench_set_has_a_scorer_and_a_prompt() -> None:
    assert len(DATASETS) == 21
    for dataset in DATASETS.values():
        assert dataset.scorer in SCORERS
        assert GENERIC[dataset.template].fields <= {"context", "input"}


def test_longbench_few_shot_is_not_cut_and_has_no_chat(tmp_path: Path) -> None:
    classes = ["Other number", "number"]
    record = longbench_record(dataset="trec", answers=["number"], all_classes=classes)
    [example] = load("longbench", write(tmp_path / "trec.jsonl", [record]))

    assert (example.context, example.question) == ("Ann came. Bob left.\nWho came?", "")
    assert example.choices == tuple(classes)
    assert example.tags["chat"] == "no"


@pytest.mark.parametrize("dataset", ["hotpotqa", "hotpotqa_e"])
def test_longbench_e_is_its_own_task(tmp_path: Path, dataset: str) -> None:
    records = [longbench_record(dataset=dataset, length=n) for n in (3999, 4000, 8000)]
    examples = load("longbench", write(tmp_path / "hotpotqa_e.jsonl", records))

    assert {example.task for example in examples} == {"longbench/hotpotqa_e"}
    assert {example.max_tokens for example in examples} == {32}
    assert [example.tags["interval"] for example in examples] == ["0-4k", "4-8k", "8k+"]


@pytest.mark.parametrize(
    ("changes", "scorer"),
    [({}, "f1"), ({"language": "zh"}, "f1_zh"), ({"all_classes": ["a", "b"]}, "classification")],
)
def test_a_set_of_the_users_own(tmp_path: Path, changes: dict[str, Any], scorer: str) -> None:
    record = longbench_record(dataset=..., **changes)
    [example] = load("longbench", write(tmp_path / "ours.jsonl", [record]))

    assert (example.task, example.scorer, example.max_tokens) == ("longbench/ours", scorer, 64)


def test_longbench_v2_is_refused_by_name(tmp_path: Path) -> None:
    record = {"_id": "1", "question": "?", "choice_A": "x", "answer": "A", "context": "y"}
    [reason] = reasons_of("longbench", write(tmp_path / "v2.jsonl", [record]))

    assert "LongBench v2" in reason


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ('{"hotpotqa": "no context"}', "{context} must stand in it once"),
        ('{"hotpotqa": "{context} {context}"}', "{context} must stand in it once"),
        ('{"hotpotqa": "{context.real}"}', "{context.real} is more than"),
        ('{"hotpotqa": "{context} {0}"}', "{0} is more than"),
        ('{"hotpotqa": "{context} {"}', "the prompt of hotpotqa cannot be used"),
        ('{"hotpotqa": "{context} {nowhere}"}', "`nowhere` is missing, which dataset2prompt"),
        ('{"hotpotqa": 3}', "hotpotqa is a number, where a text belongs"),
        ("[]", "it holds a list, where one JSON object belongs"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_prompts_that_cannot_be_used(tmp_path: Path, prompts: str, words: str) -> None:
    data = write(tmp_path / "hotpotqa.jsonl", [longbench_record()])
    write(tmp_path / "qasper.jsonl", [longbench_record(dataset="qasper")])
    (tmp_path / "dataset2prompt.json").write_text(prompts)

    [reason] = reasons_of("longbench", data.parent)

    assert words in reason


# --- InfiniteBench


def test_infinitebench_retrieval(tmp_path: Path) -> None:
    [example] = load("infinitebench", write(tmp_path / "passkey.jsonl", [infinite_record()]))

    assert example.task == "infinitebench/passkey"
    assert example.context == "x " * 9
    assert example.question == "Which?\nAnswer:"
    assert SCORERS[example.scorer](" 7. Not 8.", example) == 1


@pytest.mark.parametrize("answer", [["bee"], "bee", ["bee", "B"], ["B"]])
def test_infinitebench_options_become_letters(tmp_path: Path, answer: Any) -> None:
    record = infinite_record(answer=answer, options=["ant", "bee", "cat", "dog"])
    [example] = load("infinitebench", write(tmp_path / "longbook_choice_eng.jsonl", [record]))

    assert example.references == ("B",)
    assert "\nB. bee\n" in example.question
    assert SCORERS[example.scorer]("B", example) == 1


def test_infinitebench_numbers_may_be_nested_and_the_question_missing(tmp_path: Path) -> None:
    record = infinite_record(answer=[[1, 4, -2]], input=None)
    path = write(tmp_path / "math_calc.jsonl", [record])
    [example] = load("infinitebench", path, limits=Limits(answer_tokens=50))

    assert example.references == ("1", "4", "-2")
    assert example.question.endswith("Values:")
    assert example.max_tokens == 50
    assert load("infinitebench", path)[0].max_tokens == 30_000


@pytest.mark.parametrize(
    ("task", "changes", "words"),
    [
        ("passkey", {"context": " "}, "`context` is empty"),
        ("passkey", {"answer": None}, "`answer` is missing"),
        ("passkey", {"answer": [{}]}, "`answer` holds an object"),
        ("kv_retrieval", {"input": ""}, "`input` is empty"),
        ("math_find", {"answer": ["many"]}, "`answer` holds a text, where numbers belong"),
        ("math_find", {"answer": [float("nan")]}, "where numbers belong"),
        ("code_debug", {"options": ["f"]}, "`options` has 1 options, not 4"),
        ("code_debug", {"options": list("fghi")}, "`answer` is none of `options`"),
    ],
)
def test_infinitebench_refusals(tmp_path: Path, task: str, changes: dict, words: str) -> None:
    path = write(tmp_path / f"{task}.jsonl", [infinite_record(**changes)])

    [reason] = reasons_of("infinitebench", path)

    assert words in reason and f"{path}, line 1: " in reason


def test_infinitebench_files_have_a_tasks_name(tmp_path: Path) -> None:
    [reason] = reasons_of("infinitebench", write(tmp_path / "mine.jsonl", [infinite_record()]))

    assert "mine is none" in reason and "kv_retrieval" in reason


# --- RULER


@pytest.mark.parametrize(
    ("place", "task", "scorer", "max_tokens", "length"),
    [
        ("4096/data/niah_single_1/validation.jsonl", "niah_single_1", "contains_all", 128, 4096),
        ("vt.jsonl", "vt", "contains_all", 30, None),
        ("qa_2/validation.jsonl", "qa_2", "contains_any", 32, None),
    ],
)
def test_ruler(tmp_path: Path, place: str, task: str, scorer: str, max_tokens: int, length) -> None:
    write(tmp_path / "ruler" / place, [ruler_record()])
    [example] = load("ruler", tmp_path / "ruler")

    assert prompt_of(example) == "hay\nWhat is it?"
    assert (example.task, example.scorer) == (f"ruler/{task}", scorer)
    assert example.max_tokens == max_tokens
    assert example.tags.get("length") == length
    assert example.example_id == f"ruler/{place.removesuffix('.jsonl')}/1"


def test_an_answer_prefix_is_added_unless_the_input_ends_with_it(tmp_path: Path) -> None:
    prefix = " It is"
    records = [
        ruler_record(answer_prefix=prefix),
        ruler_record(input="hay\nWhat is it? It is", answer_prefix=prefix),
    ]
    apart, inside = load("ruler", write(tmp_path / "niah.jsonl", records))

    assert prompt_of(apart) + apart.answer_prefix == prompt_of(inside) + inside.answer_prefix
    assert (apart.answer_prefix, inside.answer_prefix) == (prefix, "")


def test_ruler_needs_a_tasks_name(tmp_path: Path) -> None:
    [reason] = reasons_of("ruler", write(tmp_path / "x" / "validation.jsonl", [ruler_record()]))

    assert "neither the file nor its folder" in reason


# --- MMLU


def mmlu(folder: Path, subject: str, *, tests: int, shots: int) -> None:
    for split, rows in (("test", tests), ("dev", shots)):
        (folder / split).mkdir(parents=True, exist_ok=True)
        lines = (f'"{split} {row}, which?",a{row},b,c,d,{"ABCD"[row % 4]}\n' for row in range(rows))
        (folder / split / f"{subject}_{split}.csv").write_text("".join(lines))


def test_mmlu_shows_five_questions_of_the_subject(tmp_path: Path) -> None:
    mmlu(tmp_path, "world_religions", tests=3, shots=7)
    examples = load("mmlu", tmp_path)
    example = examples[1]

    assert len(examples) == 3
    assert example.context.count("Answer: ") == 5
    assert "dev 4, which?\nA. a4\nB. b\nC. c\nD. d\nAnswer: A" in example.context
    assert "dev 5" not in example.context and "world religions" in example.context
    assert example.question == "test 1, which?\nA. a1\nB. b\nC. c\nD. d\nAnswer:"
    assert (example.references, example.tags["subject"]) == (("B",), "world_religions")
    assert example.example_id == "mmlu/world_religions/2"
    assert SCORERS[example.scorer](" B", example) == 1


def test_one_mmlu_file_is_asked_without_examples(tmp_path: Path) -> None:
    mmlu(tmp_path, "law", tests=2, shots=1)
    examples = load("mmlu", tmp_path / "test" / "law_test.csv")

    assert [example.tags["shots"] for example in examples] == [0, 0]
    assert load("mmlu", tmp_path, count=1)[0].example_id in {"mmlu/law/1", "mmlu/law/2"}


def test_the_count_is_of_all_mmlu_subjects_together(tmp_path: Path) -> None:
    for subject in ("law", "art"):
        mmlu(tmp_path, subject, tests=8, shots=1)

    assert len(load("mmlu", tmp_path, count=6)) == 6


def test_mmlu_refusals_come_together(tmp_path: Path) -> None:
    mmlu(tmp_path, "law", tests=1, shots=1)
    bad = tmp_path / "test" / "art_test.csv"
    bad.write_text("q,a,b,c,d,E\n\nq,a,b,c,B\n,a,b,c,d,A\n")
    (tmp_path / "test" / "bio_test.csv").write_text("\n")
    (tmp_path / "dev" / "bio_dev.csv").write_bytes(b"q,\xff,b,c,d,A\n")

    reasons = reasons_of("mmlu", tmp_path)

    assert [reason.rpartition("/")[2] for reason in reasons] == [
        "art_dev.csv: there is no such file, from which the examples would come",
        "art_test.csv, line 1: the answer is 'E', not one of A, B, C, D",
        "art_test.csv, line 3: 5 cells, not the 6 of question, A, B, C, D, answer",
        "art_test.csv, line 4: the question is empty",
        "bio_dev.csv: not UTF-8 (byte 0xff), after line 0; save the file as UTF-8",
        "bio_test.csv: it holds no questions, only an empty file or blank lines",
    ]


def test_mmlu_needs_its_two_folders(tmp_path: Path) -> None:
    assert ["`test`" in reason or "`dev`" in reason for reason in reasons_of("mmlu", tmp_path)] == [
        True,
        True,
    ]
