"""The parent's side of an arm: an engine in a process of its own, driven over a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from pairing.engine import serve
from pairing.spec import ArmSpec

MAX_IDLE_SHARE = 0.05
"""CPU that an idle arm may use, as a share of one core. vLLM's monitoring threads take about 1%."""


class BenchmarkError(RuntimeError):
    """The benchmark cannot go on, or must not report what it measured."""


def prepare_environment(threads: int) -> None:
    """Set what the arms inherit; must run before the first arm starts.

    Args:
        threads: OpenMP threads of an arm. With several, a thread that waits at a barrier
            burns CPU time, and on a shared machine it waits for whatever else is running:
            CPU seconds then measure the neighbours. With one they measure the work.
    """
    os.environ.update(
        OMP_NUM_THREADS=str(threads),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
    )


class Arm:
    """One engine process.

    Args:
        spec: What to run.
        log: File that receives everything the process prints.
    """

    def __init__(self, spec: ArmSpec, log: Path) -> None:
        self.spec = spec
        self.name = spec.name
        self._log = log
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(
            target=serve, args=(child_pipe, spec, str(log)), name=spec.name, daemon=True
        )
        self._process.start()
        child_pipe.close()
        self._stats = psutil.Process(self._process.pid)
        self._idle_since: tuple[float, float] | None = None
        self._idle = [0.0, 0.0]  # seconds waited, CPU seconds used meanwhile
        self.description: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        """Wait for the engine's start.

        Raises:
            BenchmarkError: It failed to start; the message ends with its log's last lines.
        """
        self.description = self._receive()
        self._mark_idle()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the process's `EngineArm`.

        Raises:
            BenchmarkError: The method failed, or the arm was not idle since its last call.
        """
        self._check_idle()
        self._pipe.send((method, args, kwargs))
        answer = self._receive()
        self._mark_idle()
        return answer

    def close(self) -> None:
        """End the process."""
        # An error means that it is gone already; what remains is to reap it.
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def _receive(self) -> Any:
        try:
            succeeded, answer = self._pipe.recv()
        except EOFError:
            succeeded, answer = False, "its process ended"
        if succeeded:
            return answer
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        raise BenchmarkError(f"arm {self.name!r} failed: {answer}\nEnd of {self._log}:\n{tail}")

    def _cpu_seconds(self) -> float:
        times = self._stats.cpu_times()
        return times.user + times.system

    def _mark_idle(self) -> None:
        self._idle_since = (time.monotonic(), self._cpu_seconds())

    def _check_idle(self) -> None:
        assert self._idle_since is not None, "wait_until_ready comes first"
        began, cpu = self._idle_since
        self._idle[0] += time.monotonic() - began
        self._idle[1] += self._cpu_seconds() - cpu
        # The kernel counts in hundredths of a second: short idleness is too coarse to judge.
        if self._idle[0] > 2 and self.idle_share > MAX_IDLE_SHARE:
            raise BenchmarkError(
                f"arm {self.name!r} used {self._idle[1]:.2f} s of CPU in {self._idle[0]:.1f} s of"
                " idleness, which disturbs the other arm"
            )

    @property
    def idle_share(self) -> float:
        """CPU used while idle, as a share of one core."""
        return self._idle[1] / self._idle[0] if self._idle[0] else 0.0


class Lab:
    """The arms that are alive. Arms of the same spec are kept between measurements.

    Args:
        log_folder: Where the arms' logs go.
        say: Prints a line of progress.
    """

    def __init__(self, log_folder: Path, say: Any) -> None:
        self.say = say
        self._log_folder = log_folder
        self._arms: dict[ArmSpec, Arm] = {}
        self._num_started = 0
        self.idle_shares: dict[str, float] = {}

    def arms(self, specs: Sequence[ArmSpec]) -> list[Arm]:
        """The arms of these specs, started where needed; all other arms are closed.

        Arms are started together, because nothing is timed meanwhile.
        """
        for spec in [spec for spec in self._arms if spec not in specs]:
            self._close(spec)
        started = [spec for spec in specs if spec not in self._arms]
        if started:
            self.say(f"starting {', '.join(spec.name for spec in started)}")
        for spec in started:
            self._num_started += 1
            log = self._log_folder / f"{self._num_started:02d}-{spec.name.replace(' ', '-')}.log"
            self._arms[spec] = Arm(spec, log)
        for spec in started:
            self._arms[spec].wait_until_ready()
        return [self._arms[spec] for spec in specs]

    def close(self) -> None:
        """End every arm."""
        for spec in list(self._arms):
            self._close(spec)

    def _close(self, spec: ArmSpec) -> None:
        arm = self._arms.pop(spec)
        arm.close()
        self.idle_shares[arm.name] = max(self.idle_shares.get(arm.name, 0.0), arm.idle_share)


def alternating(arms: Sequence[Arm], repeat: int) -> list[Arm]:
    """The arms in the order of a repeat: forward, backward, forward, ... (ABBA)."""
    return list(arms) if repeat % 2 == 0 else list(reversed(arms))
