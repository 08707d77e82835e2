"""Inert unless configured; refused by name, with every reason, where it cannot work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.host import EngineHost

pytestmark = pytest.mark.engine

SETTINGS = {"budget": 256}


def configure(
    model: str, settings: dict[str, Any] | None, environment: dict[str, str], **options: Any
) -> dict[str, Any]:
    """Runs in an engine's process: make a configuration and say what came of it."""
    import os

    from vllm.engine.arg_utils import EngineArgs

    from kvsieve.core.errors import ConfigError

    os.environ.update(environment)
    additional = {} if settings is None else {"kvsieve": settings}
    try:
        config = EngineArgs(
            model, skip_tokenizer_init=True, additional_config=additional, **options
        ).create_engine_config()
    except ConfigError as error:
        return {"reasons": list(error.reasons)}
    finally:
        for name in environment:
            del os.environ[name]
    return {
        "worker": config.parallel_config.worker_cls,
        "scheduler": config.scheduler_config.scheduler_cls,
        "block_size": config.cache_config.block_size,
    }


def test_installing_changes_nothing(v1_host: EngineHost, tiny_llama: str) -> None:
    assert v1_host.call(configure, tiny_llama, None, {}) == {
        "worker": "vllm.v1.worker.cpu_worker.CPUWorker",
        "scheduler": None,
        "block_size": 128,
    }


def test_the_environment_switches_it_off(v1_host: EngineHost, tiny_llama: str) -> None:
    stock = v1_host.call(configure, tiny_llama, None, {})

    assert v1_host.call(configure, tiny_llama, SETTINGS, {"KVSIEVE_DISABLE": "1"}) == stock


@pytest.mark.parametrize(("block_size", "expected"), [(None, 32), (64, 64)])
def test_configured_it_takes_worker_and_scheduler(
    v1_host: EngineHost, tiny_llama: str, block_size: int | None, expected: int
) -> None:
    assert v1_host.call(configure, tiny_llama, SETTINGS, {}, block_size=block_size) == {
        "worker": "kvsieve.engine.worker.SieveCPUWorker",
        "scheduler": "kvsieve.engine.scheduler.SieveScheduler",
        "block_size": expected,
    }


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("options", "feature", "advice"),
    [
        ({"tensor_parallel_size": 2}, "tensor parallelism", "--tensor-parallel-size 1"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism", "--pipeline-parallel-size 1"),
        ({"data_parallel_size": 2}, "data parallelism", "--data-parallel-size 1"),
        ({"enable_lora": True}, "LoRA", "--enable-lora"),
        ({"kv_cache_dtype": "fp8"}, "a quantised KV cache", "--kv-cache-dtype auto"),
        ({"speculative_config": NGRAM}, "speculative decoding", "--speculative-config"),
        ({"kv_transfer_config": CONNECTOR}, "a KV connector", "--kv-transfer-config"),
        ({"runner": "pooling"}, "a pooling model", "a generating model"),
        (
            {"disable_hybrid_kv_cache_manager": True},
            "disable_hybrid_kv_cache_manager",
            "leave out the flag",
        ),
        (
            {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
            "a custom scheduler class",
            "--scheduler-cls",
        ),
        ({"worker_cls": "some.Worker"}, "a custom worker class", "--worker-cls"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    v1_host: EngineHost, tiny_llama: str, options: dict[str, Any], feature: str, advice: str
) -> None:
    outcome = v1_host.call(configure, tiny_llama, SETTINGS, {}, **options)

    assert any(
        reason.startswith(feature) and advice in reason for reason in outcome.get("reasons", [])
    ), outcome


def test_the_rust_front_end_is_refused(v1_host: EngineHost, tiny_llama: str) -> None:
    outcome = v1_host.call(configure, tiny_llama, SETTINGS, {"VLLM_USE_RUST_FRONTEND": "1"})

    assert "unset VLLM_USE_RUST_FRONTEND" in str(outcome)


def test_all_reasons_come_at_once(v1_host: EngineHost, tiny_llama: str) -> None:
    outcome = v1_host.call(
        configure,
        tiny_llama,
        SETTINGS,
        {},
        tensor_parallel_size=2,
        enable_lora=True,
        kv_cache_dtype="fp8",
    )

    assert len(outcome["reasons"]) == 3


def test_a_bad_setting_is_refused_before_anything_is_loaded(
    v1_host: EngineHost, tiny_llama: str
) -> None:
    assert "did you mean 'budget'" in str(v1_host.call(configure, tiny_llama, {"budgt": 1}, {}))
    too_small = v1_host.call(configure, tiny_llama, {"budget": 100}, {}, block_size=128)
    assert "smallest legal budget is 140" in str(too_small)


def refusals_of_a_model(**model: bool) -> list[str]:
    """Runs in an engine's process: what is refused of a model that cannot be had here."""
    from kvsieve.engine.support import FEATURES

    config = SimpleNamespace(
        model_config=SimpleNamespace(
            **{"is_multimodal_model": False, "is_encoder_decoder": False, **model}
        )
    )
    named = ("multimodal input", "an encoder-decoder model")
    return [f.name for f in FEATURES if f.name in named and f.is_asked_for(config)]


def test_multimodal_and_encoder_decoder_models_are_refused(v1_host: EngineHost) -> None:
    assert v1_host.call(refusals_of_a_model) == []
    assert v1_host.call(refusals_of_a_model, is_multimodal_model=True) == ["multimodal input"]
    assert v1_host.call(refusals_of_a_model, is_encoder_decoder=True) == [
        "an encoder-decoder model"
    ]


def refusals_of_layers(**impl: Any) -> str:
    """Runs in an engine's process: what is refused of layers that no model here has."""
    import torch

    from kvsieve.core.errors import ConfigError
    from kvsieve.engine.install import _refuse

    reader = impl.pop("kv_sharing_target_layer_name", None)
    backend = impl.pop("backend", "CPU_ATTN")
    layer = SimpleNamespace(
        attn_backend=SimpleNamespace(get_name=lambda: backend),
        impl=SimpleNamespace(**impl),
        kv_cache_torch_dtype=torch.float32,
        head_size=64,
        num_kv_heads=1,
    )
    others = [layer, SimpleNamespace(kv_sharing_target_layer_name=reader)]
    try:
        _refuse({"layers.0": layer}, others, 32)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({}, ""),
        ({"kv_sharing_target_layer_name": "layers.0"}, "other layers read the cache of layers.0"),
        ({"kv_sharing_target_layer_name": "layers.7"}, ""),
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"sinks": [0.0]}, "attention sinks"),
        ({"logits_soft_cap": 30.0}, "caps its attention logits"),
        ({"backend": "FLASH_ATTN"}, "FLASH_ATTN has no kvsieve adapter"),
    ],
)
def test_layers_whose_attention_is_not_the_scores_are_refused(
    v1_host: EngineHost, layer: dict[str, Any], words: str
) -> None:
    outcome = v1_host.call(refusals_of_layers, **layer)

    assert words in outcome
    assert bool(words) == bool(outcome)


def start(model: str, settings: dict[str, Any], **options: Any) -> str:
    """Runs in an engine's process: start an engine that should be refused."""
    from kvsieve.core.errors import ConfigError
    from tests.engine.engines import drop_engine, make_engine

    try:
        make_engine("refused", model, settings, skip_tokenizer_init=True, **options)
    except ConfigError as error:
        return str(error)
    drop_engine("refused")
    return "started"


def test_a_start_that_sieves_no_layer_is_refused(v1_host: EngineHost, tiny_llama: str) -> None:
    assert "not one layer" in v1_host.call(start, tiny_llama, {"budget": 256, "full_layers": 6})
    assert "layers [9]" in v1_host.call(start, tiny_llama, {"budget": 256, "full_layers": [9]})


def test_registering_again_wraps_nothing_twice(v1_host: EngineHost) -> None:
    assert v1_host.call(register_again) is True


def register_again() -> bool:
    """Runs in an engine's process: whether a second registration leaves vLLM as it is."""
    from vllm.engine.arg_utils import EngineArgs

    from kvsieve.engine.plugin import register

    before = EngineArgs.create_engine_config
    register()
    return EngineArgs.create_engine_config is before


def stream_input(model: str) -> str:
    """Runs in an engine's process: submit a prompt that may grow."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from tests.engine import engines

    engines.make_engine("stream", model, SETTINGS, skip_tokenizer_init=True, max_model_len=512)
    try:
        engines._engines["stream"].llm_engine.input_processor.process_inputs(
            "1",
            {"prompt_token_ids": [5, 6]},
            SamplingParams(detokenize=False),
            ("generate",),
            resumable=True,
        )
    except VLLMValidationError as error:
        return str(error)
    finally:
        engines.drop_engine("stream")
    return "accepted"


def test_streaming_input_is_refused_per_request(v1_host: EngineHost, tiny_llama: str) -> None:
    assert "streaming input is not served" in v1_host.call(stream_input, tiny_llama)


def found_symbols() -> list[str]:
    """Runs in an engine's process: the vLLM symbols that are missing."""
    from kvsieve.engine.compat import missing_symbols, version_refusal

    assert version_refusal() is None
    return [symbol.name for symbol in missing_symbols()]


def test_every_vllm_symbol_is_there(v1_host: EngineHost) -> None:
    assert v1_host.call(found_symbols) == []


def grouping_of_vllm(num_full: int, num_sieved: int) -> tuple[int, int]:
    """Runs in an engine's process: groups and padding that vLLM makes of two layer classes."""
    import torch
    from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvsieve import BudgetRule
    from kvsieve.core.tiers import uniform_tier
    from kvsieve.engine.spec import sieved_spec

    full = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32)
    sieved = sieved_spec(full, uniform_tier(BudgetRule(tokens=256)), 32)
    specs = {f"layers.{i}": full if i < num_full else sieved for i in range(num_full + num_sieved)}
    groups = _get_kv_cache_groups_uniform_page_size(specs)
    size = max(len(group.layer_names) for group in groups)
    return len(groups), len(groups) * size - len(specs)


@pytest.mark.parametrize(
    ("full", "sieved"), [(0, 30), (3, 27), (4, 26), (3, 29), (4, 28), (8, 72), (5, 6), (2, 2)]
)
def test_the_plan_groups_layers_as_vllm_does(v1_host: EngineHost, full: int, sieved: int) -> None:
    from kvsieve.core.plan import group_layers

    planned = group_layers(full, sieved)
    assert v1_host.call(grouping_of_vllm, full, sieved) == (
        planned.num_groups,
        planned.padding_layers,
    )
