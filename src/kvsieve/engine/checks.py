"""What kvsieve refuses at start, by name, with every reason at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm.config import VllmConfig

from kvsieve.core.errors import ConfigError
from kvsieve.engine.compat import missing_symbols, version_refusal

WORKERS = {"vllm.v1.worker.cpu_worker.CPUWorker": "kvsieve.engine.worker.SieveCPUWorker"}
"""Our worker for each of vLLM's that kvsieve runs on."""


@dataclass(frozen=True)
class Refusal:
    """A vLLM feature that this version of kvsieve does not serve.

    Attributes:
        feature: vLLM's name for it.
        is_asked_for: Whether a configuration uses it.
        advice: What to change.
    """

    feature: str
    is_asked_for: Callable[[VllmConfig], bool]
    advice: str


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "tensor parallelism",
        lambda c: c.parallel_config.tensor_parallel_size > 1,
        "use --tensor-parallel-size 1",
    ),
    Refusal(
        "pipeline parallelism",
        lambda c: c.parallel_config.pipeline_parallel_size > 1,
        "use --pipeline-parallel-size 1",
    ),
    Refusal(
        "data parallelism",
        lambda c: c.parallel_config.data_parallel_size > 1,
        "use --data-parallel-size 1 and run one server per replica",
    ),
    Refusal(
        "context parallelism",
        lambda c: (
            c.parallel_config.decode_context_parallel_size > 1
            or c.parallel_config.prefill_context_parallel_size > 1
        ),
        "use --decode-context-parallel-size 1 and --prefill-context-parallel-size 1",
    ),
    Refusal("LoRA", lambda c: c.lora_config is not None, "leave out --enable-lora"),
    Refusal(
        "a quantised KV cache",
        lambda c: c.cache_config.cache_dtype not in ("auto", "float32", "bfloat16", "float16"),
        "use --kv-cache-dtype auto",
    ),
    Refusal(
        "speculative decoding",
        lambda c: c.speculative_config is not None,
        "leave out --speculative-config",
    ),
    Refusal(
        "a KV connector",
        lambda c: c.kv_transfer_config is not None,
        "leave out --kv-transfer-config",
    ),
    Refusal(
        "KV cache events",
        lambda c: c.kv_events_config is not None and c.kv_events_config.enable_kv_cache_events,
        "leave out --kv-events-config",
    ),
    Refusal(
        "multimodal input",
        lambda c: c.model_config.is_multimodal_model,
        "serve a text-only model, or this one with --language-model-only",
    ),
    Refusal(
        "an encoder-decoder model",
        lambda c: c.model_config.is_encoder_decoder,
        "serve a decoder-only model",
    ),
    Refusal(
        "a pooling model",
        lambda c: c.model_config.runner_type == "pooling",
        "serve a generating model",
    ),
    Refusal(
        "disable_hybrid_kv_cache_manager",
        lambda c: bool(c.scheduler_config.disable_hybrid_kv_cache_manager),
        "full and sieved layers need separate block tables: leave out the flag",
    ),
    Refusal(
        "a custom scheduler class",
        lambda c: c.scheduler_config.scheduler_cls is not None,
        "leave out --scheduler-cls",
    ),
    Refusal(
        "a custom worker class",
        lambda c: c.parallel_config.worker_cls not in WORKERS,
        "leave out --worker-cls; kvsieve runs on vLLM's CPU worker so far",
    ),
    Refusal(
        "micro-batching (DBO)",
        lambda c: bool(c.parallel_config.enable_dbo),
        "leave out --enable-dbo",
    ),
)


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Stop the start if the configuration asks for what kvsieve does not serve.

    Raises:
        ConfigError: Every feature refused, each with what to change.
    """
    reasons = []
    if version := version_refusal():
        reasons.append(version)
    if missing := missing_symbols():
        reasons.append(
            "this vLLM lacks symbols that kvsieve relies on: "
            + ", ".join(symbol.name for symbol in missing)
            + "; run `kvsieve doctor`"
        )
    reasons.extend(
        f"{refusal.feature} is not served together with kvsieve: {refusal.advice}"
        for refusal in REFUSALS
        if refusal.is_asked_for(vllm_config)
    )
    if reasons:
        raise ConfigError(reasons)
