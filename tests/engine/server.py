"""A server as a user starts it: a subprocess on a free loopback port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

import httpx

START_LIMIT_S = 300


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """Starts a server command and waits until it is healthy; stops it with Ctrl-C.

    Args:
        command: The command and its arguments.
        port: The port that it was told to listen on.
        log: File for its output.
    """

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._command = command
        self.exit_status: int | None = None

    def __enter__(self) -> Server:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_CI_ENV": "1"}
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                self._command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        """Send Ctrl-C, and be rude only if that does not help."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self.exit_status = self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self.exit_status = self._process.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
