"""The queries of each prompt's observation window, kept until the prompt is scored.

In `forward` a sieved layer only copies rows into a pre-allocated ring; scoring and
compaction happen after the model call. A window may straddle any number of chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from kvsieve.core.errors import SieveInvariantError
from kvsieve.engine.rows import StepRows


@dataclass(frozen=True)
class Observation:
    """Which tokens of a step the sieved layers copy, and where to.

    Attributes:
        source: [n] int64, token rows of the step's query tensor.
        target: [n] int64, rows of the ring.
    """

    source: torch.Tensor
    target: torch.Tensor


@dataclass
class _Window:
    slot: int
    filled: int = 0


class Observer:
    """Rings of window queries, one per sieved layer, with shared slots.

    Args:
        layer_names: The sieved layers.
        num_slots: Windows that can be open at once.
        window: Queries per window.
        num_heads: Query heads of a layer on this rank.
        head_size: Size of a head.
        dtype: Type of the queries.
        device: Device of the model.
    """

    def __init__(
        self,
        layer_names: Iterable[str],
        num_slots: int,
        window: int,
        num_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window = window
        self.num_slots = num_slots
        self._device = device
        shape = (num_slots * window, num_heads, head_size)
        self._rings = {name: torch.empty(shape, dtype=dtype, device=device) for name in layer_names}
        for ring in self._rings.values():
            # On a CPU vLLM measures what is resident: a page that nobody has written to does
            # not count, and `torch.zeros` writes to none.
            ring.fill_(0)
        self._free = list(range(num_slots))
        self._open: dict[str, _Window] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all rings."""
        return sum(ring.numel() * ring.element_size() for ring in self._rings.values())

    def plan(self, rows: StepRows, observed: np.ndarray) -> Observation | None:
        """Open or continue the windows of a step and say which tokens belong to them.

        Args:
            rows: The step's rows.
            observed: [num_rows] bool, whether the row's prompt will be scored.

        Raises:
            SieveInvariantError: A window was not observed from its first query on.
        """
        first = np.maximum(rows.prompt_lens - self.window, 0)
        begin = np.maximum(rows.num_computed, first)
        end = np.minimum(rows.num_computed + rows.query_lens, rows.prompt_lens)
        source: list[np.ndarray] = []
        target: list[np.ndarray] = []
        for row in np.nonzero(observed & (begin < end))[0].tolist():
            request_id = rows.request_ids[row]
            lo, hi = int(begin[row] - first[row]), int(end[row] - first[row])
            window = self._window_for(request_id, lo)
            window.filled = hi
            token = int(rows.query_starts[row] + begin[row] - rows.num_computed[row])
            source.append(np.arange(token, token + hi - lo))
            target.append(np.arange(lo, hi) + window.slot * self.window)
        if not source:
            return None
        return Observation(
            source=torch.from_numpy(np.concatenate(source)).to(self._device),
            target=torch.from_numpy(np.concatenate(target)).to(self._device),
        )

    def _window_for(self, request_id: str, first_query: int) -> _Window:
        window = self._open.get(request_id)
        if window is None:
            if not self._free:
                raise SieveInvariantError(
                    f"all {len(self._open)} observation windows are open and request {request_id}"
                    " needs one; this is a bug in kvsieve, please report it with the server's flags"
                )
            window = self._open[request_id] = _Window(self._free.pop())
        if first_query not in (0, window.filled):
            raise SieveInvariantError(
                f"the observation window of request {request_id} continues at query {first_query},"
                f" but {window.filled} were observed"
            )
        return window

    def record(self, layer_name: str, query: torch.Tensor, observation: Observation) -> None:
        """Copy the observed queries of a layer into its ring.

        Args:
            layer_name: The layer.
            query: [num_tokens, num_heads, head_size], rotary embedding applied.
            observation: The step's plan.
        """
        rows = query.index_select(0, observation.source)
        self._rings[layer_name].index_copy_(0, observation.target, rows)

    def queries(self, layer_name: str, request_id: str, prompt_tokens: int) -> torch.Tensor:
        """The window of a request whose prompt is complete.

        Returns:
            [min(window, prompt_tokens), num_heads, head_size], a view into the ring.

        Raises:
            SieveInvariantError: The window is not complete.
        """
        window = self._open.get(request_id)
        wanted = min(self.window, prompt_tokens)
        if window is None or window.filled != wanted:
            filled = 0 if window is None else window.filled
            raise SieveInvariantError(
                f"the prompt of request {request_id} ended with {filled} of {wanted} window"
                " queries observed"
            )
        begin = window.slot * self.window
        return self._rings[layer_name][begin : begin + wanted]

    def close(self, request_ids: Iterable[str]) -> None:
        """Give back the windows of requests that were scored, ended or were preempted."""
        for request_id in request_ids:
            window = self._open.pop(request_id, None)
            if window is not None:
                self._free.append(window.slot)

    @property
    def num_open(self) -> int:
        """Windows that are open."""
        return len(self._open)
