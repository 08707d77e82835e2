"""Proof in every response that a server can give, and the switch of its mode.

The server is plain vLLM with the plugin, as `vllm serve` runs it, so that what is shown
here holds without our own command too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.engine.host import EngineHost
from tests.engine.server import Server, free_port

pytestmark = pytest.mark.engine

LONG = (Path(__file__).parents[2] / "LICENSE").read_text()[:2500]
LONGER = LONG + LONG[:700]
SHORT = "Hello there"
SETTINGS = {"budget": 128, "mode_endpoint": True}
COMMAND = [
    *[sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32"],
    *["--enforce-eager", "--max-model-len", "2048", "--block-size", "32"],
    *["--kv-cache-memory-bytes", "500M", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"],
    "--enable-scale-out",
    *["--additional-config", json.dumps({"kvsieve": SETTINGS}), "--served-model-name", "model"],
]
MODE = "/v1/kvsieve/mode"


@pytest.fixture(scope="module")
def server(real_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    command = [*COMMAND, "--model", real_model, "--host", "127.0.0.1", "--port", str(port)]
    with Server(command, port, tmp_path_factory.mktemp("doors") / "log") as server:
        yield server
    # Whatever was asked of it, nothing of ours failed.
    log = server.log.read_text()
    assert "kvsieve: could not" not in log, log[-4000:]


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def report_of(response: Any) -> dict[str, Any]:
    return response.model_extra["kv_transfer_params"]["kvsieve"]


def last_chunks(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Reports by choice; and a report is in exactly the chunks that end a choice."""
    found = {}
    for chunk in chunks:
        ends = [choice for choice in chunk.choices if choice.finish_reason is not None]
        assert ("kv_transfer_params" in chunk.model_extra) == bool(ends)
        if ends:
            assert ends[0].index not in found
            found[ends[0].index] = report_of(chunk)
    return found


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "model", "messages": [{"role": "user", "content": text}], **more}


def completion(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"model": "model", "prompt": prompt, "max_tokens": 5, "temperature": 0, **more}


def test_a_streamed_completion(client: OpenAI) -> None:
    whole = client.completions.create(**completion(LONG))
    # As written on the wire: the one field more, and nothing else.
    with client.completions.with_streaming_response.create(
        **completion(LONG, stream=True, stream_options={"include_usage": True})
    ) as response:
        lines = [line for line in response.iter_lines() if line]

    assert lines[-1] == "data: [DONE]"
    *chunks, usage = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [chunk.get("kv_transfer_params") for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["kv_transfer_params"] == whole.model_extra["kv_transfer_params"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert set(chunks[-1]) - set(chunks[0]) <= {"kv_transfer_params", "system_fingerprint"}
    assert usage["choices"] == [] and "kv_transfer_params" not in usage
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole.choices[0].text
    assert report_of(whole)["sieved"] is True


def test_a_streamed_chat(client: OpenAI) -> None:
    chunks = client.chat.completions.create(**chat(LONG, max_tokens=5, stream=True))

    (report,) = last_chunks(list(chunks)).values()
    assert report["sieved"] is True
    assert report["stored_tokens"]["sieved"] < report["prompt_tokens"]


def test_a_stop_string_in_a_stream(client: OpenAI) -> None:
    text = client.completions.create(**completion(LONG, max_tokens=12)).choices[0].text
    word = text.split()[2]

    chunks = list(client.completions.create(**completion(LONG, stream=True, stop=[word])))

    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last_chunks(chunks)[0]["sieved"] is True


@pytest.mark.parametrize("streamed", [False, True])
def test_several_prompts_with_several_choices(client: OpenAI, streamed: bool) -> None:
    request = completion([LONG, SHORT, LONGER], n=2, temperature=1, stream=streamed)
    alone = [
        client.completions.create(**completion(prompt)).usage.prompt_tokens
        for prompt in (LONG, SHORT, LONGER)
    ]

    response = client.completions.create(**request)
    if streamed:
        reports = last_chunks(list(response))
        assert sorted(reports) == list(range(6))
        ordered = [reports[index] for index in range(6)]
    else:
        ordered = report_of(response)["choices"]

    assert [report["prompt_tokens"] for report in ordered] == [n for n in alone for _ in range(2)]
    assert [report["sieved"] for report in ordered] == [True, True, False, False, True, True]


def test_two_choices_of_a_chat(client: OpenAI) -> None:
    request = chat(LONG, max_tokens=5, n=2, temperature=1)

    response = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True))

    assert [report["sieved"] for report in report_of(response)["choices"]] == [True, True]
    assert len(response.choices) == 2
    streamed = last_chunks(chunks)
    assert sorted(streamed) == [0, 1]
    assert all(report["sieved"] for report in streamed.values())


def test_a_batch_of_conversations(server: Server) -> None:
    messages = [[{"role": "user", "content": text}] for text in (LONG, SHORT)]
    answer = httpx.post(
        f"{server.url}/v1/chat/completions/batch",
        json={"model": "model", "messages": messages, "max_tokens": 4},
        timeout=60,
    ).json()

    reports = answer["kv_transfer_params"]["kvsieve"]["choices"]
    assert [report["sieved"] for report in reports] == [True, False]


def test_responses(client: OpenAI) -> None:
    request = {"model": "model", "input": LONG, "max_output_tokens": 5, "temperature": 0}

    whole = client.responses.create(**request)
    events = list(client.responses.create(**request, stream=True))

    assert report_of(whole)["sieved"] is True
    assert events[-1].type == "response.completed"
    assert report_of(events[-1].response) == report_of(whole)


def test_messages(server: Server) -> None:
    """Anthropic's API: whole as vLLM shows it, streamed in the event that tells the end."""
    request = {**chat(LONG), "max_tokens": 5, "temperature": 0}
    whole = httpx.post(f"{server.url}/v1/messages", json=request, timeout=60).json()
    stream = httpx.post(f"{server.url}/v1/messages", json={**request, "stream": True}, timeout=60)

    events = [
        json.loads(line.removeprefix("data: "))
        for line in stream.text.splitlines()
        if line.startswith("data: ")
    ]
    assert whole["kv_transfer_params"]["kvsieve"]["sieved"] is True
    carrying = [event for event in events if "kv_transfer_params" in event]
    assert [event["type"] for event in carrying] == ["message_delta"]
    assert carrying[0]["kv_transfer_params"] == whole["kv_transfer_params"]


def test_tokens_in_tokens_out(server: Server) -> None:
    request = {
        "model": "model",
        "token_ids": list(range(1000, 1600)),
        "sampling_params": {"max_tokens": 3, "temperature": 0},
    }
    url = f"{server.url}/inference/v1/generate"
    whole = httpx.post(url, json=request, timeout=60).json()
    stream = httpx.post(url, json={**request, "stream": True}, timeout=60).text

    chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    assert whole["kv_transfer_params"]["kvsieve"]["prompt_tokens"] == 600
    assert [c["kv_transfer_params"] for c in chunks if "kv_transfer_params" in c] == [
        whole["kv_transfer_params"]
    ]
    assert "kv_transfer_params" in chunks[-1]


def test_the_mode_is_switched_while_the_server_runs(server: Server, client: OpenAI) -> None:
    url = server.url + MODE

    def sieved() -> bool:
        response = client.completions.create(**completion(LONG))
        return report_of(response)["sieved"]

    assert httpx.get(url).json() == {"mode": "sieve"}
    try:
        answer = httpx.post(url, json={"mode": "full"})
        assert answer.json() == {"mode": "full", "previous": "sieve"}
        assert httpx.get(url).json() == {"mode": "full"}
        assert sieved() is False
    finally:
        httpx.post(url, json={"mode": "sieve"})
    assert sieved() is True


def test_a_bad_mode_is_refused(server: Server) -> None:
    answer = httpx.post(server.url + MODE, json={"mode": "off"})

    assert answer.status_code == 400
    assert "one of sieve, shadow, full" in answer.json()["error"]["message"]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = [sys.executable, "-m", "kvsieve", "mode", *arguments]
    return subprocess.run(done, capture_output=True, text=True, timeout=60)


def test_the_command_switches_the_mode(server: Server) -> None:
    try:
        assert command("--url", server.url).stdout == "sieve\n"
        assert command("shadow", "--url", server.url).stdout == "shadow (was sieve)\n"
    finally:
        assert command("sieve", "--url", f"{server.url}/v1").returncode == 0


def test_the_command_finds_no_server() -> None:
    done = command("--url", f"http://127.0.0.1:{free_port()}")

    assert done.returncode == 2
    assert "cannot reach a server" in done.stderr
    assert "Traceback" not in done.stderr


def offline_reports(model: str) -> list[Any]:
    """Runs in an engine's process: what `LLM.generate` says of one choice and of three."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=2**28,
        skip_tokenizer_init=True,
        additional_config={"kvsieve": {"budget": 128}},
    )
    prompt = {"prompt_token_ids": list(range(1, 301))}
    outputs = [
        llm.generate(prompt, SamplingParams(n=n, max_tokens=4, detokenize=False), use_tqdm=False)
        for n in (1, 3)
    ]
    llm.llm_engine.engine_core.shutdown()
    return [output[0].kv_transfer_params["kvsieve"] for output in outputs]


def test_offline_choices(v1_host: EngineHost, tiny_llama: str) -> None:
    one, several = v1_host.call(offline_reports, tiny_llama)

    assert one["sieved"] is True
    assert [report["prompt_tokens"] for report in several["choices"]] == [300] * 3
    assert all(report["sieved"] for report in several["choices"])
