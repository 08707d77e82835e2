"""The servers of all arms: alive together, or one after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

import httpx
from rich.console import Console

from kvsieve.bench import watch
from kvsieve.bench.errors import BenchError
from kvsieve.bench.options import Arm, Options
from kvsieve.bench.prompts import document
from kvsieve.bench.schema import ArmRecord
from kvsieve.serving.metrics import parse_metrics, read_pool
from kvsieve.serving.server import Server, ServerError, running

NEEDED_METRICS = (watch.USAGE, watch.RUNNING, watch.WAITING, watch.PREEMPTIONS)


class Fleet:
    """A server for every arm, inside a `with` block.

    Attributes:
        records: What is known of each arm's server since it was started last.
    """

    def __init__(self, options: Options, console: Console) -> None:
        self.records: dict[str, ArmRecord] = {}
        self._options = options
        self._console = console
        self._stack = ExitStack()
        self._alive: dict[str, Server] = {}
        self._words: tuple[int, ...] = ()

    def __enter__(self) -> Fleet:
        try:
            if not self._options.one_at_a_time:
                for arm in self._options.arms:
                    server = self._stack.enter_context(self._started(arm))
                    self._alive[arm.name] = server
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        # With the error, so that the logs of a failed run are kept.
        return self._stack.__exit__(kind, error, trace)

    @contextmanager
    def use(self, arm: Arm) -> Iterator[Server]:
        """The arm's server, healthy and with nothing to do."""
        if arm.name in self._alive:
            self._alive[arm.name].check_alive()
            yield self._alive[arm.name]
            return
        with self._started(arm) as server:
            yield server

    def others(self, arm: Arm) -> list[int]:
        """Process ids of the servers that are alive and not this arm's."""
        return [server.pid for name, server in self._alive.items() if name != arm.name]

    def words(self, server: Server) -> tuple[int, ...]:
        """Real prose as token ids, from whichever server is asked first."""
        if not self._words:
            body = {"model": server.served_name, "prompt": document(), "add_special_tokens": False}
            with _client() as http:
                answer = http.post(f"{server.url}/tokenize", json=body)
            if answer.status_code != httpx.codes.OK:
                raise BenchError(f"{server.url}/tokenize refused: {answer.text[:200]}")
            self._words = tuple(answer.json()["tokens"])
        return self._words

    @contextmanager
    def _started(self, arm: Arm) -> Iterator[Server]:
        with running(self._options.spec(arm), console=self._console) as server:
            self.records[arm.name] = _describe(arm, server)
            yield server


def _client() -> httpx.Client:
    return httpx.Client(trust_env=False, timeout=60.0)


def _describe(arm: Arm, server: Server) -> ArmRecord:
    """What the server says of itself.

    Raises:
        BenchError: It does not show what the benchmark reads.
    """
    with _client() as http:
        found = parse_metrics(http.get(f"{server.url}/metrics").text)
        models = http.get(f"{server.url}/v1/models").json()["data"]
        try:
            pool = read_pool(http, server.url)
        except ServerError:
            pool = None  # Without a given size vLLM does not say it on every platform.
    missing = [name for name in NEEDED_METRICS if name not in found]
    if missing:
        raise BenchError(
            f"arm {arm.name}: {server.url}/metrics lacks {', '.join(missing)}. The benchmark"
            " reads what vLLM 0.32 writes there"
        )
    return ArmRecord(
        name=arm.name,
        settings=None if arm.settings is None else dict(arm.settings),
        start_s=round(server.start_seconds, 1),
        block_size=pool.block_size if pool else None,
        num_blocks=pool.num_blocks if pool else None,
        pool_bytes=pool.pool_bytes if pool else None,
        max_model_len=models[0].get("max_model_len"),
    )
