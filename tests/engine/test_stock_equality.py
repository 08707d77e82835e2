"""The first gate: with `budget >= prompt` the sieve is bit-equal to stock vLLM."""

from __future__ import annotations

import pytest

from tests.engine.engines import drop_engine, generate, make_engine
from tests.engine.host import EngineHost
from tests.engine.models import random_prompt

pytestmark = pytest.mark.engine

BUDGET = 256
WINDOW = 32
# One token, around the window, around the budget, block-aligned and not.
LENGTHS = [1, 31, 32, 33, 100, 128, BUDGET - 1, BUDGET]
OPTIONS = {
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    # Chunks of 96 tokens: windows straddle chunks and rows mix prefill with decode.
    "max_num_batched_tokens": 96,
}
SAMPLING = {"max_tokens": 8, "ignore_eos": True, "detokenize": False}


def test_prompt_logprobs_are_stocks_even_when_sieved(v1_host: EngineHost, tiny_llama: str) -> None:
    # The prompt is read with the full cache; the sieve comes after.
    prompts = [random_prompt(length, length) for length in (400, 290)]
    sampling = {**SAMPLING, "prompt_logprobs": 0}
    outcomes = {}
    for name, settings in (("stock", None), ("sieved", {"budget": 96, "full_layers": 2})):
        v1_host.call(make_engine, name, tiny_llama, settings, **OPTIONS)
        outcomes[name] = v1_host.call(generate, name, prompts, sampling)
        v1_host.call(drop_engine, name)

    for stock, sieved in zip(outcomes["stock"], outcomes["sieved"], strict=True):
        assert sieved.report["sieved"] is True
        assert sieved.prompt_logprobs == stock.prompt_logprobs
        assert sieved.token_ids[0] == stock.token_ids[0]


@pytest.mark.parametrize(
    ("runner", "dtype"), [("v1", "float32"), ("v1", "bfloat16"), ("v2", "float32")]
)
def test_budget_of_prompt_or_more_is_bit_equal_to_stock(
    request: pytest.FixtureRequest, tiny_llama: str, runner: str, dtype: str
) -> None:
    host: EngineHost = request.getfixturevalue(f"{runner}_host")
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    outcomes = {}
    for name, settings in (("stock", None), ("sieved", {"budget": BUDGET, "full_layers": 2})):
        host.call(make_engine, name, tiny_llama, settings, **OPTIONS, dtype=dtype)
        outcomes[name] = host.call(generate, name, prompts, SAMPLING)
        host.call(drop_engine, name)

    for length, stock, sieved in zip(LENGTHS, outcomes["stock"], outcomes["sieved"], strict=True):
        assert sieved.token_ids == stock.token_ids, length
        assert sieved.logprobs == stock.logprobs, length
        assert stock.report is None
        assert sieved.report["sieved"] is False
        assert sieved.report["stored_tokens"] == {"full": length, "sieved": length}


def test_bfloat16_is_sieved(v1_host: EngineHost, tiny_llama: str) -> None:
    prompts = [random_prompt(length, length) for length in (500, 290)]
    v1_host.call(
        make_engine,
        "bf16",
        tiny_llama,
        {"budget": 96, "full_layers": 2},
        **OPTIONS,
        dtype="bfloat16",
    )
    together = v1_host.call(generate, "bf16", prompts, SAMPLING)
    alone = [v1_host.call(generate, "bf16", [prompt], SAMPLING)[0] for prompt in prompts]
    v1_host.call(drop_engine, "bf16")

    for prompt, one, other in zip(prompts, together, alone, strict=True):
        start = (len(prompt) - 96) // 32 * 32
        assert one.report["stored_tokens"]["sieved"] == len(prompt) - start
        assert one.token_ids == other.token_ids
        for layer, kept in one.kept.items():
            assert kept.shape == (2, len(prompt) - start)
            assert (kept == other.kept[layer]).float().mean() > 0.95
