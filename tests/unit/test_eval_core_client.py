"""The client against a small server: what vLLM answers, and whatever else may come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvsieve.serving.client import Client, Completion, RequestError
from tests.unit.vllm_double import Double, Handler, refusal, running_double


@pytest.fixture
def double() -> Iterator[Double]:
    with running_double() as double:
        yield double


def ask(url: str, *, timeout_s: float = 30.0, model: str = "model", **options: Any) -> Completion:
    async def once() -> Completion:
        client = Client(url, model, timeout_s=timeout_s)
        try:
            return await client.complete([5, 6, 7], **{"max_tokens": 3, **options})
        finally:
            await client.close()

    return asyncio.run(once())


def error_of(url: str, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ask(url, **options)
    return caught.value


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_an_answer_is_read_whole(double: Double, end: str) -> None:
    found = ask(double.url + end, kv_budget=100, logprobs=20, forced_tokens=[9, 8])
    assert found.token_ids[:2] == (9, 8) and len(found.token_ids) == 3
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (3, 3, 0)
    assert found.finish_reason == "length" and found.report["budget"] == 100
    assert [step.token_id for step in found.logprobs] == list(found.token_ids)
    assert all(step.top[step.token_id] == step.logprob for step in found.logprobs)


def test_what_is_asked_is_greedy_whatever_the_model_says(double: Double) -> None:
    ask(double.url, kv_budget="25%", stop=["\n"], ignore_eos=True, min_tokens=2)
    (body,) = double.bodies
    assert body["temperature"] == 0 and body["repetition_penalty"] == 1
    assert body["vllm_xargs"] == {"kv_budget": "25%"}
    assert (body["stop"], body["ignore_eos"], body["min_tokens"]) == (["\n"], True, 2)
    ask(double.url)
    assert "vllm_xargs" not in double.bodies[1]


def test_stock_answers_without_a_report(double: Double) -> None:
    double.reports = lambda report: None
    assert ask(double.url).report is None


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_refusal_is_told_in_the_servers_words(double: Double, is_streamed: bool) -> None:
    found = error_of(double.url, kv_budget=3, stream=is_streamed)
    assert found.status == 400
    assert str(found) == "the server answered 400: kv_budget 3 is too small: the smallest is 68"
    found = error_of(double.url, model="x", stream=is_streamed)
    assert (found.status, "The model `x` does not exist" in str(found)) == (404, True)


@pytest.mark.parametrize(
    ("status", "content", "kind", "said"),
    [
        (500, refusal("EngineCore died", 500)[1], "application/json", "500: EngineCore died"),
        (502, b"<html>" + b"x" * 9000, "text/html", "502: "),
        (401, {"error": "Unauthorized"}, "application/json", "401: "),
        (503, b"", "text/plain", "503: "),
        (200, b"{", "application/json", "does not answer as vLLM does"),
        (200, b"hello", "text/plain", "does not answer as vLLM does"),
        (200, b"\xff\xfe", "application/json", "does not answer as vLLM does"),
        (200, {}, "application/json", "does not answer as vLLM does"),
        (200, {"choices": []}, "application/json", "does not answer as vLLM does"),
        (200, [1], "application/json", "does not answer as vLLM does"),
        (200, {"choices": [{"text": "a"}]}, "application/json", "does not answer as vLLM does"),
    ],
)
def test_any_answer_is_an_answer_or_a_sentence(
    double: Double, status: int, content: Any, kind: str, said: str
) -> None:
    def fail(handler: Handler, body: dict[str, Any]) -> bool:
        handler.send(status, content, kind)
        return True

    double.fail = fail
    found = error_of(double.url)
    assert said in str(found) and len(str(found)) < 700
    assert found.status == (None if status == 200 else status)


def test_tokens_that_are_not_named_by_id_are_refused(double: Double) -> None:
    def fail(handler: Handler, body: dict[str, Any]) -> bool:
        status, content = double.answer(body)
        content["choices"][0]["logprobs"]["tokens"] = [" the", " cat", " sat"]
        handler.send(status, content)
        return True

    double.fail = fail
    assert "does not answer as vLLM does" in str(error_of(double.url, logprobs=20))


def test_a_server_that_is_gone_is_named(double: Double) -> None:
    for is_streamed in (False, True):
        found = error_of("http://127.0.0.1:9", stream=is_streamed)
        assert found.status is None
        assert "no answer from http://127.0.0.1:9/v1: ConnectError" in str(found)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "", "http://[x", "http://x:port"])
def test_what_is_no_address_is_said_to_be_none(url: str) -> None:
    found = error_of(url)
    assert found.status is None and ("no answer from" in str(found) or "no address" in str(found))


def test_an_answer_that_breaks_off_is_told(double: Double) -> None:
    def fail(handler: Handler, body: dict[str, Any]) -> bool:
        handler.send(200, b'{"choices": [', announced=5000)
        return True

    double.fail = fail
    assert "RemoteProtocolError" in str(error_of(double.url))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_longest_wait_ends(double: Double, is_streamed: bool) -> None:
    def fail(handler: Handler, body: dict[str, Any]) -> bool:
        if is_streamed:
            handler.send_response(200)
            handler.send_header("Content-Type", "text/event-stream")
            handler.end_headers()
            handler.wfile.write(chunk("a"))
            handler.wfile.flush()
        time.sleep(1.0)
        handler.close_connection = True
        return True

    double.fail = fail
    found = error_of(double.url, timeout_s=0.3, stream=is_streamed)
    assert str(found) == f"no answer from {double.url}/v1 within 0.3 s"


def chunk(text: str | None, **more: Any) -> bytes:
    """A piece of a stream; None is the piece that holds the usage."""
    choices: list[dict[str, Any]] = []
    if text is not None:
        choices = [{"index": 0, "text": text, "finish_reason": None, **more.pop("choice", {})}]
    content = {"id": "cmpl-1", "object": "text_completion", "choices": choices, **more}
    return b"data: " + json.dumps(content).encode() + b"\n\n"


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
END = chunk("b", choice={"finish_reason": "length"}, kv_transfer_params={"kvsieve": {"mode": "x"}})


def stream(double: Double, *pieces: bytes, announced: int | None = None) -> None:
    def fail(handler: Handler, body: dict[str, Any]) -> bool:
        handler.send(200, b"".join(pieces), "text/event-stream", announced)
        return True

    double.fail = fail


def test_a_stream_is_read_to_its_end(double: Double) -> None:
    stream(double, chunk("a"), END, chunk(None, usage=USAGE), b"data: [DONE]\n\n")
    found = ask(double.url, stream=True)
    assert (found.text, found.finish_reason, found.report) == ("ab", "length", {"mode": "x"})
    assert (found.prompt_tokens, found.cached_tokens, len(found.token_times)) == (3, None, 2)
    assert found.sent_at <= found.token_times[0] <= found.token_times[1]
    assert double.bodies[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("pieces", "announced", "said"),
    [
        ((), None, "broke off before its end"),
        ((chunk("a"),), None, "broke off before its end"),
        ((chunk("a"), END), None, "broke off before its end"),
        ((chunk("a"), chunk(None, usage=USAGE)), None, "broke off before its end"),
        ((chunk("a"),), 5000, "no answer from"),
        ((chunk("a"), b"data: {\n\n"), None, "does not answer as vLLM does"),
        (
            (chunk("a"), b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'),
            None,
            "broke off: EngineCore died",
        ),
    ],
)
def test_a_stream_that_breaks_off_is_told(
    double: Double, pieces: tuple[bytes, ...], announced: int | None, said: str
) -> None:
    stream(double, *pieces, announced=announced)
    assert said in str(error_of(double.url, stream=True))


def test_the_models_of_a_server(double: Double) -> None:
    async def models() -> dict[str, int | None]:
        client = Client(double.url, "model")
        try:
            return await client.models()
        finally:
            await client.close()

    assert asyncio.run(models()) == {"model": 4096}
    double.max_model_len = None
    with pytest.raises(RequestError, match="404"):
        asyncio.run(models())
