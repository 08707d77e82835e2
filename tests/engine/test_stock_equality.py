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


def test_budget_of_prompt_or_more_is_bit_equal_to_stock(host: EngineHost, tiny_llama: str) -> None:
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    outcomes = {}
    for name, settings in (("stock", None), ("sieved", {"budget": BUDGET, "full_layers": 2})):
        host.call(make_engine, name, tiny_llama, settings, **OPTIONS)
        outcomes[name] = host.call(generate, name, prompts, SAMPLING)
        host.call(drop_engine, name)

    for length, stock, sieved in zip(LENGTHS, outcomes["stock"], outcomes["sieved"], strict=True):
        assert sieved.token_ids == stock.token_ids, length
        assert sieved.logprobs == stock.logprobs, length
        assert stock.report is None
        assert sieved.report["sieved"] is False
        assert sieved.report["stored_tokens"] == {"full": length, "sieved": length}
