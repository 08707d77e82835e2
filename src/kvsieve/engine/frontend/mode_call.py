"""How the API process reaches the mode in the engine core's scheduler."""

from __future__ import annotations

from typing import Any

MODE_CALL = "kvsieve_mode"
"""Name of the utility call. vLLM looks such a call up on its `EngineCore` by name."""


def install_mode_call() -> None:
    """Give vLLM's `EngineCore` the utility call."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, MODE_CALL, _kvsieve_mode)


async def call_mode(engine_client: Any, mode: str | None = None) -> str:
    """The engine's mode; with a mode, switch to it and return the one before.

    Args:
        engine_client: vLLM's `AsyncLLM`.
        mode: The mode to switch to.
    """
    arguments = () if mode is None else (mode,)
    answer: str = await engine_client.engine_core.call_utility_async(MODE_CALL, *arguments)
    return answer


def _kvsieve_mode(core: Any, mode: str | None = None) -> str:
    # Utility calls run between steps on the engine core's one loop, so that a step never
    # sees the mode change.
    if mode is None:
        return core.scheduler.kvsieve_mode
    return core.scheduler.set_kvsieve_mode(mode)
