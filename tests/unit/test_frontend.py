"""Reports on their way into responses and streams, without an engine."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from kvsieve.engine.frontend import doors
from kvsieve.engine.frontend.choices import finished_reports, joined, report_of, reports_of
from kvsieve.engine.frontend.parallel import with_siblings
from kvsieve.engine.frontend.sse import event_data, with_field
from kvsieve.engine.frontend.stream import CarriedOver, LastChunks, Tap, amended
from kvsieve.engine.wrapping import wrap

A = {"sieved": True, "prompt_tokens": 100}
B = {"sieved": False, "prompt_tokens": 7}
DONE = "data: [DONE]\n\n"


def chunk(index: int = 0, finish: str | None = None, text: str = "x", **more: Any) -> str:
    choice = {"index": index, "text": text, "finish_reason": finish}
    data = {"id": "cmpl-1", "choices": [choice], **more}
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


def output(kv: dict[str, Any] | None, *choices: tuple[int, str | None]) -> SimpleNamespace:
    """As much of a `RequestOutput` as is looked at: index and finish reason of its outputs."""
    outputs = [SimpleNamespace(index=index, finish_reason=finish) for index, finish in choices]
    return SimpleNamespace(kv_transfer_params=kv, outputs=outputs)


async def source(*items: Any) -> AsyncGenerator[Any, None]:
    for item in items:
        yield item


async def collect(stream: Any) -> list[Any]:
    return [item async for item in stream]


def test_the_report_of_a_choice_is_found_alone_and_among_several() -> None:
    assert report_of({"kvsieve": A}, 0) == A
    assert report_of({"kvsieve": {"choices": [A, B]}}, 1) == B
    assert report_of({"kvsieve": {"choices": [A, None]}}, 1) is None
    assert report_of({"kvsieve": {"choices": [A]}}, 1) is None
    assert report_of({"other": 1}, 0) is None
    assert report_of(None, 0) is None
    assert reports_of(output({"kvsieve": {"choices": [A, B]}}, (1, "stop"), (0, "stop"))) == [B, A]


def test_one_report_is_plain_and_several_are_a_list() -> None:
    assert joined(None, [A]) == {"kvsieve": A}
    assert joined({"other": 1, "kvsieve": B}, [A, B]) == {
        "other": 1,
        "kvsieve": {"choices": [A, B]},
    }


def test_only_choices_that_end_count() -> None:
    both = {"kvsieve": {"choices": [A, B]}}

    assert finished_reports(output(both, (0, None), (1, "length"))) == {1: B}
    assert finished_reports(output(both, (0, "stop"), (1, "stop")), first=2) == {2: A, 3: B}
    assert finished_reports(output(None, (0, "stop"))) == {}


def test_a_field_is_added_and_no_other_byte_changes() -> None:
    event = chunk(text='é } ], {"a": "data: 1"} \\n')

    longer = with_field(event, "kv_transfer_params", {"kvsieve": A})

    assert longer.startswith(event[:-3])
    assert longer.endswith("}}\n\n")
    assert event_data(longer) == {
        **(event_data(event) or {}),
        "kv_transfer_params": {"kvsieve": A},
    }


def test_named_events_and_empty_objects_get_the_field() -> None:
    assert with_field('event: e\ndata: {"a":1}\n\n', "b", 2) == 'event: e\ndata: {"a":1,"b":2}\n\n'
    assert with_field("data: {}\n\n", "b", 2) == 'data: {"b":2}\n\n'


@pytest.mark.parametrize("event", [DONE, ": keep-alive\n\n", "", 'data: {"b":null}\n\n'])
def test_what_has_no_object_or_has_the_field_stays(event: str) -> None:
    assert with_field(event, "b", 2) == event


def test_each_choice_gets_its_report_in_its_last_chunk() -> None:
    chunks = LastChunks()
    chunks.add({0: A, 1: B})
    events = [chunk(0), chunk(1, "stop"), chunk(0, "length"), chunk(0, "length"), DONE]

    amended_events = asyncio.run(collect(amended(source(*events), chunks)))

    assert amended_events == [
        events[0],
        with_field(events[1], "kv_transfer_params", {"kvsieve": B}),
        with_field(events[2], "kv_transfer_params", {"kvsieve": A}),
        events[3],
        DONE,
    ]


def test_a_translated_stream_gets_the_report_in_its_last_event() -> None:
    carried = CarriedOver("message_delta")
    carried.read(chunk())
    carried.read(chunk(text='"kv_transfer_params"'))
    assert not carried.is_waiting
    carried.read(with_field(chunk(0, "stop"), "kv_transfer_params", {"kvsieve": A}))

    other = 'event: content_block_stop\ndata: {"type":"content_block_stop"}\n\n'
    last = 'event: message_delta\ndata: {"type":"message_delta"}\n\n'

    assert carried.amend(other) == other
    assert carried.amend(last) == with_field(last, "kv_transfer_params", {"kvsieve": A})
    assert not carried.is_waiting


class Broken:
    is_waiting = True

    def amend(self, event: str) -> str:
        raise RuntimeError("planted")


def test_our_failure_leaves_the_stream_as_it_was(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def observe(item: object) -> None:
        raise RuntimeError("planted")

    # vLLM keeps its log from the root logger, where pytest listens.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    events = [chunk(), chunk(0, "stop"), DONE]
    stream = amended(source(*events), Broken())

    assert asyncio.run(collect(stream)) == events
    assert asyncio.run(collect(Tap(source(1, 2), observe))) == [1, 2]
    # Once each, however many events follow.
    assert [record.message for record in caplog.records] == [
        "kvsieve: could not put a report into a stream",
        "kvsieve: could not read the report of a request",
    ]


def test_closing_the_stream_closes_its_source() -> None:
    closed = []

    async def watched() -> AsyncGenerator[str, None]:
        try:
            for _ in range(9):
                yield chunk()
        finally:
            closed.append(True)

    async def take_one() -> None:
        stream = amended(watched(), LastChunks())
        await anext(stream)
        await stream.aclose()
        tap = Tap(watched(), lambda _: None)
        await anext(tap)
        await tap.aclose()

    asyncio.run(take_one())

    assert closed == [True, True]


def test_siblings_are_collected_by_index_whatever_ends_first() -> None:
    parent = SimpleNamespace(n=3)

    assert with_siblings(parent, 1, None) is None
    assert with_siblings(parent, 2, {"kvsieve": B}) == {"kvsieve": {"choices": [None, None, B]}}
    assert with_siblings(parent, 1, None) == {"kvsieve": {"choices": [None, None, B]}}
    first = with_siblings(parent, 0, {"kvsieve": A, "other": 1})
    assert first == {"kvsieve": {"choices": [A, None, B]}, "other": 1}
    with_siblings(parent, 0, {"kvsieve": B})
    assert first["kvsieve"]["choices"][0] == A


def test_a_foreign_connector_keeps_its_parameters() -> None:
    parent, theirs = SimpleNamespace(n=2), {"remote": 1}

    assert with_siblings(parent, 0, theirs) is theirs


def serving(additional_config: dict[str, Any]) -> Any:
    vllm_config = SimpleNamespace(additional_config=additional_config)
    return SimpleNamespace(engine_client=SimpleNamespace(vllm_config=vllm_config))


CONFIGURED = {"kvsieve": {}}
REQUEST = SimpleNamespace(n=2)


async def stock_completions(
    self: Any, request: Any, inputs: Any, results: Any, *args: Any
) -> AsyncGenerator[str, None]:
    async for prompt, result in results:
        for completion in result.outputs:
            yield chunk(completion.index + 2 * prompt, completion.finish_reason)
    yield DONE


@pytest.mark.parametrize("configured", [True, False])
def test_completions_of_several_prompts_and_choices(configured: bool) -> None:
    results = source(
        (0, output(None, (0, None), (1, None))),
        (1, output({"kvsieve": {"choices": [None, B]}}, (0, None), (1, "stop"))),
        (0, output({"kvsieve": {"choices": [A, A]}}, (0, "stop"), (1, "stop"))),
        (1, output({"kvsieve": {"choices": [B, B]}}, (0, "stop"))),
    )
    owner = serving(CONFIGURED if configured else {})

    stream = doors._completion_stream(stock_completions, owner, REQUEST, [], results, "id")
    data = [event_data(event) for event in asyncio.run(collect(stream))]

    found = {
        d["choices"][0]["index"]: d["kv_transfer_params"]["kvsieve"]
        for d in data
        if d and "kv_transfer_params" in d
    }
    assert found == ({0: A, 1: A, 2: B, 3: B} if configured else {})
    assert len(data) == 8


def test_unconfigured_streams_are_handed_through_untouched() -> None:
    stream, results = source(), source()

    def stock(self: Any, *args: Any) -> Any:
        assert results in args
        return stream

    owner = serving({})
    assert doors._completion_stream(stock, owner, REQUEST, [], results) is stream
    assert doors._one_prompt_stream(stock, owner, REQUEST, results) is stream
    assert doors._message_stream(stock, owner, results) is stream


@pytest.mark.parametrize("configured", [True, False])
def test_a_response_to_several_prompts_lists_all_reports(configured: bool) -> None:
    batch = [output({"kvsieve": A}, (0, "stop")), output({"kvsieve": B}, (0, "stop"))]

    def stock(self: Any, batch: Any) -> Any:
        return SimpleNamespace(kv_transfer_params=batch[0].kv_transfer_params)

    owner = serving(CONFIGURED if configured else {})
    response = doors._completion_response(stock, owner, batch)

    both = {"choices": [A, B]}
    assert response.kv_transfer_params == {"kvsieve": both if configured else A}


def test_a_batch_of_conversations_lists_all_reports() -> None:
    results = [
        source(output(None, (0, None)), output({"kvsieve": A}, (0, "stop"))),
        source(output({"kvsieve": B}, (0, "stop"))),
    ]

    async def stock(self: Any, request: Any, generators: Any) -> Any:
        for generator in reversed(generators):
            await collect(generator)
        return SimpleNamespace(choices=[0, 1], kv_transfer_params=None)

    response = asyncio.run(doors._chat_batch_response(stock, serving(CONFIGURED), None, results))

    assert response.kv_transfer_params == {"kvsieve": {"choices": [A, B]}}


def test_a_function_is_replaced_once_and_given_the_original() -> None:
    class Owner:
        def method(self, x: int) -> int:
            return x + 1

    for _ in range(2):
        wrap(Owner, "method", lambda stock, self, x: 10 * stock(self, x))

    assert Owner().method(1) == 20
    assert Owner.method.__name__ == "method"
