"""What is planned for every request that is alive. Scheduler and worker each keep one list.

Both compute the same starts from the same three facts: the prompt's length, the request's
treatment and the tier's budget. The first two travel to the worker once, with the request
(`step_message.py`); nothing else has to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from kvsieve.core.budget import BudgetRule
from kvsieve.core.errors import SieveInvariantError
from kvsieve.core.tiers import TierRule
from kvsieve.core.treatment import Treatment


class Tier(Protocol):
    """Sieved layers of one budget: what a plan must know of a `SievedAttentionSpec`."""

    budget: TierRule
    observation_window: int

    def start(self, prompt_tokens: int, requested: BudgetRule | None = None) -> int:
        """First position that the layers hold once a prompt of this length is sieved."""
        ...


@dataclass(frozen=True)
class PlannedRequest:
    """The plan for one request.

    Attributes:
        prompt_tokens: Length of the original prompt, in tokens.
        treatment: What is done to the request.
        planned: Per tier, where the kept region starts or, in shadow mode, would start; 0
            if the prompt fits its budget or nothing is done.
        starts: Per tier, the first position that is really held once the prompt was
            processed; 0 unless the request is sieved.
        not_pruned: Why a prompt is not pruned although that was asked for; the scheduler's word.
    """

    prompt_tokens: int
    treatment: Treatment
    planned: tuple[int, ...]
    starts: tuple[int, ...]
    not_pruned: str | None = None

    @property
    def is_pruned(self) -> bool:
        """Whether the prompt is pruned while it is read."""
        return self.treatment.prune is not None

    @property
    def is_observed(self) -> bool:
        """Whether the prompt's last queries are needed to score it."""
        return any(self.planned)

    @property
    def is_sieved(self) -> bool:
        """Whether rows will be moved and blocks freed."""
        return any(self.starts)


class PlannedRequests:
    """Plans by request id.

    Args:
        tiers: The distinct specs of the sieved layers.
    """

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self.tiers = tuple(dict.fromkeys(tiers))
        self._plans: dict[str, PlannedRequest] = {}

    def add(self, request_id: str, prompt_tokens: int, treatment: Treatment) -> PlannedRequest:
        """Plan a request; a plan that the id had before is forgotten."""
        planned: tuple[int, ...] = (0,) * len(self.tiers)
        if treatment.mode != "full":
            planned = tuple(tier.start(prompt_tokens, treatment.budget) for tier in self.tiers)
        starts = planned if treatment.mode == "sieve" else (0,) * len(self.tiers)
        plan = PlannedRequest(prompt_tokens, treatment, planned, starts)
        self._plans[request_id] = plan
        return plan

    def __getitem__(self, request_id: str) -> PlannedRequest:
        try:
            return self._plans[request_id]
        except KeyError:
            raise SieveInvariantError(
                f"nothing is known of request {request_id}; this is a bug in kvsieve, please"
                " report it with the server's flags"
            ) from None

    def leave_unpruned(self, request_id: str, reason: str) -> None:
        """Take pruning out of a plan, and note why."""
        plan = self[request_id]
        treatment = replace(plan.treatment, prune=None)
        self._plans[request_id] = replace(plan, treatment=treatment, not_pruned=reason)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the plans of requests that ended."""
        for request_id in request_ids:
            self._plans.pop(request_id, None)
