"""From examples to tokens: raw and in a chat template, whole and cut, by several tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsieve.core.errors import ConfigError
from kvsieve.evals.example import Example
from kvsieve.evals.passages import DOCUMENT, PASSAGE_TASKS
from kvsieve.evals.prompts import PromptMaker
from kvsieve.evals.tasks import TASKS
from kvsieve.evals.workload import DEFAULT_TASKS, Wanted, check_wanted, floors, make_items
from tests.unit.eval_parts import DROPS_SYSTEM, NO_SYSTEM, make_example, make_item, save_tokenizer

BOS, EOS = 0, 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def raw(folder: str) -> PromptMaker:
    return PromptMaker(folder, chat=False)


@pytest.fixture(scope="module")
def chat(folder: str) -> PromptMaker:
    return PromptMaker(folder, chat=True)


def text_of(maker: PromptMaker, example: Example) -> str:
    return str(maker.tokenizer.decode(list(maker.item(example).prompt_ids)))


def test_a_raw_prompt_is_its_parts_in_order(raw: PromptMaker) -> None:
    example = make_example(system="Be brief.", context="C", question="Q?", answer_prefix="A:")
    assert text_of(raw, example) == "Be brief.\n\nC\n\nQ?\nA:"
    assert text_of(raw, make_example(context="C", question="", answer_prefix="")) == "C"
    assert text_of(raw, make_example(context="C", question="Q", answer_prefix=" A")) == "C\n\nQ A"


def test_a_chat_prompt_is_in_the_template(chat: PromptMaker) -> None:
    example = make_example(system="Be brief.", context="C", question="Q?", answer_prefix="A:")
    assert text_of(chat, example) == "<|system|>Be brief.</s><|user|>C\n\nQ?</s><|assistant|>A:"
    item = chat.item(example)
    # The template's marks are tokens, and not their letters.
    assert item.prompt_ids[0] == 2 and EOS in item.prompt_ids


def test_a_published_set_without_template_stays_raw(chat: PromptMaker) -> None:
    example = make_example(context="C", question="Q", answer_prefix="A", tags={"chat": "no"})
    assert text_of(chat, example) == "C\n\nQ\nA"


@pytest.mark.parametrize("template", [NO_SYSTEM + DROPS_SYSTEM, DROPS_SYSTEM])
def test_a_system_message_reaches_models_without_the_role(tmp_path: Path, template: str) -> None:
    maker = PromptMaker(save_tokenizer(tmp_path, chat_template=template), chat=True)
    example = make_example(system="Be brief.", context="C", question="Q?", answer_prefix="A:")
    assert text_of(maker, example) == "<|user|>Be brief.\n\nC\n\nQ?<|assistant|>A:"
    assert maker.provenance()["system_role"] is False


@pytest.mark.parametrize(("marks", "beginning"), [("", ()), ("begin", (BOS,)), ("both", (BOS,))])
def test_a_prompt_is_begun_and_never_ended(
    tmp_path: Path, marks: str, beginning: tuple[int, ...]
) -> None:
    maker = PromptMaker(save_tokenizer(tmp_path, marks=marks), chat=False)
    assert maker.beginning == beginning
    prompt = maker.item(make_example()).prompt_ids
    assert prompt[: len(beginning)] == beginning and EOS not in prompt
    assert BOS not in prompt[len(beginning) :]
    wanted = Wanted(("fidelity", "recall"), (), (520,), 2, 0)
    for item in make_items(wanted, maker):
        assert len(item.prompt_ids) == 520
        assert item.prompt_ids[: len(beginning)] == beginning
        assert not {BOS, EOS} & {*item.prompt_ids[len(beginning) :], *item.forced_ids}


def test_what_is_said_after_the_sieve_is_forced(raw: PromptMaker) -> None:
    item = raw.item(make_example(after_sieve=" 71.\n\nAnd now?"))
    assert raw.decode(item.forced_ids) == " 71.\n\nAnd now?"
    assert item.length == len(item.prompt_ids) + len(item.forced_ids) + 8


words = st.lists(
    st.sampled_from(
        ["code", "Über", "漢字", "👩‍👩‍👧", "\u2028", "  ", "\n", "x" * 30, "71", "\t.."]
    ),
    min_size=1,
    max_size=120,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(words, st.integers(30, 200), st.booleans())
def test_a_cut_prompt_keeps_its_ends_and_the_limit(
    raw: PromptMaker, chat: PromptMaker, parts: list[str], limit: int, is_chat: bool
) -> None:
    maker = chat if is_chat else raw
    context = "HEAD " + " ".join(parts) + " TAIL"
    example = make_example(context=context, question="Q?", answer_prefix="A:", system="S")
    whole, cut = maker.item(example), maker.item(example, limit)
    assert cut.sha256 == whole.sha256
    if len(whole.prompt_ids) <= limit:
        assert cut == whole
        return
    assert len(cut.prompt_ids) <= limit and cut.tags["truncated"] == 1
    text = maker.tokenizer.decode(list(cut.prompt_ids))
    assert "HE" in text and "IL" in text
    assert text.endswith("Q?\nA:" if not is_chat else "Q?</s><|assistant|>A:")
    # No more is lost than must be: tokens at the cut may merge, and half a character is none.
    assert len(cut.prompt_ids) >= limit - 24


def test_a_question_that_alone_is_too_long_is_refused(raw: PromptMaker) -> None:
    with pytest.raises(ConfigError, match=r"niah/64/0.50/0 has .* its question alone is longer"):
        raw.item(make_example(question="why? " * 50), 40)
    with pytest.raises(ConfigError, match="its question alone is longer"):
        raw.item(make_example(context="", question="why? " * 50), 40)


def damage(folder: Path, files: dict[str, str]) -> str:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    return str(folder)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config.json": '{"model_type": "llama"}'},
        {"config.json": "{", "tokenizer_config.json": "["},
        {"tokenizer.json": '{"version": "1.0"}', "tokenizer_config.json": "{}"},
    ],
)
def test_a_model_without_a_tokenizer_is_named(tmp_path: Path, files: dict[str, str]) -> None:
    model = damage(tmp_path / "model", files)
    with pytest.raises(ConfigError) as caught:
        PromptMaker(model, chat=False)
    (reason,) = caught.value.reasons
    assert reason.startswith(f"no tokenizer can be read from {model}: ") and "\n" not in reason


def test_chat_needs_a_template(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path, chat_template=None)
    assert not PromptMaker(model, chat=False).provenance()["chat"]
    with pytest.raises(ConfigError, match="has no chat template: leave out --chat"):
        PromptMaker(model, chat=True)


def test_the_record_of_a_run_has_template_and_stop_tokens(tmp_path: Path) -> None:
    model = save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 4]}')
    found = [PromptMaker(model, is_chat).provenance() for is_chat in (False, True)]
    assert all(one["eos_token_ids"] == [1, 4] for one in found)
    assert "{context}" in found[0]["template"] and "<|assistant|>" not in found[0]["template"]
    assert "<|assistant|>" in found[1]["template"]
    assert found[0]["template_sha256"] != found[1]["template_sha256"]


def test_an_items_hash_follows_what_is_asked() -> None:
    base = make_item().sha256
    assert base == make_item("other", example=make_example()).sha256
    changed = [
        make_item(example=make_example(context="x")),
        make_item(example=make_example(references=("72",))),
        make_item(example=make_example(scorer="exact")),
        make_item(example=None),
        make_item(example=None, forced_ids=(3,)),
        make_item(example=None, prompt_ids=(5, 6)),
    ]
    hashes = [base, *(item.sha256 for item in changed)]
    assert len(set(hashes)) == len(hashes)
    # Of an example the text counts, so that two tokenizers can be compared.
    assert base == make_item(prompt_ids=(1,)).sha256


def test_every_default_task_is_one() -> None:
    from kvsieve.cli.evaluate import _TASKS

    assert tuple(_TASKS.split(",")) == DEFAULT_TASKS
    assert set(DEFAULT_TASKS) <= {*TASKS, *PASSAGE_TASKS}


def test_all_that_cannot_be_asked_is_said_at_once(tmp_path: Path) -> None:
    wanted = Wanted(
        tasks=("niah", "niahh", "niah"),
        data=("longbench", "squad:x", "mmlu:/nowhere", "mmlu:/nowhere"),
        lengths=(64, 64),
        count=1,
        seed=0,
        text=tmp_path,
    )
    reasons = check_wanted(wanted)
    for part in (
        "no task 'niahh'",
        "--tasks: niah is given twice",
        "(given: 'longbench')",
        "(given: 'squad:x')",
        "there is no /nowhere",
        "--data: mmlu:/nowhere is given twice",
        "--lengths: 64 is given twice",
        "--text: there is no file",
        "--text is used by fidelity and recall alone",
    ):
        assert sum(part in reason for reason in reasons) >= 1, part
    nothing = Wanted((), (), (), 1, 0, max_prompt_tokens=50, max_answer_tokens=5)
    said = "\n".join(check_wanted(nothing))
    assert "nothing to do" in said
    assert "--max-prompt-tokens is for files" in said and "--max-answer-tokens is for" in said
    assert check_wanted(Wanted(("fidelity",), (), (600,), 1, 0, text=DOCUMENT)) == []


def test_every_reason_of_every_task_is_said_at_once(raw: PromptMaker) -> None:
    with pytest.raises(ConfigError) as caught:
        make_items(Wanted(("fidelity", "recall"), (), (100, 9_000), 500, 0), raw)
    assert len(caught.value.reasons) >= 4


def test_files_of_one_name_are_not_mixed_up(raw: PromptMaker, tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "law_test.csv").write_text(f"Which {folder}?,1,2,3,4,A\n")
    files = tuple(f"mmlu:{tmp_path / folder / 'law_test.csv'}" for folder in "ab")
    with pytest.raises(ConfigError, match="runs of their own"):
        make_items(Wanted((), files, (), 1, 0), raw)


def test_the_floor_of_a_file_is_chance(raw: PromptMaker) -> None:
    choice = make_example(choices=("A", "B", "C", "D"), references=("B",), task="mmlu")
    items = [make_item(task="mmlu", example=choice), make_item(task="longbench/x")]
    found = floors(items)
    assert (found["mmlu"], found["longbench/x"]) == (0.25, 0.0)
    assert found["few_shot"] == TASKS["few_shot"].floor
