"""What a policy gathers from every query of a prompt, chunk by chunk.

Most policies look at the last queries only, which a ring holds until the prompt ends
(`observer.py`). H2O, Keyformer and ExpectedAttention look at all of them. To keep those would
cost as much as the cache, so the sums are formed in `forward`, right after the layer's attention,
while the chunk's queries are there. A request then reads no prefix cache, since the queries of a
hit are never computed (`scheduler.py` lets its window begin with its prompt).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvsieve.core.errors import SieveInvariantError
from kvsieve.engine.rows import StepRows
from kvsieve.policies import Accumulator, Chunk

MakeChunk = Callable[[int, slice, int, int], Chunk]
"""A chunk from its row in the batch, its token rows in the step's query tensor, the position of
its first query, and the prompt's length."""


class Accumulation:
    """States of the prompts that are being read.

    Args:
        accumulator: The policy's.
    """

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator
        # Per request and layer: queries seen so far, and the accumulator's state.
        self._states: dict[str, dict[str, tuple[int, Any]]] = {}

    def record(
        self,
        layer_name: str,
        rows: StepRows,
        being_read: Sequence[tuple[int, int]],
        make_chunk: MakeChunk,
    ) -> None:
        """Add a step's prompt queries of one layer.

        Args:
            layer_name: The layer.
            rows: The step's rows.
            being_read: The rows whose prompt is gathered, and its tokens in the step.
            make_chunk: Makes the chunk of a row.

        Raises:
            SieveInvariantError: A chunk does not continue where the last one ended.
        """
        for row, count in being_read:
            request_id = rows.request_ids[row]
            first, prompt_tokens = int(rows.num_computed[row]), int(rows.prompt_lens[row])
            states = self._states.setdefault(request_id, {})
            seen, state = states.get(layer_name, (0, None))
            if first == 0:
                seen, state = 0, None
            if first != seen:
                raise SieveInvariantError(
                    f"the prompt of request {request_id} continues at token {first}, but the"
                    f" queries of {seen} were gathered"
                )
            begin = int(rows.query_starts[row])
            chunk = make_chunk(row, slice(begin, begin + count), first, prompt_tokens)
            if state is None:
                state = self._accumulator.start(chunk)
            states[layer_name] = (first + count, self._accumulator.add(state, chunk))

    def state(self, layer_name: str, request_id: str, prompt_tokens: int) -> Any:
        """The state of a request whose prompt is complete.

        Raises:
            SieveInvariantError: Not every query was gathered.
        """
        seen, state = self._states.get(request_id, {}).get(layer_name, (0, None))
        if seen != prompt_tokens:
            raise SieveInvariantError(
                f"the prompt of request {request_id} ended with {seen} of {prompt_tokens} queries"
                " gathered"
            )
        return state

    def close(self, request_ids: Iterable[str]) -> None:
        """Drop the states of requests that were scored, ended or were preempted."""
        for request_id in request_ids:
            self._states.pop(request_id, None)

    @property
    def num_open(self) -> int:
        """Prompts whose queries are being gathered."""
        return len(self._states)
