"""The journal: what a run that broke off leaves, and what must not be gone on with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvsieve.core.errors import ConfigError
from kvsieve.evals.identity import identity, model_files
from kvsieve.evals.journal import FILE_NAME, Journal
from tests.unit.eval_parts import make_example, make_item, make_record

IDENTITY = {"model": "m", "seed": 0, "sieve": {"pool_size": 7}}
A, B = make_item("a"), make_item("b")


def write(folder: Path, *records: Any) -> Path:
    with Journal(folder, IDENTITY) as journal:
        journal.add(records)
    return folder / FILE_NAME


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    write(tmp_path / "new" / "folder", make_record(A), make_record(A, kv_budget="25%", sieved=True))
    with Journal(tmp_path / "new" / "folder", IDENTITY) as journal:
        assert len(journal) == 2
        full = journal.get(A, "snapkv", "full")
        assert full == make_record(A) and full.setting.is_full
        assert journal.get(A, "snapkv", "25%") and not journal.get(A, "snapkv", 25)
        assert not journal.get(A, "random", "full") and not journal.get(B, "snapkv", "full")


def test_budgets_and_tasks_are_added_to_a_journal(tmp_path: Path) -> None:
    path = write(tmp_path, make_record(A))
    before = path.read_text()
    other = make_item("recall/1", task="recall", example=None, forced_ids=(1,))
    write(tmp_path, make_record(A, kv_budget=256), make_record(other, nll=2.0, kl=0.0))
    assert path.read_text().startswith(before)
    with Journal(tmp_path, IDENTITY) as journal:
        assert len(journal) == 3 and journal.get(other, "snapkv", "full")


def test_a_namesake_is_another_item(tmp_path: Path) -> None:
    namesake = make_item("a", example=make_example(example_id="a", context="another text"))
    write(tmp_path, make_record(A))
    with Journal(tmp_path, IDENTITY) as journal:
        assert journal.get(namesake, "snapkv", "full") is None
        journal.add([make_record(namesake, score=0.5)])
    with Journal(tmp_path, IDENTITY) as journal:
        found = journal.get(namesake, "snapkv", "full")
        assert found and found.score == 0.5


@pytest.mark.parametrize(
    "answer", ["plain", "漢" * 20, "\u2028\u2029\x85\x0b\x1c\r\n\ufeff", "\x00"]
)
def test_answers_of_any_kind_survive(tmp_path: Path, answer: str) -> None:
    write(tmp_path, make_record(A, answer=answer))
    with Journal(tmp_path, IDENTITY) as journal:
        found = journal.get(A, "snapkv", "full")
        assert found and found.answer == answer


def test_a_killed_write_loses_that_record_and_no_other(tmp_path: Path) -> None:
    last = make_record(B, answer="漢字")
    path = write(tmp_path, make_record(A), last)
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        with Journal(tmp_path, IDENTITY) as journal:
            assert journal.get(A, "snapkv", "full")
            # Without its line feed the last line may be whole all the same.
            assert (journal.get(B, "snapkv", "full") is None) == (end < len(whole) - 1)
            journal.add([last])
        with Journal(tmp_path, IDENTITY) as journal:
            assert journal.get(A, "snapkv", "full") and journal.get(B, "snapkv", "full") == last


def test_another_runs_journal_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = write(tmp_path, make_record(A))
    before = path.read_bytes()
    with pytest.raises(ConfigError) as caught:
        Journal(tmp_path, {"model": "n", "seed": 0, "sieve": {"pool_size": 9}, "endpoint": None})
    advice, *differing = caught.value.reasons
    assert "of another run: name another folder (--out), or remove it" in advice
    assert differing == [
        "model was 'm' and is 'n'",
        "sieve was {'pool_size': 7} and is {'pool_size': 9}",
    ]
    assert path.read_bytes() == before
    # A refusal leaves no lock behind.
    write(tmp_path, make_record(B))


@pytest.mark.parametrize("content", [b"hello\n", b"[1]\n", b"\n", b"\xff\xfe", b'{"model": "m'])
def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(ConfigError, match="is no journal: name another folder"):
        Journal(tmp_path, IDENTITY)
    assert (tmp_path / FILE_NAME).read_bytes() == content


def test_an_empty_file_is_begun(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch()
    write(tmp_path, make_record(A))
    with Journal(tmp_path, IDENTITY) as journal:
        assert journal.get(A, "snapkv", "full")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dir" / FILE_NAME).mkdir(parents=True)
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "dir"):
        with pytest.raises(ConfigError, match="cannot write in"):
            Journal(folder, IDENTITY)


def test_a_full_disk_is_said_in_words(tmp_path: Path) -> None:
    with Journal(tmp_path, IDENTITY) as journal:
        own = journal._file
        journal._file = full = open("/dev/full", "a")  # noqa: SIM115
        with pytest.raises(ConfigError, match="No space left on device"):
            journal.add([make_record(A)])
        assert journal.get(A, "snapkv", "full") is None
        journal._file = own
        with pytest.raises(OSError, match="No space"):
            full.close()


def test_two_runs_cannot_write_into_one_folder(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from kvsieve.evals.journal import Journal\n"
        f"with Journal(Path({str(tmp_path)!r}), {IDENTITY!r}):\n"
        "    print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(os.environ),
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"open\n"
        with pytest.raises(ConfigError, match="another run is writing"):
            Journal(tmp_path, IDENTITY)
        other.kill()
    # The lock goes with the process, however it ends.
    write(tmp_path, make_record(A))


def run_of(**changes: Any) -> dict[str, Any]:
    run = {
        "model": "m",
        "model_files": None,
        "prompts": {"template_sha256": "t"},
        "seed": 0,
        "text_sha256": "x",
        "max_prompt_tokens": None,
        "sieve": {},
        "flags": [],
        "endpoint": None,
        "tasks": ["niah"],
        "count": 3,
    }
    return {**run, **changes}


BIRTH = {"versions": {"torch": "2"}, "source_sha256": "s", "date": "today"}


def test_what_may_be_added_later_is_not_part_of_a_runs_identity() -> None:
    base = identity(run_of(), BIRTH)
    assert base == identity(run_of(tasks=["recall"], count=9), {**BIRTH, "date": "tomorrow"})
    for changed in (
        run_of(model="n"),
        run_of(model_files="ab"),
        run_of(prompts={"template_sha256": "u"}),
        run_of(max_prompt_tokens=64),
        run_of(sieve={"pool_size": 9}),
        run_of(endpoint="http://x"),
    ):
        assert identity(changed, BIRTH) != base
    assert identity(run_of(), {**BIRTH, "source_sha256": "r"}) != base
    assert json.loads(json.dumps(base)) == base


def test_an_overwritten_checkpoint_is_another_model(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3_000_000))
    (tmp_path / "config.json").write_text("{}")
    before = model_files(str(tmp_path))
    weights.touch()
    assert model_files(str(tmp_path)) == before
    weights.write_bytes(bytes(2_999_999) + b"\1")
    assert model_files(str(tmp_path)) != before
    assert model_files("some/name") is None


def test_a_run_without_an_answer_leaves_its_folder_free(tmp_path: Path) -> None:
    Journal(tmp_path, IDENTITY).__exit__(None, None, None)
    with Journal(tmp_path, {**IDENTITY, "seed": 1}) as journal:
        journal.add([make_record(A)])
    with Journal(tmp_path, {**IDENTITY, "seed": 1}) as journal:
        assert len(journal) == 1
    with pytest.raises(ConfigError, match="of another run"):
        Journal(tmp_path, IDENTITY)
