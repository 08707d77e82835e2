"""One run: one arm under one load, watched from outside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from kvsieve.bench.arms import Fleet
from kvsieve.bench.arrivals import poisson_arrivals
from kvsieve.bench.errors import BenchError
from kvsieve.bench.load import Answered, send
from kvsieve.bench.options import Arm, Options
from kvsieve.bench.processes import cpu_seconds
from kvsieve.bench.prompts import Script, seeded
from kvsieve.bench.schema import ArmRun, PoolSample
from kvsieve.bench.summary import Costs, summarise
from kvsieve.bench.watch import preemptions, watch
from kvsieve.core.errors import KvsieveError
from kvsieve.serving.client import Client
from kvsieve.serving.server import Server


@dataclass(frozen=True)
class Run:
    """What one arm is asked to do.

    Attributes:
        label: What messages call it, such as "mixed, repeat 2/3".
        scripts: The chats; the same for every arm.
        concurrency: Clients of a closed loop; None for an open one.
        arrivals: When each chat of an open loop is due, in seconds.
    """

    label: str
    scripts: tuple[Script, ...]
    concurrency: int | None
    arrivals: tuple[float, ...] = ()

    @property
    def num_requests(self) -> int:
        """Requests of all chats."""
        return sum(len(script.messages) for script in self.scripts)


def arrivals_of(
    options: Options, scripts: Sequence[Script], *names: str | int
) -> tuple[float, ...]:
    """When the chats of an open loop are due; empty for a closed loop."""
    if options.load.rate is None:
        return ()
    turns = max(len(script.messages) for script in scripts)
    random = seeded(options.seed, *names, "arrivals")
    return poisson_arrivals(random, options.load.rate / turns, len(scripts))


def measure(
    fleet: Fleet,
    server: Server,
    arm: Arm,
    run: Run,
    options: Options,
    on_answer: Callable[[], None],
) -> ArmRun:
    """Send the load to the arm's server and report what came of it.

    Raises:
        ServerError: The server ended; names its log.
        BenchError: A request failed, or the responses do not show that the sieve ran; names
            the arm and the log.
    """
    try:
        answered, samples, costs = asyncio.run(
            _watched(server, fleet.others(arm), run, options, on_answer)
        )
        return summarise(arm, fleet.records[arm.name], answered, samples, costs, options.goals)
    except BenchError as error:
        raise _blame(arm, run, server, error) from error
    except (KvsieveError, httpx.HTTPError) as error:
        # A server that is killed closes its connections first.
        server.raise_if_dying()
        raise _blame(arm, run, server, error) from error


def _blame(arm: Arm, run: Run, server: Server, error: Exception) -> BenchError:
    return BenchError(f"arm {arm.name}, {run.label}: {error}\nThe server's log: {server.log}")


async def _watched(
    server: Server,
    others: Sequence[int],
    run: Run,
    options: Options,
    on_answer: Callable[[], None],
) -> tuple[list[Answered], list[PoolSample], Costs]:
    client = Client(server.url, server.served_name)
    seen: list[PoolSample] = []
    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as http:
        preempted = preemptions((await http.get(f"{server.url}/metrics")).text)
        others_cpu = sum(map(cpu_seconds, others))
        cpu, own_cpu = cpu_seconds(server.pid), time.process_time()
        started = time.perf_counter()
        watcher = asyncio.create_task(watch(http, server.url, started, seen))
        try:
            answered = await send(
                client,
                run.scripts,
                concurrency=run.concurrency,
                arrivals=run.arrivals,
                on_answer=on_answer,
            )
            cpu, own_cpu = cpu_seconds(server.pid) - cpu, time.process_time() - own_cpu
            others_cpu = sum(map(cpu_seconds, others)) - others_cpu
            preempted = preemptions((await http.get(f"{server.url}/metrics")).text) - preempted
        finally:
            watcher.cancel()
            (end,) = await asyncio.gather(watcher, return_exceptions=True)
            await client.close()
    if not isinstance(end, asyncio.CancelledError):
        raise BenchError(f"/metrics could not be watched: {end!r}")
    return answered, seen, Costs(cpu, own_cpu, others_cpu, options.gpus, preempted)
