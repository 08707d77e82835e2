"""Gathers the proof that the sieve ran: a report per request, totals for log and metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm.logger import init_logger
from vllm.v1.request import Request

from kvsieve.core.counters import SieveCounters
from kvsieve.core.protection import count_protected
from kvsieve.core.report import LayersStored, MassLost, SieveReport, SieveTotals, TierStored
from kvsieve.engine.manager import SievedManager
from kvsieve.engine.requests import PlannedRequest, PlannedRequests
from kvsieve.engine.worker_report import SievedRow
from kvsieve.policies import Policy

logger = init_logger("vllm.kvsieve.scheduler")

LOG_INTERVAL_S = 10.0
"""Seconds between counter lines in the log, while requests finish."""


class Proof:
    """What the worker and the cache managers say about the requests of one scheduler.

    Args:
        policy: How tokens are ranked and chosen.
        layers: Number of layers per layer class.
        requests: The scheduler's plans.
        managers: The managers of the sieved groups.
        tiers: Numbers of the layers of each tier, by their first; there is at least one.
    """

    def __init__(
        self,
        policy: Policy,
        layers: dict[str, int],
        requests: PlannedRequests,
        managers: tuple[SievedManager, ...],
        tiers: Sequence[tuple[int, ...]],
    ) -> None:
        self._policy = policy
        self._layers = layers
        self._requests = requests
        self._managers = managers
        self._tiers = tiers
        self.counters = SieveCounters()
        self._rows: dict[str, SievedRow] = {}
        self._totals = SieveTotals()
        self._next_log = 0.0

    def keep(self, request_id: str, row: SievedRow) -> None:
        """Keep and count what the worker did to a request."""
        self.counters.add_row(
            prompt_tokens=row.prompt_tokens,
            stored_tokens=row.stored.mean(self._layers["sieved"]),
            num_layers=len(row.scored_layers),
            seconds=row.seconds,
            mode=row.mode,
            mass_lost=row.mass_lost,
            layers=row.scored_layers,
            pruned=row.pruned,
            again=request_id in self._rows,
        )
        self._rows[request_id] = row

    def count_freed(self, request_id: str) -> None:
        """Count the blocks that a request has just given back."""
        self.counters.freed_blocks += self._num_freed(request_id)

    def _num_freed(self, request_id: str) -> int:
        return sum(manager.num_freed_blocks(request_id) for manager in self._managers)

    def report(self, request: Request) -> SieveReport:
        """What is known of a request that is still there."""
        request_id = request.request_id
        plan = self._requests[request_id]
        prompt_tokens = request.num_prompt_tokens
        budget = self._requests.tiers[0].budget.mean_for(prompt_tokens, plan.treatment.budget)
        report = SieveReport(
            policy=self._policy.name,
            mode=plan.treatment.mode,
            budget=None if plan.treatment.mode == "full" else budget,
            sieved=False,
            prompt_tokens=prompt_tokens,
            stored_tokens=dict.fromkeys(self._layers, prompt_tokens),
            layers=self._layers,
            tiers=self._by_tier(LayersStored(prompt_tokens, {})),
            protected_tokens=self._num_protected(plan),
            not_pruned=plan.not_pruned,
        )
        row = self._rows.get(request_id)
        if row is None:
            return report
        report.attention_mass_lost = MassLost.of(row.scored_layers, row.mass_lost)
        if row.mode == "shadow":
            report.would_drop_tokens = row.stored.dropped_tokens
            return report
        report.sieved = True
        report.pruned = row.pruned
        report.stored_tokens["sieved"] = row.stored.mean(self._layers["sieved"])
        report.dropped_tokens = row.stored.dropped_tokens
        report.tiers = self._by_tier(row.stored)
        report.blocks_freed = self._num_freed(request_id)
        return report

    def _num_protected(self, plan: PlannedRequest) -> int:
        if not plan.is_observed:
            return 0
        return count_protected(
            plan.prompt_tokens,
            plan.treatment.spans,
            self._policy.num_sink_tokens,
            self._policy.num_recent_tokens,
        )

    def _by_tier(self, stored: LayersStored) -> list[TierStored] | None:
        return stored.by_tier(self._tiers) if len(self._tiers) > 1 else None

    def finish(self, request: Request) -> SieveReport:
        """The last report of a request that ends."""
        report = self.report(request)
        row = self._rows.pop(request.request_id, None)
        self._totals.add(report, seconds=row.seconds if row else 0.0)
        return report

    def log(self) -> None:
        """Write the totals since the last line, if requests ended and it is time."""
        if self._totals.requests and time.monotonic() >= self._next_log:
            logger.info("kvsieve: %s", self._totals)
            self._totals = SieveTotals()
            self._next_log = time.monotonic() + LOG_INTERVAL_S
