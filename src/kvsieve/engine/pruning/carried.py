"""Hidden states of prompts that are pruned at a fixed layer and read in chunks.

Every chunk runs up to the selection layer; what comes out of it is kept here. With the last chunk
the whole prompt is known at that layer, and its kept tokens go on together. The result is that of
a prompt read at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from kvsieve.core.errors import SieveInvariantError

NUM_CARRIED = 2
"""Prompts whose chunks may be kept at once: mostly one that ends in a step, and the next."""


@dataclass(eq=False)
class CarriedPrompt:
    """What is kept of one prompt.

    Attributes:
        num_tokens: Tokens read so far.
        hidden_states: [tokens of the chunk, hidden_size] for each chunk, after the layer.
        residual: The same for the residual.
        queries: [at most the scoring window, num_heads, head_size], the layer's last queries.
        seconds_saved: Time that the layers beyond were not run for the chunks so far.
    """

    num_tokens: int = 0
    hidden_states: list[torch.Tensor] = field(default_factory=list)
    residual: list[torch.Tensor] = field(default_factory=list)
    queries: torch.Tensor | None = None
    seconds_saved: float = 0.0

    def add(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        queries: torch.Tensor,
        window: int,
    ) -> None:
        """Keep a chunk.

        Args:
            hidden_states: [n, hidden_size].
            residual: [n, hidden_size].
            queries: [n, num_heads, head_size] of the same tokens.
            window: Last queries that score, in tokens.
        """
        # Copies: what a layer returns may be written over by the next.
        self.hidden_states.append(hidden_states.clone())
        self.residual.append(residual.clone())
        seen = queries[-window:]
        self.queries = seen.clone() if self.queries is None else torch.cat([self.queries, seen])
        self.queries = self.queries[-window:]
        self.num_tokens += len(hidden_states)


class CarriedPrompts:
    """What is kept of all prompts that are being read."""

    def __init__(self) -> None:
        self._prompts: dict[str, CarriedPrompt] = {}

    def at(self, request_id: str, num_computed: int) -> CarriedPrompt:
        """What is kept of a prompt whose next chunk begins at a token.

        Raises:
            SieveInvariantError: The chunks before were not all seen.
        """
        if num_computed == 0:
            self._prompts[request_id] = CarriedPrompt()
        prompt = self._prompts.get(request_id)
        if prompt is None or prompt.num_tokens != num_computed:
            seen = 0 if prompt is None else prompt.num_tokens
            raise SieveInvariantError(
                f"the prompt of request {request_id} continues at token {num_computed}, but the"
                f" hidden states of {seen} were kept"
            )
        return prompt

    def close(self, request_ids: Iterable[str]) -> None:
        """Drop what is kept of prompts that were read, ended or were preempted."""
        for request_id in request_ids:
            self._prompts.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._prompts)
