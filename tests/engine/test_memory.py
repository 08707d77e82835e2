"""What the sieve needs beside the cache is counted before the cache takes the rest."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import engines
from tests.engine.engines import make_engine
from tests.engine.host import EngineHost

pytestmark = pytest.mark.engine


def measured(name: str) -> dict[str, Any]:
    """Runs in an engine's process: what vLLM would give the cache, and what we leave of it."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    worker = engines.worker(name)
    # As if the user had named no size; nothing else of the machine matters here.
    worker.cache_config.kv_cache_memory_bytes = None
    worker.requested_cpu_memory = 4 * 2**30
    stock = CPUWorker.determine_available_memory(worker)
    return {
        "taken": stock - worker.determine_available_memory(),
        "scratch": worker.sieve.scratch_bytes(worker.vllm_config),
    }


def resident_growth(num_slots: int, is_filled: bool) -> tuple[int, int]:
    """Runs in a process of its own: bytes of new rings, and of what became resident.

    Args:
        num_slots: Slots of each ring.
        is_filled: Whether `Tensor.fill_` does its work meanwhile.
    """
    import psutil
    import torch

    from kvsieve.engine.observer import Observer

    process = psutil.Process()
    with pytest.MonkeyPatch.context() as patch:
        if not is_filled:
            patch.setattr(torch.Tensor, "fill_", lambda ring, value: ring)
        before = process.memory_info().rss
        observer = Observer(["a", "b"], num_slots, 32, 8, 64, torch.float32, torch.device("cpu"))
        grown = process.memory_info().rss - before
    return observer.num_bytes, grown


def test_the_scratch_is_taken_off_what_vllm_measured(v1_host: EngineHost, tiny_llama: str) -> None:
    v1_host.call(
        make_engine,
        "memory",
        tiny_llama,
        {"budget": 96},
        skip_tokenizer_init=True,
        max_model_len=4096,
    )

    memory = v1_host.call(measured, "memory")

    assert memory["scratch"] >= 64 * 2**20
    # Resident memory moves a little between the two measurements.
    assert abs(memory["taken"] - memory["scratch"]) < 8 * 2**20


def test_the_rings_are_resident_before_vllm_measures() -> None:
    # A process that ran engines may be given memory that it has freed and that stayed resident.
    # This one has freed nothing as large as these rings.
    host = EngineHost("v1")
    try:
        _, untouched = host.call(resident_growth, 4000, is_filled=False)
        rings, grown = host.call(resident_growth, 4000, is_filled=True)
    finally:
        host.close()

    assert rings == 2 * 4000 * 32 * 8 * 64 * 4
    # So that what is measured is the filling.
    assert untouched <= 0.1 * rings
    assert grown >= 0.9 * rings


def start_with_pool(name: str, model: str, num_blocks: int) -> str:
    """Runs in an engine's process: the reason why an engine does not start."""
    try:
        make_engine(
            name,
            model,
            {"budget": 96, "full_layers": 2},
            skip_tokenizer_init=True,
            max_model_len=2048,
            num_gpu_blocks_override=num_blocks,
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "started"


def test_a_prompt_that_fits_only_once_it_is_sieved_is_refused_at_start(
    v1_host: EngineHost, tiny_llama: str
) -> None:
    # 2048 tokens are 64 blocks in each of three groups, and one more is vLLM's null block.
    assert v1_host.call(start_with_pool, "small", tiny_llama, 193) == "started"

    reason = v1_host.call(start_with_pool, "small", tiny_llama, 192)

    # vLLM's own refusal: our spec says that the whole prompt is held while it is read. Once
    # sieved, a prompt of 2048 tokens would need 64 + 2 * 3 blocks.
    assert "decreasing `max_model_len`" in reason
    assert "maximum model length is 2016" in reason
