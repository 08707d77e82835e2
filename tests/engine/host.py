"""Engines for tests, in processes of their own: one per model runner, shared by modules.

vLLM decides on its runner, threads and Triton when it is imported, so each runner needs
a fresh interpreter. Test code runs *inside* that process as plain module-level functions
(`EngineHost.call`), where the scheduler, the block pool and the worker's sieve can be
looked at and driven step by step.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_CI_ENV": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Threads that spin at barriers make a step several times slower when cores are shared.
    "OMP_WAIT_POLICY": "PASSIVE",
    # vLLM compiles parts of its sampler even with enforce_eager; tests of compiled models
    # pass "0".
    "TORCHDYNAMO_DISABLE": "1",
}


class HostError(Exception):
    """A call failed inside the engine's process; carries its traceback as text."""


def _enable_v2_runner() -> None:
    """Model Runner V2 wants an active Triton driver; the interpreter needs none."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    import triton.backends

    class InterpreterBackend:
        class driver:  # noqa: N801 - the name that Triton's registry has
            @staticmethod
            def is_active() -> bool:
                return True

    triton.backends.backends["cpu"] = InterpreterBackend


def _serve(connection: Connection, runner: str, environment: dict[str, str]) -> None:
    os.environ.update(ENVIRONMENT)
    os.environ.update(environment)
    if runner == "v2":
        _enable_v2_runner()
    else:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*args, **kwargs))
        except Exception:
            answer = (False, traceback.format_exc())
        connection.send(answer)


class EngineHost:
    """A process that runs vLLM with one model runner.

    Args:
        runner: "v1" or "v2".
        environment: Further environment variables.
    """

    def __init__(self, runner: str, environment: dict[str, str] | None = None) -> None:
        self.runner = runner
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child, runner, environment or {}), daemon=True
        )
        self._process.start()
        child.close()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a module-level function in the engine's process and return its result.

        Raises:
            HostError: The function raised; or the process died.
        """
        self._connection.send((function, args, kwargs))
        try:
            succeeded, result = self._connection.recv()
        except EOFError:
            self._process.join()
            raise HostError(f"the engine process died with {self._process.exitcode}") from None
        if not succeeded:
            raise HostError(result)
        return result

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(timeout=5)
        self._process.kill()
