"""Gathers the proof that the sieve ran: a report per request, totals for log and metrics."""

from __future__ import annotations

import time

from vllm.logger import init_logger
from vllm.v1.request import Request

from kvsieve.core.counters import SieveCounters
from kvsieve.core.report import MassLost, SieveReport, SieveTotals
from kvsieve.engine.manager import SievedManager
from kvsieve.engine.requests import PlannedRequests
from kvsieve.engine.worker_report import SievedRow

logger = init_logger("vllm.kvsieve.scheduler")

LOG_INTERVAL_S = 10.0
"""Seconds between counter lines in the log, while requests finish."""


class Proof:
    """What the worker and the cache managers say about the requests of one scheduler.

    Args:
        policy: Name of the scoring policy.
        layers: Number of layers per layer class.
        requests: The scheduler's plans.
        managers: The managers of the sieved groups.
    """

    def __init__(
        self,
        policy: str,
        layers: dict[str, int],
        requests: PlannedRequests,
        managers: tuple[SievedManager, ...],
    ) -> None:
        self._policy = policy
        self._layers = layers
        self._requests = requests
        self._managers = managers
        self.counters = SieveCounters()
        self._rows: dict[str, SievedRow] = {}
        self._totals = SieveTotals()
        self._next_log = 0.0

    def keep(self, request_id: str, row: SievedRow) -> None:
        """Keep and count what the worker did to a request."""
        self.counters.add_row(
            prompt_tokens=row.prompt_tokens,
            stored_tokens=row.stored_tokens,
            num_layers=len(row.layers),
            seconds=row.seconds,
            mode=row.mode,
            mass_lost=row.mass_lost,
            layers=row.layers,
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
        rule = plan.treatment.budget or self._requests.tiers[0].budget
        prompt_tokens = request.num_prompt_tokens
        report = SieveReport(
            policy=self._policy,
            mode=plan.treatment.mode,
            budget=None if plan.treatment.mode == "full" else rule.tokens_for(prompt_tokens),
            sieved=False,
            prompt_tokens=prompt_tokens,
            stored_tokens=dict.fromkeys(self._layers, prompt_tokens),
            layers=self._layers,
        )
        row = self._rows.get(request_id)
        if row is None:
            return report
        report.attention_mass_lost = MassLost.of(row.layers, row.mass_lost)
        dropped = (row.prompt_tokens - row.stored_tokens) * len(row.layers)
        if row.mode == "shadow":
            report.would_drop_tokens = dropped
            return report
        report.sieved = True
        report.stored_tokens["sieved"] = row.stored_tokens
        report.dropped_tokens = dropped
        report.blocks_freed = self._num_freed(request_id)
        return report

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
