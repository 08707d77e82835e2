"""What a benchmark is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsieve.bench.prompts import seeded
from kvsieve.bench.workload import WORKLOADS, Chat, Workload
from kvsieve.serving.server import ServerSpec

STOCK = "stock"
REQUESTS_PER_CLIENT = 4
REQUESTS_OPEN_LOOP = 32


@dataclass(frozen=True)
class Arm:
    """One of the servers that are compared.

    Attributes:
        name: What tables and messages call it.
        settings: Settings of the sieve, by field of `SieveConfig`; None for stock vLLM.
    """

    name: str
    settings: Mapping[str, Any] | None


@dataclass(frozen=True)
class Load:
    """How requests arrive; exactly one is given.

    Attributes:
        concurrency: Clients that hold one chat after another.
        rate: Requests per second that begin on average, however many are running.
    """

    concurrency: int | None = None
    rate: float | None = None


@dataclass(frozen=True)
class Goals:
    """Bounds that a request must keep to count as good, in seconds; None: no bound."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def are_given(self) -> bool:
        """Whether there is any."""
        return self.ttft_s is not None or self.tpot_s is not None


@dataclass(frozen=True)
class SweepPlan:
    """A search for the highest concurrency.

    Attributes:
        bound_s: The bound on the median TTFT, in seconds.
        limit: The highest concurrency to try.
    """

    bound_s: float
    limit: int


@dataclass(frozen=True)
class Options:
    """A benchmark; made by `kvsieve.bench.choices.choose`, which checks it.

    Attributes:
        model: Model, as `vllm serve` takes it.
        arms: Stock first.
        workloads: Names of workloads.
        scale: What all lengths are multiplied with.
        load: How requests arrive.
        requests: Requests of a run; None for as many as the load needs.
        repeats: How often every arm runs under every workload.
        seed: Decides lengths, words and arrivals.
        goals: What counts as a good request.
        sweep: The search to make after the repeats, if any.
        one_at_a_time: Whether a server is started for each run, and stopped after it.
        gpus: GPUs that a server uses; 0 on a CPU.
        flags: Flags of `vllm serve`, the same for all arms.
        json_file: Where to write the result.
        html_file: Where to write the report.
    """

    model: str
    arms: tuple[Arm, ...]
    workloads: tuple[str, ...]
    scale: float
    load: Load
    requests: int | None
    repeats: int
    seed: int
    goals: Goals
    sweep: SweepPlan | None
    one_at_a_time: bool
    gpus: int
    flags: tuple[str, ...]
    json_file: Path | None = None
    html_file: Path | None = None

    def spec(self, arm: Arm) -> ServerSpec:
        """The server of an arm."""
        return ServerSpec(arm.name, self.model, arm.settings, self.flags)

    def num_requests(self, workload: Workload, concurrency: int | None = None) -> int:
        """Requests of one run.

        Args:
            workload: What they look like.
            concurrency: Of a sweep's point; None for a repeat.
        """
        if self.requests is not None:
            return self.requests
        clients = concurrency or self.load.concurrency
        chats = REQUESTS_PER_CLIENT * clients if clients else REQUESTS_OPEN_LOOP
        return chats * workload.turns

    def chats(self, name: str, requests: int, *names: str | int) -> tuple[Chat, ...]:
        """Lengths of the chats of one run: the same for every arm.

        Args:
            name: Of the workload.
            requests: How many requests.
            names: What they are for, such as the repeat.
        """
        return WORKLOADS[name].plan(
            seeded(self.seed, name, *names, "lengths"), requests, self.scale
        )
