"""Users' files: every malformed line told at once, draws that nest, any bytes at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsieve.core.errors import ConfigError
from kvsieve.evals.example import Example
from kvsieve.evals.files import FORMATS, Limits
from kvsieve.evals.files.draw import Draw
from kvsieve.evals.files.problems import SHOWN
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

fuzz = settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


def test_byte_order_marks_crlf_and_blank_lines_change_nothing(tmp_path: Path) -> None:
    lines = [json.dumps(longbench_record(context=f"é {i}"), ensure_ascii=False) for i in range(3)]
    plain = tmp_path / "a" / "hotpotqa.jsonl"
    other = tmp_path / "b" / "hotpotqa.jsonl"
    for path, text, encoding in (
        (plain, "\n".join(lines), "utf-8"),
        (other, "\r\n".join(lines) + "\r\n  \r\n\r\n", "utf-8-sig"),
    ):
        path.parent.mkdir()
        path.write_bytes(text.encode(encoding))

    first, second = load("longbench", plain.parent), load("longbench", other.parent)

    assert first == second and len(first) == 3
    # A folder's own name is no part of the ids; a file's folder is, when it is given alone.
    assert load("longbench", other)[0].example_id == "longbench/b/hotpotqa/1"


def test_lines_that_are_no_record_are_told_together(tmp_path: Path) -> None:
    path = tmp_path / "hotpotqa.jsonl"
    good = json.dumps(longbench_record()).encode()
    path.write_bytes(
        b"\n".join(
            [
                good,
                b"{",
                b"[1]",
                b"",
                b'{"a": "\xff"}',
                json.dumps(longbench_record(context="\ud800")).encode(),
                b"[" * 100_000,
                json.dumps(longbench_record(answers=[], context=..., input=3)).encode(),
                good + b" " * 3000,
            ]
        )
    )

    reasons = reasons_of("longbench", path, limits=Limits(line_bytes=200_000))
    wanted = [
        "line 2: not JSON: ",
        "line 3: holds a list; each line must be one JSON object",
        "line 5: not UTF-8: byte 0xff at place 8; save the file as UTF-8",
        "line 6: a text holds half of a surrogate pair, which is no character",
        "line 7: not readable as JSON: ",
        "line 8: `answers` is empty, `context` is missing, `input` is a number, not a text",
    ]
    assert len(reasons) == len(wanted)
    for reason, words in zip(reasons, wanted, strict=True):
        assert reason.startswith(f"{path}, {words}")

    limited = reasons_of("longbench", path, limits=Limits(line_bytes=2048))
    assert f"{path}, line 7: longer than 0.00195312 MiB" in limited
    assert f"{path}, line 9: longer than 0.00195312 MiB" in limited


def test_ten_reasons_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "hotpotqa.jsonl", [longbench_record(answers=3.5)] * 3 + [{}] * 40)
    reasons = reasons_of("longbench", path)

    assert len(reasons) == SHOWN + 1
    assert reasons[-1] == "and 30 more, in these files, not shown"


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_holds_nothing_is_refused(name: str, tmp_path: Path) -> None:
    assert "there is no such file or folder" in reasons_of(name, tmp_path / "none")[0]
    assert "there is no" in reasons_of(name, tmp_path)[0]
    empty = tmp_path / ("law.csv" if name == "mmlu" else "vt.jsonl" if name == "ruler" else "x")
    if name == "infinitebench":
        empty = tmp_path / "passkey.jsonl"
    empty.write_text("\n \n")
    (tmp_path / "._resource.jsonl").write_bytes(b"\x00\x05")
    assert "only an empty file or blank lines" in reasons_of(name, empty)[0]


def test_utf_16_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hotpotqa.jsonl"
    path.write_text(json.dumps(longbench_record()), encoding="utf-16")

    assert reasons_of("longbench", path) == (f"{path}: it is in UTF-16; save it as UTF-8",)


@given(st.sets(st.text(max_size=5), max_size=30), st.integers(0, 30), st.integers(0, 9))
def test_a_smaller_draw_is_a_part_of_a_larger_one(keys: set[str], count: int, seed: int) -> None:
    drawn = {}
    for size in (count, count + 1, None):
        draw: Draw[str] = Draw(size, seed)
        for key in sorted(keys):
            draw.offer(key, key)
        drawn[size] = draw.items()

    assert drawn[None] == sorted(keys)
    assert len(drawn[count]) == min(count, len(keys))
    assert set(drawn[count]) <= set(drawn[count + 1]) and drawn[count] == sorted(drawn[count])


def test_the_draw_is_seeded_and_per_file(tmp_path: Path) -> None:
    for dataset in ("hotpotqa", "qasper"):
        records = [longbench_record(dataset=dataset, context=f"text {i}") for i in range(40)]
        write(tmp_path / f"{dataset}.jsonl", records)

    drawn = {seed: load("longbench", tmp_path, count=5, seed=seed) for seed in (0, 1)}
    everything = load("longbench", tmp_path)

    assert drawn[0] == load("longbench", tmp_path, count=5, seed=0)
    assert drawn[0] != drawn[1]
    assert [example for example in everything if example in drawn[0]] == drawn[0]
    assert [example.task for example in drawn[0]] == ["longbench/hotpotqa"] * 5 + [
        "longbench/qasper"
    ] * 5
    assert len({example.example_id for example in everything}) == 80


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
whole_of = {
    "longbench": longbench_record(dataset="trec", all_classes=["a", "b"]),
    "infinitebench": infinite_record(answer=["bee"], options=["ant", "bee", "cat", "dog"]),
    "ruler": ruler_record(answer_prefix=" It is"),
}
files_of = {"longbench": "trec", "infinitebench": "code_debug", "ruler": "qa_1"}


def outcome_of(name: str, path: Path) -> tuple[list[Example], tuple[str, ...]]:
    """The examples of a file, or the reasons why it has none; any other error is one of ours."""
    try:
        return load(name, path), ()
    except ConfigError as error:
        return [], error.reasons


def is_whole(example: Example) -> bool:
    """An example that a runner can send and a scorer can judge."""
    example_text = f"{prompt_of(example)}{example.answer_prefix}{example.references}"
    return bool(
        example_text.encode()
        and example.context.strip()
        and any(reference.strip() for reference in example.references)
        and example.max_tokens >= 1
        and 0 <= SCORERS[example.scorer]("7 A", example) <= 1
    )


@pytest.mark.parametrize("name", sorted(whole_of))
@fuzz
@given(st.data())
def test_any_record_is_an_example_or_a_reason(name: str, tmp_path: Path, data: Any) -> None:
    changes = st.fixed_dictionaries({}, optional=dict.fromkeys(whole_of[name], values))
    records = [{**whole_of[name], **drawn} for drawn in data.draw(st.lists(changes | st.just({})))]
    path = write(tmp_path / f"{files_of[name]}.jsonl", records)
    examples, reasons = outcome_of(name, path)

    assert bool(examples) != bool(reasons)
    assert all(str(path) in reason for reason in reasons[:SHOWN])
    if examples:
        assert len(examples) == len(records)
        assert all(map(is_whole, examples))


@pytest.mark.parametrize("name", sorted(FORMATS))
@fuzz
@given(raw=st.binary(max_size=60) | st.text('{}[]",:\n\\ud8A', max_size=40).map(str.encode))
def test_any_bytes_are_examples_or_reasons(name: str, tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / f"{files_of.get(name, 'law')}.{'csv' if name == 'mmlu' else 'jsonl'}"
    path.write_bytes(raw)
    examples, reasons = outcome_of(name, path)

    assert bool(examples) != bool(reasons)
    assert all(map(is_whole, examples))
