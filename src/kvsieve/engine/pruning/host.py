"""What pruning needs of the worker's sieve, whose step it runs in."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kvsieve.engine.pruning.layout import Layout
from kvsieve.engine.requests import PlannedRequests
from kvsieve.engine.step import Step
from kvsieve.policies import Evidence


class QueryWatcher(Protocol):
    """Is shown the queries of the layer that runs.

    Attributes:
        query: [num_tokens, num_heads, head_size], rotary embedding applied; None between layers.
    """

    query: torch.Tensor | None


class PruningHost(Protocol):
    """The worker's sieve, as a pass that prunes sees it.

    Attributes:
        step: The step that runs; None in a dummy run.
        requests: The worker's plans.
        prefill: Whom layers show their queries; None outside a pass.
    """

    step: Step | None
    requests: PlannedRequests
    prefill: QueryWatcher | None

    def evidence(self, layer_number: int, row: int, window: torch.Tensor) -> Evidence:
        """What is known in one layer of a prompt that is complete there."""
        ...

    def layout_metadata(self, layout: Layout) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Attention metadata and slots of every sieved layer for the rows of a layout, by name."""
        ...
