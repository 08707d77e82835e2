"""A stream of events with reports put into it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

from kvsieve.core.config import CONFIG_KEY
from kvsieve.engine.frontend.choices import Report
from kvsieve.engine.frontend.sse import event_data, with_field

logger = logging.getLogger("vllm.kvsieve.frontend")

FIELD = "kv_transfer_params"
"""The field of a response, and of an event, that holds `{"kvsieve": report}`."""

T = TypeVar("T")


class Tap(Generic[T]):
    """An asynchronous iterator that shows each item to an observer and passes it on.

    Not a generator: the source is then closed, cancelled and collected exactly as if the
    consumer held it itself.

    Args:
        source: Where the items come from.
        observe: Called with each item, until it raises, which is logged and goes no further.
    """

    def __init__(self, source: AsyncIterator[T], observe: Callable[[T], None]) -> None:
        self._source = source
        self._observe: Callable[[T], None] | None = observe

    def __aiter__(self) -> Tap[T]:
        return self

    async def __anext__(self) -> T:
        item = await self._source.__anext__()
        if self._observe is not None:
            try:
                self._observe(item)
            except Exception:
                self._observe = None
                logger.exception("kvsieve: could not read the report of a request")
        return item

    async def aclose(self) -> None:
        """Close the source, if it can be closed."""
        close = getattr(self._source, "aclose", None)
        if close is not None:
            await close()


class Amender(Protocol):
    """Knows which events of a stream get a report."""

    @property
    def is_waiting(self) -> bool:
        """Whether there is a report that no event has got yet."""

    def amend(self, event: str) -> str:
        """The event, with its report if it is one that gets one."""


class LastChunks:
    """Puts the report of each choice into the chunk that carries its finish reason."""

    def __init__(self) -> None:
        self._reports: dict[int, Report] = {}

    def add(self, reports: dict[int, Report]) -> None:
        """Keep the reports of choices that end, by index, until their last chunk comes."""
        self._reports.update(reports)

    @property
    def is_waiting(self) -> bool:
        """Whether there is a report that no chunk has got yet."""
        return bool(self._reports)

    def amend(self, event: str) -> str:
        """The chunk, with its report if a choice ends in it."""
        for choice in (event_data(event) or {}).get("choices", ()):
            if choice.get("finish_reason") is not None:
                report = self._reports.pop(choice["index"], None)
                if report is not None:
                    return with_field(event, FIELD, {CONFIG_KEY: report})
        return event


class CarriedOver:
    """Takes the report out of chunks that vLLM translates, and puts it into the result.

    Args:
        event_type: `type` of the event that tells the end of the translated stream.
    """

    def __init__(self, event_type: str) -> None:
        self._event_type = event_type
        self._field: Any = None

    def read(self, chunk: str) -> None:
        """Look at a chunk before it is translated."""
        if f'"{FIELD}"' in chunk:
            data = event_data(chunk) or {}
            self._field = data.get(FIELD) or self._field

    @property
    def is_waiting(self) -> bool:
        """Whether there is a report that no event has got yet."""
        return self._field is not None

    def amend(self, event: str) -> str:
        """The event, with the report if it is the one that gets it."""
        data = event_data(event)
        if data is None or data.get("type") != self._event_type:
            return event
        field, self._field = self._field, None
        return with_field(event, FIELD, field)


async def amended(stream: AsyncGenerator[str, None], amender: Amender) -> AsyncGenerator[str, None]:
    """The stream's events, with reports where the amender puts them.

    An event is looked into only while a report waits, so that a stream costs nothing until
    its end. An error of ours is logged, and the stream goes on without reports.
    """
    is_sound = True
    async with aclosing(stream):
        async for event in stream:
            if is_sound and amender.is_waiting:
                try:
                    event = amender.amend(event)
                except Exception:
                    is_sound = False
                    logger.exception("kvsieve: could not put a report into a stream")
            yield event
