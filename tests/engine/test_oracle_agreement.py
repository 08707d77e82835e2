"""The engine against the independent Transformers oracle: kept positions, tokens, logprobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.agreement import Agreement
from tests.engine.engines import drop_engine, generate, make_engine
from tests.engine.host import EngineHost
from tests.engine.models import random_prompt, tiny_model
from tests.oracle.snapkv_oracle import Oracle

pytestmark = pytest.mark.engine

REAL_FULL_LAYERS = {0, 1, 2}
SAMPLING = {"ignore_eos": True}


def words_prompt(tokenizer: object, num_tokens: int, offset: int) -> list[int]:
    """A prompt of real words: the licence text, from an offset on."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = tokenizer.encode(text)
    while len(ids) < offset + num_tokens:
        ids = ids + ids
    return ids[offset : offset + num_tokens]


@pytest.fixture(scope="module")
def oracle(real_model: str) -> Oracle:
    return Oracle(real_model)


@pytest.fixture(scope="module")
def tokenizer(real_model: str) -> object:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_model)


@pytest.mark.parametrize(
    ("budget", "chunk", "lengths"),
    [
        # A last chunk of 6 tokens: the window straddles two chunks.
        pytest.param(256, 597, [2991, 700], id="straddled-window"),
        # Chunks shorter than the window: it straddles three and more.
        pytest.param(96, 17, [301], id="chunks-shorter-than-window"),
        pytest.param(128, 2048, [1000, 129, 160, 161, 353], id="whole-prompts"),
    ],
)
def test_real_model_on_v1(
    v1_host: EngineHost,
    real_model: str,
    oracle: Oracle,
    tokenizer: object,
    budget: int,
    chunk: int,
    lengths: list[int],
) -> None:
    check_real_model(v1_host, real_model, oracle, tokenizer, budget, chunk, lengths, 24)


@pytest.mark.parametrize(
    ("budget", "chunk", "lengths"),
    [pytest.param(128, 250, [506, 300], id="straddled-window")],
)
def test_real_model_on_v2(
    v2_host: EngineHost,
    real_model: str,
    oracle: Oracle,
    tokenizer: object,
    budget: int,
    chunk: int,
    lengths: list[int],
) -> None:
    check_real_model(v2_host, real_model, oracle, tokenizer, budget, chunk, lengths, 8)


def check_real_model(
    host: EngineHost,
    model: str,
    oracle: Oracle,
    tokenizer: object,
    budget: int,
    chunk: int,
    lengths: list[int],
    output_tokens: int,
) -> None:
    prompts = [words_prompt(tokenizer, n, 7 * i) for i, n in enumerate(lengths)]
    host.call(
        make_engine,
        "real",
        model,
        {"budget": budget, "full_layers": 3},
        max_model_len=4096,
        max_num_batched_tokens=chunk,
    )
    outcomes = host.call(generate, "real", prompts, {**SAMPLING, "max_tokens": output_tokens})
    host.call(drop_engine, "real")
    agreement = Agreement()
    for prompt, generated in zip(prompts, outcomes, strict=True):
        agreement.compare(
            oracle,
            prompt,
            generated,
            budget=budget,
            block_size=32,
            full_layers=REAL_FULL_LAYERS,
        )
        start = max(0, (len(prompt) - budget) // 32 * 32)
        assert generated.report["sieved"] is (start > 0)
        assert generated.report["stored_tokens"] == {
            "full": len(prompt),
            "sieved": len(prompt) - start,
        }
        assert generated.report["blocks_freed"] == start // 32 * 9
    agreement.check(max_logprob_difference=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
def test_architectures_on_v1(v1_host: EngineHost, model_folder: Path, architecture: str) -> None:
    model = tiny_model(model_folder, architecture)
    # In Gemma 3 only layers 2 and 5 have full attention; the windowed ones stay untouched.
    full = 0 if architecture == "gemma3" else 2
    full_layers = {0, 1, 3, 4} if architecture == "gemma3" else {0, 1}
    prompts = [random_prompt(length, seed) for seed, length in enumerate([1012, 333, 90])]
    v1_host.call(
        make_engine,
        architecture,
        model,
        {"budget": 128, "full_layers": full},
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_batched_tokens=200,
    )
    sampling = {**SAMPLING, "max_tokens": 12, "detokenize": False}
    outcomes = v1_host.call(generate, architecture, prompts, sampling)
    v1_host.call(drop_engine, architecture)
    agreement = Agreement()
    oracle = Oracle(model)
    for prompt, generated in zip(prompts, outcomes, strict=True):
        agreement.compare(
            oracle, prompt, generated, budget=128, block_size=32, full_layers=full_layers
        )
    assert outcomes[0].report["layers"]["sieved"] == 6 - len(full_layers)
    agreement.check(max_logprob_difference=1e-3)
