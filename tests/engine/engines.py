"""What runs inside an engine's process: make engines, generate, look inside."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch

BLOCK_SIZE = 32

_engines: dict[str, Any] = {}


@dataclass
class Generated:
    """The outcome of one request.

    Attributes:
        token_ids: Generated tokens.
        logprobs: Log-probability of each generated token.
        report: The `kvsieve` report, or None from a stock engine.
        kept: Positions chosen before the window, per layer number.
        finish_reason: vLLM's.
        text: The generated text; empty without a tokenizer.
        prompt_logprobs: Log-probability of each prompt token after the first, if asked for.
    """

    token_ids: list[int]
    logprobs: list[float]
    report: dict[str, Any] | None
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    finish_reason: str | None = None
    text: str = ""
    prompt_logprobs: list[float] | None = None


def make_engine(name: str, model: str, settings: dict[str, Any] | None, **kwargs: Any) -> None:
    """Start an engine and remember it under a name, replacing one of that name.

    Unless the settings name a policy it is SnapKV, which the independent oracle computes.
    """
    from vllm import LLM

    drop_engine(name)
    options: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 2**28,
        "disable_log_stats": True,
        "enable_prefix_caching": False,
    }
    if settings is not None:
        options["additional_config"] = {"kvsieve": {"policy": "snapkv", **settings}}
    _engines[name] = LLM(model, **{**options, **kwargs})


def drop_engine(name: str) -> None:
    """Forget an engine and free its memory."""
    engine = _engines.pop(name, None)
    if engine is not None:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


def core(name: str) -> Any:
    """The engine core of a named engine."""
    return _engines[name].llm_engine.engine_core.engine_core


def scheduler(name: str) -> Any:
    """The scheduler of a named engine."""
    return core(name).scheduler


def worker(name: str) -> Any:
    """The worker of a named engine."""
    return core(name).model_executor.driver_worker.worker


def free_blocks(name: str) -> int:
    """Free blocks in the pool of a named engine."""
    return scheduler(name).kv_cache_manager.block_pool.get_num_free_blocks()


def capture_selections(name: str) -> dict[str, dict[int, torch.Tensor]]:
    """Record kept positions of a sieved engine from now on, by request id and layer."""
    from vllm.model_executor.models.utils import extract_layer_index

    selections: dict[str, dict[int, torch.Tensor]] = {}

    def on_select(request_id: str, layer_name: str, positions: torch.Tensor) -> None:
        layers = selections.setdefault(request_id, {})
        layers[extract_layer_index(layer_name)] = positions.clone()

    worker(name).sieve.on_select = on_select
    return selections


def generate(
    name: str, prompts: list[list[int]], sampling: dict[str, Any] | list[dict[str, Any]]
) -> list[Generated]:
    """Run prompts through an engine, all submitted at once.

    Args:
        name: The engine.
        prompts: Token ids of each prompt.
        sampling: Keyword arguments of `SamplingParams`, for all or for each.
    """
    from vllm import SamplingParams

    llm = _engines[name]
    each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    sieved = hasattr(worker(name), "sieve")
    selections = capture_selections(name) if sieved else {}
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [SamplingParams(**{"temperature": 0, "logprobs": 0, **kwargs}) for kwargs in each],
        use_tqdm=False,
    )
    # The engine core knows a request by an id that starts with the one in the output.
    return [as_generated(output, _selection(selections, output.request_id)) for output in outputs]


def _selection(
    selections: dict[str, dict[int, torch.Tensor]], request_id: str
) -> dict[int, torch.Tensor]:
    for internal_id, layers in selections.items():
        if internal_id == request_id or internal_id.startswith(f"{request_id}-"):
            return layers
    return {}


def as_generated(output: Any, kept: dict[int, torch.Tensor]) -> Generated:
    """A vLLM `RequestOutput` as plain data."""
    completion = output.outputs[0]
    logprobs = completion.logprobs or []
    return Generated(
        token_ids=list(completion.token_ids),
        logprobs=[
            step[token].logprob for step, token in zip(logprobs, completion.token_ids, strict=False)
        ],
        report=(output.kv_transfer_params or {}).get("kvsieve"),
        kept=kept,
        finish_reason=completion.finish_reason,
        text=completion.text,
        prompt_logprobs=output.prompt_logprobs
        and [
            step[token].logprob
            for step, token in zip(
                output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True
            )
        ],
    )
