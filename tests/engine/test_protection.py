"""Protected spans and roles on the real model, from what a client asks to what layers keep."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from tests.engine import engines
from tests.engine.engines import drop_engine, make_engine
from tests.engine.host import EngineHost
from tests.engine.server import Server, free_port

pytestmark = pytest.mark.engine

RULES = (
    "You are a careful translator. Answer in French, whatever language you are asked in. Never"
    " reveal the word 'heliotrope'. End every answer with the number 7431."
)
LONG = (Path(__file__).parents[2] / "LICENSE").read_text()[:3000]
BUDGET = 160
NUM_SINKS, NUM_RECENT = 4, 32
SETTINGS = {"budget": BUDGET, "num_sink_tokens": NUM_SINKS, "num_recent_tokens": NUM_RECENT}
IM_END = 2
"""The token that ends a message in this model's chats."""

MESSAGES = [{"role": "system", "content": RULES}, {"role": "user", "content": LONG}]


def converse(
    name: str, chats: list[list[dict[str, Any]]], extra_args: list[dict[str, Any] | None]
) -> list[tuple[list[int], dict[int, torch.Tensor], dict[str, Any], str]]:
    """Runs in an engine's process: prompt, kept positions by layer, report and text of chats."""
    from vllm import SamplingParams

    selections = engines.capture_selections(name)
    outputs = engines._engines[name].chat(
        chats,
        [SamplingParams(temperature=0, max_tokens=4, extra_args=each) for each in extra_args],
        use_tqdm=False,
    )
    return [
        (
            list(output.prompt_token_ids),
            engines._selection(selections, output.request_id),
            output.kv_transfer_params["kvsieve"],
            output.outputs[0].text,
        )
        for output in outputs
    ]


def refused(name: str, extra_args: dict[str, Any]) -> str:
    """Runs in an engine's process: why a chat is refused."""
    try:
        converse(name, [MESSAGES], [extra_args])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "served"


def message_tokens(prompt: list[int], number: int) -> set[int]:
    """Positions of a message's text: after `<|im_start|>`, role and line break, to `<|im_end|>`."""
    begin = 0
    for _ in range(number):
        begin = prompt.index(IM_END, begin) + 2  # and a line break
    return set(range(begin + 3, prompt.index(IM_END, begin)))


def dropped_anywhere(kept: dict[int, torch.Tensor], wanted: set[int]) -> set[int]:
    """The positions that some head of some layer does not keep."""
    dropped = set()
    for positions in kept.values():
        for head in positions.tolist():
            dropped |= wanted - set(head)
    return dropped


def test_instructions_are_dropped_unless_they_are_protected(
    v1_host: EngineHost, real_model: str
) -> None:
    options = {"max_model_len": 2048}
    v1_host.call(make_engine, "protection", real_model, SETTINGS, **options)
    rules = [None, {"kv_protect": "system"}, {"kv_protect": "3:20,100:110"}]

    bare, by_role, by_span = v1_host.call(converse, "protection", [MESSAGES] * 3, rules)

    system = message_tokens(bare[0], 0)
    assert len(system) > 30
    assert bare[0] == by_role[0] == by_span[0]
    assert len(bare[1]) == len(by_role[1]) == len(by_span[1]) >= 20
    assert dropped_anywhere(bare[1], system)
    assert not dropped_anywhere(by_role[1], system)
    assert not dropped_anywhere(by_span[1], {*range(3, 20), *range(100, 110)})
    assert dropped_anywhere(by_span[1], system)
    always = {*range(NUM_SINKS), *range(len(bare[0]) - NUM_RECENT, len(bare[0]))}
    for (_, kept, report, _), protected in (
        (bare, set()),
        (by_role, system),
        (by_span, {*range(3, 20), *range(100, 110)}),
    ):
        # Protection takes its room from other tokens: not one more is stored.
        assert {positions.shape for positions in kept.values()} == {bare[1][29].shape}
        assert report["stored_tokens"] == bare[2]["stored_tokens"]
        assert report["protected_tokens"] == len(always | protected)


def test_a_wish_of_one_request_leaves_its_neighbours_alone(v1_host: EngineHost) -> None:
    other = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": LONG[500:]}]
    alone = v1_host.call(converse, "protection", [other], [None])

    together = v1_host.call(
        converse, "protection", [MESSAGES, other], [{"kv_protect": "system"}, None]
    )

    assert alone[0][2]["protected_tokens"] == together[1][2]["protected_tokens"] == 36
    assert alone[0][3] == together[1][3]
    assert not dropped_anywhere(together[0][1], message_tokens(together[0][0], 0))


def test_a_role_that_vllm_joins_to_another_is_found(v1_host: EngineHost, real_model: str) -> None:
    # This template has no developers: vLLM makes one system message of both.
    rule = "Never use the passive voice."
    messages = [MESSAGES[0], {"role": "developer", "content": rule}, MESSAGES[1]]
    tokens = AutoTokenizer.from_pretrained(real_model).encode(rule, add_special_tokens=False)

    ((prompt, kept, report, _),) = v1_host.call(
        converse, "protection", [messages], [{"kv_protect": "developer"}]
    )

    end = prompt.index(IM_END)
    assert prompt[end - len(tokens) : end] == tokens
    assert not dropped_anywhere(kept, set(range(end - len(tokens), end)))
    assert report["protected_tokens"] == NUM_SINKS + NUM_RECENT + len(tokens)


@pytest.mark.parametrize(
    ("extra_args", "reason"),
    [
        ({"kv_protect": "tool"}, "no message has the role tool"),
        ({"kv_protect": "user"}, "protected (the first and the last ones among them)"),
        ({"kv_protect": "0:5000"}, "leaves the prompt"),
        ({"kv_protec": "system"}, "did you mean 'kv_protect'"),
    ],
)
def test_what_cannot_be_protected_is_refused(
    v1_host: EngineHost, extra_args: dict[str, Any], reason: str
) -> None:
    refusal = v1_host.call(refused, "protection", extra_args)

    assert refusal.startswith("VLLMValidationError")
    assert reason in refusal


def test_the_operator_protects_for_everyone(v1_host: EngineHost, real_model: str) -> None:
    settings = {**SETTINGS, "policy": "kvsieve", "protect_roles": ["system"]}
    v1_host.call(make_engine, "protection", real_model, settings, max_model_len=2048)
    twice = [
        {
            "role": "system",
            "content": [{"type": "text", "text": part} for part in RULES.split(". ")],
        },
        {"role": "user", "content": LONG},
        {"role": "system", "content": "One more rule: be polite."},
        {"role": "user", "content": RULES},
    ]

    once, double, released = v1_host.call(
        converse, "protection", [MESSAGES, twice, MESSAGES], [None, None, {"kv_protect": "none"}]
    )

    assert not dropped_anywhere(once[1], message_tokens(once[0], 0))
    first, second = message_tokens(double[0], 0), message_tokens(double[0], 2)
    assert len(first) > 30 and 4 < len(second) < 12
    assert not dropped_anywhere(double[1], first | second)
    assert dropped_anywhere(released[1], message_tokens(released[0], 0))
    assert released[2]["protected_tokens"] == NUM_SINKS + NUM_RECENT
    v1_host.call(drop_engine, "protection")


@pytest.fixture(scope="module")
def server(real_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    settings = {**SETTINGS, "protect_roles": ["system"]}
    command = [
        *[sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32"],
        *["--enforce-eager", "--max-model-len", "2048", "--block-size", "32"],
        *["--kv-cache-memory-bytes", "500M", "--max-num-seqs", "8", "--enable-scale-out"],
        *["--additional-config", json.dumps({"kvsieve": settings}), "--served-model-name", "model"],
        *["--model", real_model, "--host", "127.0.0.1", "--port", str(port)],
    ]
    with Server(command, port, tmp_path_factory.mktemp("protection") / "log") as server:
        yield server
    log = server.log.read_text()
    assert "kvsieve: could not" not in log, log[-4000:]


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": "model", **body}, timeout=60)


def ask(
    server: Server, messages: Any = MESSAGES, path: str = "/v1/chat/completions", **more: Any
) -> httpx.Response:
    return post(server, path, **{"messages": messages, "max_tokens": 4, "temperature": 0, **more})


def reports(answer: dict[str, Any]) -> list[dict[str, Any]]:
    field = answer["kv_transfer_params"]["kvsieve"]
    return field.get("choices", [field])


@pytest.fixture(scope="module")
def num_system(server: Server) -> int:
    """Tokens of the system message alone, beyond the sinks."""
    with_rules = post(server, "/tokenize", messages=MESSAGES).json()["tokens"]
    return len(message_tokens(with_rules, 0) - set(range(NUM_SINKS)))


def test_every_door_that_renders_a_chat_protects_its_roles(server: Server, num_system: int) -> None:
    protected = [NUM_SINKS + NUM_RECENT + num_system]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    parts = [{"role": "system", "content": [{"type": "text", "text": RULES}]}, MESSAGES[1]]

    def seen(answer: httpx.Response) -> list[int]:
        assert answer.status_code == 200, answer.text
        return [report["protected_tokens"] for report in reports(answer.json())]

    assert seen(ask(server)) == protected
    assert seen(ask(server, parts)) == protected
    assert seen(ask(server, n=3, temperature=1)) == protected * 3
    assert seen(ask(server, tools=tools, tool_choice="none")) == protected
    batch = [MESSAGES, MESSAGES[1:], parts]
    # Without a system message this template writes one of its own, which is nobody's message.
    expected = [*protected, NUM_SINKS + NUM_RECENT, *protected]
    assert seen(ask(server, batch, "/v1/chat/completions/batch")) == expected
    assert seen(ask(server, MESSAGES[1:], "/v1/messages", system=RULES)) == protected
    responses = {"instructions": RULES, "input": LONG, "max_output_tokens": 4}
    assert seen(post(server, "/v1/responses", **responses)) == protected


def test_a_streamed_chat_protects_its_roles(server: Server, num_system: int) -> None:
    lines = ask(server, stream=True).text.split("\n\n")

    data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    (report,) = [d["kv_transfer_params"]["kvsieve"] for d in data if "kv_transfer_params" in d]
    assert report["protected_tokens"] == NUM_SINKS + NUM_RECENT + num_system


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("xargs", "reason"),
    [
        ({"kv_protect": "sytem"}, "did you mean 'system'"),
        ({"kv_protect": ["developer"]}, "no message has the role developer"),
        ({"kv_protect": "user"}, "raise kv_budget to at least"),
        ({"kv_budget": 68}, "this server protects messages of system (protect_roles)"),
        ({"kv_protect": "0:9000"}, "leaves the prompt"),
        ({"kv_budget": 3}, "parameter=kv_budget"),
    ],
)
def test_a_client_gets_status_400_before_anything_is_streamed(
    server: Server, xargs: dict[str, Any], reason: str, streamed: bool
) -> None:
    messages = [{"role": "system", "content": RULES * 2}, *MESSAGES[1:]]

    answer = ask(server, messages, vllm_xargs=xargs, stream=streamed)

    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]["message"]


def test_prompts_that_are_no_chats_have_spans_and_no_roles(server: Server) -> None:
    def complete(**xargs: Any) -> httpx.Response:
        return post(server, "/v1/completions", prompt=LONG, max_tokens=2, vllm_xargs=xargs)

    (report,) = reports(complete().json())
    assert report["protected_tokens"] == NUM_SINKS + NUM_RECENT
    for wish in ("50:60,100:120", ["50:60", "100:120"]):
        (report,) = reports(complete(kv_protect=wish).json())
        assert report["protected_tokens"] == NUM_SINKS + NUM_RECENT + 30
    refusal = complete(kv_protect="system")
    assert refusal.status_code == 400
    assert "only a chat whose messages this server renders" in refusal.text
    tokens = {
        "token_ids": list(range(1000, 1600)),
        "sampling_params": {"max_tokens": 2, "extra_args": {"kv_protect": "50:60"}},
    }
    (report,) = reports(post(server, "/inference/v1/generate", **tokens).json())
    assert report["protected_tokens"] == NUM_SINKS + NUM_RECENT + 10
