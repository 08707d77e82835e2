"""The route and the command that show and switch a server's mode, without an engine."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from kvsieve.cli.main import app as commands
from kvsieve.core.errors import KvsieveError
from kvsieve.engine.frontend import mode_call, mode_route

PATH = "/v1/kvsieve/mode"


class EngineCore:
    """An engine core's process, client and scheduler in one."""

    def __init__(self) -> None:
        self.kvsieve_mode = "sieve"
        self.scheduler = self

    def set_kvsieve_mode(self, mode: str) -> str:
        previous, self.kvsieve_mode = self.kvsieve_mode, mode
        return previous

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        assert method == "kvsieve_mode"
        return mode_call._kvsieve_mode(self, *args)


def make_client(settings: dict[str, Any] | None, with_engine: bool = True) -> TestClient:
    """A server as vLLM builds it: routes first, the engine's client later."""
    app = FastAPI()
    additional = {} if settings is None else {"kvsieve": settings}
    app.state.args = SimpleNamespace(additional_config=additional)
    mode_route._register_routers(lambda app: None, app)
    if with_engine:
        app.state.engine_client = SimpleNamespace(
            engine_core=EngineCore(), vllm_config=SimpleNamespace(additional_config=additional)
        )
    return TestClient(app)


def test_the_mode_is_shown_and_switched() -> None:
    client = make_client({"mode_endpoint": True})

    assert client.get(PATH).json() == {"mode": "sieve"}
    assert client.post(PATH, json={"mode": "shadow"}).json() == {
        "mode": "shadow",
        "previous": "sieve",
    }
    assert client.get(PATH).json() == {"mode": "shadow"}


def test_switching_must_be_allowed() -> None:
    client = make_client({})
    answer = client.post(PATH, json={"mode": "shadow"})

    assert answer.status_code == 403
    assert "mode_endpoint" in answer.json()["error"]["message"]
    assert client.get(PATH).json() == {"mode": "sieve"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'"full"', "one key 'mode'"),
        (b"{}", "one key 'mode'"),
        (b'{"mode": "full", "x": 1}', "one key 'mode'"),
        (b'{"mode": "off"}', "one of sieve, shadow, full (given: 'off')"),
        (b'{"mode": ["full"]}', "one of sieve, shadow, full"),
        (b'{"mode": null}', "one of sieve, shadow, full (given: None)"),
    ],
)
def test_a_bad_body_is_answered_with_a_sentence(body: bytes, words: str) -> None:
    answer = make_client({"mode_endpoint": True}).post(PATH, content=body)

    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_without_configuration_there_is_no_route() -> None:
    assert make_client(None).get(PATH).status_code == 404


def test_a_server_without_engine_says_so() -> None:
    client = make_client({}, with_engine=False)

    assert client.get(PATH).status_code == 503
    assert client.post(PATH, json={"mode": "full"}).status_code == 503


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Request]:
    """Sends the command's requests to a server in this process; returns what was sent."""
    client = make_client({"mode_endpoint": True})
    sent: list[httpx.Request] = []

    def request(method: str, url: str, *, timeout: float, **kwargs: Any) -> httpx.Response:
        answer = client.request(method, httpx.URL(url).path, **kwargs)
        sent.append(answer.request)
        return answer

    monkeypatch.setattr(httpx, "request", request)
    return sent


def run(*arguments: str) -> Any:
    return CliRunner().invoke(commands, ["mode", *arguments])


def test_the_command_shows_and_switches(answers: list[httpx.Request]) -> None:
    assert run().stdout == "sieve\n"
    assert run("full", "--url", "http://127.0.0.1:9/v1/").stdout == "full (was sieve)\n"
    assert json.loads(run("--json").stdout) == {"mode": "full"}
    assert run("sieve", "--api-key", "k").exit_code == 0
    assert answers[-1].headers["Authorization"] == "Bearer k"
    assert "Authorization" not in answers[0].headers


def test_the_command_knows_the_modes() -> None:
    done = run("off")

    assert done.exit_code == 2
    assert "sieve, shadow, full" in " ".join(done.output.split())


def refusal(monkeypatch: pytest.MonkeyPatch, answer: httpx.Response | Exception) -> str:
    """What the command says to an answer of the server, or to none."""

    def request(method: str, url: str, **kwargs: Any) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        answer.request = httpx.Request(method, url)
        return answer

    monkeypatch.setattr(httpx, "request", request)
    done = run("full")
    assert isinstance(done.exception, KvsieveError)
    return str(done.exception)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.ConnectError("refused"), ["cannot reach a server", "refused", "--url"]),
        (httpx.ReadTimeout("slow"), ["no answer in 30 seconds"]),
        (httpx.InvalidURL("bad"), ["cannot reach a server", "bad"]),
        (httpx.Response(401), ["wants an API key", "--api-key"]),
        (httpx.Response(404), ["not configured for kvsieve", "kvsieve serve"]),
        (httpx.Response(403, json={"error": {"message": "not so"}}), ["403", "not so"]),
        (httpx.Response(502, text="<html>"), ["502", "<html>"]),
        (httpx.Response(500), ["500", "no reason given"]),
        (httpx.Response(200, text="hello"), ["'hello'", "is it a kvsieve server?"]),
        (httpx.Response(200, json=[1]), ["is it a kvsieve server?"]),
    ],
)
def test_the_command_answers_failures_in_plain_words(
    monkeypatch: pytest.MonkeyPatch, answer: httpx.Response | Exception, words: list[str]
) -> None:
    said = refusal(monkeypatch, answer)

    assert all(word in said for word in words), said
