"""Clients that go away and processes that are killed: a sieved server fails as stock does."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from tests.engine.server import Server, free_port

pytestmark = pytest.mark.engine

LONG = (Path(__file__).parents[2] / "LICENSE").read_text()[:4000]
FLAGS = [
    *["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--block-size", "32"],
    *["--kv-cache-memory-bytes", "500M", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"],
]
STOCK = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
SIEVED = [sys.executable, "-m", "kvsieve", "serve"]
ARMS = ["stock", "sieved"]
BUDGET = ["--budget", "128"]


def start(arm: str, model: str, folder: Path) -> Server:
    """A server of an arm; its log says which."""
    port = free_port()
    command = [*(STOCK if arm == "stock" else SIEVED), model, *FLAGS, "--port", str(port)]
    return Server(command + (BUDGET if arm == "sieved" else []), port, folder / f"{arm}.log")


@pytest.fixture(scope="module")
def servers(
    real_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """One server per arm. The last test of this module that uses them kills their engines."""
    folder = tmp_path_factory.mktemp("faults")
    with ExitStack() as stack:
        yield {arm: stack.enter_context(start(arm, real_model, folder)) for arm in ARMS}


def request(model: str, prompt: str, max_tokens: int, **more: object) -> dict[str, object]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


def answer(server: Server, body: dict[str, object]) -> str:
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    response.raise_for_status()
    return response.json()["choices"][0]["text"]


def gauges(server: Server) -> dict[str, float]:
    """Running and waiting requests, and the share of the cache that is in use."""
    wanted = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    found = {}
    for line in httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines():
        name = line.split("{")[0].removeprefix("vllm:")
        if name in wanted:
            found[name] = float(line.rsplit(" ", 1)[1])
    assert set(found) == set(wanted), found
    return found


def wait_until(true: Callable[[], bool], limit_s: float = 60) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.1)
    return true()


def is_idle(server: Server) -> bool:
    return not any(gauges(server).values())


def leave_while_it_decodes(server: Server, body: dict[str, object]) -> None:
    """Read a few chunks of a stream, then close the connection."""
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=120
    ) as stream:
        assert stream.status_code == 200
        for _, _line in zip(range(6), stream.iter_lines(), strict=False):
            pass


def leave_while_it_reads(server: Server, body: dict[str, object]) -> None:
    """Send a long prompt and close the connection before there can be an answer."""
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.2))


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("leave", [leave_while_it_decodes, leave_while_it_reads])
def test_a_client_that_leaves_costs_nothing(
    servers: dict[str, Server],
    real_model: str,
    arm: str,
    leave: Callable[[Server, dict[str, object]], None],
) -> None:
    server = servers[arm]
    # A prompt that no other test caches.
    prompt = f"{leave.__name__} {LONG}"
    leave(server, request(real_model, prompt, 600))

    assert wait_until(lambda: is_idle(server)), gauges(server)
    # The first uses what the client left in the prefix cache, the second its own.
    first, second = (answer(server, request(real_model, prompt, 12)) for _ in range(2))
    assert first == second != ""
    assert wait_until(lambda: is_idle(server)), gauges(server)


@pytest.mark.parametrize("arm", ARMS)
def test_many_clients_leave_and_one_stays(
    servers: dict[str, Server], real_model: str, arm: str
) -> None:
    server = servers[arm]
    body = request(real_model, LONG[1000:3000], 40)
    expected = answer(server, body)
    stayed: list[str] = []
    stays = threading.Thread(target=lambda: stayed.append(answer(server, body)))
    leaving = [
        threading.Thread(
            target=leave_while_it_decodes,
            args=(server, request(real_model, LONG[offset : offset + 1500], 600)),
        )
        for offset in range(0, 1000, 200)
    ]
    for thread in (*leaving[:2], stays, *leaving[2:]):
        thread.start()
    for thread in (*leaving, stays):
        thread.join()

    assert stayed == [expected]
    assert wait_until(lambda: is_idle(server)), gauges(server)


@dataclass
class Death:
    """What clients and operators see of a server whose engine died.

    Attributes:
        stream: How a streamed answer ended: the error's code, or the transport's error.
        whole: Status and error type of an answer that was not streamed.
        exit_status: The server's.
        words: Which of `LOG_WORDS` its log has.
        frames: Lines of kvsieve in tracebacks, but for what errors pass through.
        orphans: Processes of the server that outlived it.
    """

    stream: str = ""
    whole: str = ""
    exit_status: int | None = None
    words: list[str] = field(default_factory=list)
    frames: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)


LOG_WORDS = ("EngineDeadError", "died unexpectedly", "Engine core proc")
PASSED_THROUGH = "frontend/stream.py"
"""vLLM's own errors pass through this file on their way to a streaming client."""


def processes(server: Server) -> dict[str, psutil.Process]:
    """The server's child processes by vLLM's name for them ("EngineCore", "Worker")."""
    found = {}
    for child in psutil.Process(server._process.pid).children(recursive=True):
        for title in ("EngineCore", "Worker"):
            if any(f"VLLM::{title}" in word for word in [child.name(), *child.cmdline()]):
                found[title] = child
    return found


def end_of_stream(server: Server, body: dict[str, object], begun: threading.Event) -> str:
    """How a streamed answer ended."""
    try:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=120
        ) as stream:
            for line in stream.iter_lines():
                data = line.removeprefix("data: ")
                if data.startswith("{") and (error := json.loads(data).get("error")):
                    return f"error {error.get('code')} {error.get('type')}"
                if data == "[DONE]":
                    return "done"
                if data.startswith("{"):
                    begun.set()
    except httpx.TransportError as error:
        return type(error).__name__
    return "closed"


def end_of_answer(server: Server, body: dict[str, object]) -> str:
    """Status of an answer that is not streamed."""
    try:
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    except httpx.TransportError as error:
        return type(error).__name__
    if response.status_code == 200:
        return f"200 {response.text[-500:]}"
    return f"{response.status_code} {response.json()['error']['type']}"


def kill_during_requests(server: Server, model: str, title: str) -> Death:
    """SIGKILL a process of a server while it answers two requests."""
    death = Death()
    begun = threading.Event()

    def stream() -> None:
        death.stream = end_of_stream(server, request(model, LONG, 900), begun)

    def whole() -> None:
        death.whole = end_of_answer(server, request(model, LONG[:2000], 900))

    threads = [threading.Thread(target=stream), threading.Thread(target=whole)]
    for thread in threads:
        thread.start()
    assert begun.wait(120)
    children = psutil.Process(server._process.pid).children(recursive=True)
    assert all(thread.is_alive() for thread in threads), f"answered already: {death}"
    os.kill(processes(server)[title].pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert wait_until(lambda: server._process.poll() is not None, 90), "the server lives on"
    server.stop()
    death.exit_status = server.exit_status
    log = server.log.read_text()
    death.words = [word for word in LOG_WORDS if word in log]
    death.frames = [
        line
        for line in log.splitlines()
        if "kvsieve/engine" in line and "File" in line and PASSED_THROUGH not in line
    ]
    _, alive = psutil.wait_procs(children, timeout=30)
    death.orphans = [" ".join(child.cmdline()) for child in alive]
    return death


def check_deaths(deaths: dict[str, Death]) -> None:
    assert deaths["sieved"] == deaths["stock"]
    assert deaths["sieved"].orphans == []
    assert deaths["sieved"].stream != "done"
    assert not deaths["sieved"].whole.startswith("200")
    # Nothing of kvsieve failed.
    assert deaths["sieved"].frames == []


def test_a_killed_engine_core_ends_the_server_as_stock(
    servers: dict[str, Server], real_model: str
) -> None:
    check_deaths(
        {arm: kill_during_requests(servers[arm], real_model, "EngineCore") for arm in ARMS}
    )


def test_a_killed_worker_ends_the_server_as_stock(real_model: str, tmp_path: Path) -> None:
    deaths = {}
    for arm in ARMS:
        with start(arm, real_model, tmp_path) as server:
            deaths[arm] = kill_during_requests(server, real_model, "Worker")
    check_deaths(deaths)
