"""Which of vLLM's features are served together with kvsieve: one table for all who ask.

The check at start refuses by it (`checks.py`), and the README prints it
(`scripts/support_table.py`; a test compares the two).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Status = Literal["served", "refused", "untested"]

WORKERS = {"vllm.v1.worker.cpu_worker.CPUWorker": "kvsieve.engine.worker.SieveCPUWorker"}
"""Our worker for each of vLLM's that kvsieve runs on."""


@dataclass(frozen=True)
class Feature:
    """One feature of vLLM.

    Attributes:
        name: vLLM's name for it.
        status: "served" means that a test of ours uses it on a sieved engine; "refused",
            that the start stops or the request gets an error; "untested", that nothing
            stops it and nobody has looked.
        note: For a served feature its limits, for a refused one what to change.
        is_asked_for: Whether a configuration uses it; only for what the start refuses.
    """

    name: str
    status: Status
    note: str = ""
    is_asked_for: Callable[[VllmConfig], bool] | None = None


def _served(name: str, note: str = "") -> Feature:
    return Feature(name, "served", note)


def _refused(name: str, is_asked_for: Callable[[VllmConfig], bool], advice: str) -> Feature:
    return Feature(name, "refused", advice, is_asked_for)


def _env(name: str) -> bool:
    from vllm import envs

    return bool(getattr(envs, name, False))


FEATURES: tuple[Feature, ...] = (
    _served("attention on CPUs (`CPU_ATTN`, isa `vec` and `vec16`)", "float32 and bfloat16"),
    _served(
        "Llama, Qwen2, Qwen3, Mistral; Gemma 3's full-attention layers",
        "compared with Transformers, with random weights",
    ),
    _served("continuous batching, chunked prefill"),
    _served(
        "prefix caching",
        "hits of a sieved request end before its last 32 tokens; a pruned one has none",
    ),
    _served(
        "protected spans and roles (`kv_protect`, `protect_roles`)",
        "roles: chats that the server renders, text only; not with beam search",
    ),
    _served(
        "prefill pruning (`prune`, `kv_prune`)",
        "every layer sieved, and decoder layers that take positions, hidden states and residual:"
        " Llama, Qwen2, Qwen3, Mistral, most others; such a step runs uncompiled; not with"
        " prompt_logprobs",
    ),
    _served("preemption and recompute", "a recomputed request writes the same text"),
    _served("asynchronous scheduling", "vLLM switches it off on CPUs; tests force it on"),
    _served("Model Runner V1 and V2"),
    _served("torch.compile"),
    _served("priority scheduling"),
    _served("completions, chat, responses, streamed or not", "with a report in every answer"),
    _served("several prompts, n > 1", "a report for each choice"),
    _served("stop strings, stop tokens, min_tokens, ignore_eos"),
    _served("logprobs, prompt_logprobs"),
    _served("structured output"),
    _served(
        "beam search",
        "equal to stock: its steps sample before anything is dropped; no report, no kv_budget. With"
        " `prune` each step's prompt is pruned, and that is not equal",
    ),
    _served("reset of the prefix cache", "running requests included"),
    _served("sleep and wake, reload of weights", "sleeping does nothing on CPUs, in stock too"),
    Feature(
        "streaming input (resumable requests)",
        "refused",
        "the request gets status 400: send the whole prompt in one request",
    ),
    _refused(
        "tensor parallelism",
        lambda c: c.parallel_config.tensor_parallel_size > 1,
        "use --tensor-parallel-size 1",
    ),
    _refused(
        "pipeline parallelism",
        lambda c: c.parallel_config.pipeline_parallel_size > 1,
        "use --pipeline-parallel-size 1",
    ),
    _refused(
        "data parallelism",
        lambda c: c.parallel_config.data_parallel_size > 1,
        "use --data-parallel-size 1 and run one server per replica",
    ),
    _refused(
        "context parallelism",
        lambda c: (
            c.parallel_config.decode_context_parallel_size > 1
            or c.parallel_config.prefill_context_parallel_size > 1
        ),
        "use --decode-context-parallel-size 1 and --prefill-context-parallel-size 1",
    ),
    _refused("LoRA", lambda c: c.lora_config is not None, "leave out --enable-lora"),
    _refused(
        "a quantised KV cache",
        lambda c: c.cache_config.cache_dtype not in ("auto", "float32", "bfloat16", "float16"),
        "use --kv-cache-dtype auto",
    ),
    _refused(
        "speculative decoding",
        lambda c: c.speculative_config is not None,
        "leave out --speculative-config",
    ),
    _refused(
        "a KV connector",
        lambda c: c.kv_transfer_config is not None,
        "leave out --kv-transfer-config",
    ),
    _refused(
        "KV cache events",
        lambda c: c.kv_events_config is not None and c.kv_events_config.enable_kv_cache_events,
        "leave out --kv-events-config",
    ),
    _refused(
        "multimodal input",
        lambda c: c.model_config.is_multimodal_model,
        "serve a text-only model, or this one with --language-model-only",
    ),
    _refused(
        "an encoder-decoder model",
        lambda c: c.model_config.is_encoder_decoder,
        "serve a decoder-only model",
    ),
    _refused(
        "a pooling model",
        lambda c: c.model_config.runner_type == "pooling",
        "serve a generating model",
    ),
    _refused(
        "disable_hybrid_kv_cache_manager",
        lambda c: bool(c.scheduler_config.disable_hybrid_kv_cache_manager),
        "full and sieved layers need separate block tables: leave out the flag",
    ),
    _refused(
        "a custom scheduler class",
        lambda c: c.scheduler_config.scheduler_cls is not None,
        "leave out --scheduler-cls",
    ),
    _refused(
        "a custom worker class",
        lambda c: c.parallel_config.worker_cls not in WORKERS,
        "leave out --worker-cls; kvsieve runs on vLLM's CPU worker so far",
    ),
    _refused(
        "micro-batching (DBO)",
        lambda c: bool(c.parallel_config.enable_dbo),
        "leave out --enable-dbo",
    ),
    _refused(
        "the front end written in Rust",
        lambda c: _env("VLLM_USE_RUST_FRONTEND"),
        "unset VLLM_USE_RUST_FRONTEND: it has no place for our checks, reports and metrics",
    ),
    Feature(
        "GPU attention back-ends, CUDA graphs, AMX (isa `amx`)",
        "refused",
        "kvsieve has no adapter for them yet; on a CPU with AMX use --dtype float32",
    ),
    Feature(
        "ALiBi, learned attention sinks, capped logits, KV sharing in a sieved layer",
        "refused",
        "name the layers in full_layers",
    ),
    Feature("other decoder-only models", "untested", "decided layer by layer, from the cache spec"),
    Feature("several API server processes (--api-server-count)", "untested"),
    Feature("prompt embeddings", "untested"),
)


def support_table() -> str:
    """The table as Markdown."""
    lines = ["| feature of vLLM | with kvsieve | |", "| --- | --- | --- |"]
    for status in ("served", "refused", "untested"):
        lines.extend(
            f"| {feature.name} | {status} | {feature.note} |"
            for feature in FEATURES
            if feature.status == status
        )
    return "\n".join(lines) + "\n"
