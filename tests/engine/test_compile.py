"""torch.compile on: the sieve works on opaque attention ops, so nothing changes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.engine.agreement import Agreement
from tests.engine.engines import drop_engine, generate, make_engine
from tests.engine.host import EngineHost
from tests.engine.models import random_prompt
from tests.engine.prune_agreement import BUDGET, METHODS, check, load, reference_of
from tests.oracle.snapkv_oracle import Oracle

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not (shutil.which("g++") or shutil.which("clang++")),
        reason="torch.compile on a CPU needs a C++ compiler",
    ),
]


def check_compiled(host: EngineHost, model: str) -> None:
    prompts = [random_prompt(length, seed) for seed, length in enumerate([400, 90, 333])]
    host.call(
        make_engine,
        "compiled",
        model,
        {"budget": 128, "full_layers": 2},
        enforce_eager=False,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_batched_tokens=150,
    )
    sampling = {"max_tokens": 10, "ignore_eos": True, "detokenize": False}
    outcomes = host.call(generate, "compiled", prompts, sampling)
    host.call(drop_engine, "compiled")
    oracle = Oracle(model)
    agreement = Agreement()
    for prompt, generated in zip(prompts, outcomes, strict=True):
        agreement.compare(oracle, prompt, generated, budget=128, block_size=32, full_layers={0, 1})
    agreement.check(max_logprob_difference=1e-3)


def check_pruned(host: EngineHost, path: str) -> None:
    """A step that prunes runs uncompiled, and the others stay compiled."""
    host.call(
        make_engine,
        "compiled",
        path,
        {"budget": BUDGET, "prune": "fastkv"},
        enforce_eager=False,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_batched_tokens=520,
    )
    model = load(path)
    # Twice, so that compiled steps follow steps with hooks.
    for seed in (0, 1):
        prompts = [random_prompt(300 + 7 * index, seed + index) for index in range(len(METHODS))]
        wishes = [
            {"max_tokens": 8, "ignore_eos": True, "detokenize": False, "extra_args": extra}
            for extra in ({"kv_prune": method} for method in METHODS)
        ]
        outcomes = host.call(generate, "compiled", prompts, wishes)
        for method, prompt, generated in zip(METHODS, prompts, outcomes, strict=True):
            changes = {"min_layer": 2, "observed_layers": 2} if "asl" in method else {}
            assert check(reference_of(model, prompt, method, **changes), generated) == 0
    host.call(drop_engine, "compiled")


@pytest.fixture
def traced_host() -> Iterator[EngineHost]:
    host = EngineHost("v1", {"TORCHDYNAMO_DISABLE": "0"})
    yield host
    host.close()


@pytest.fixture
def compiled_host() -> Iterator[EngineHost]:
    host = EngineHost("v1", {"TORCHDYNAMO_DISABLE": "0", "VLLM_CPU_CI_ENV": "0"})
    yield host
    host.close()


def test_traced_by_dynamo(traced_host: EngineHost, tiny_llama: str) -> None:
    check_compiled(traced_host, tiny_llama)
    check_pruned(traced_host, tiny_llama)


@pytest.mark.long
def test_compiled_by_inductor(compiled_host: EngineHost, tiny_llama: str) -> None:
    check_compiled(compiled_host, tiny_llama)
    check_pruned(compiled_host, tiny_llama)
