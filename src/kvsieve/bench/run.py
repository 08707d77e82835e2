"""All runs of a benchmark: repeats by turns, then the sweep; what is finished is kept."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from kvsieve.bench.arms import Fleet
from kvsieve.bench.errors import BenchError
from kvsieve.bench.measure import Run, arrivals_of, measure
from kvsieve.bench.notes import notes_on
from kvsieve.bench.options import STOCK, Arm, Options
from kvsieve.bench.progress import bar, line
from kvsieve.bench.prompts import write_scripts
from kvsieve.bench.quantities import QUANTITIES, ratios_to_stock
from kvsieve.bench.ratios import summarise_ratios
from kvsieve.bench.schema import (
    ArmRun,
    BenchResult,
    LoadRecord,
    ModelRecord,
    RatioSummary,
    Repeat,
    Sweep,
    SweepPoint,
    WorkloadResult,
)
from kvsieve.bench.sweep import REQUESTS_PER_CLIENT, highest_met, next_concurrency
from kvsieve.bench.workload import WORKLOADS, Chat
from kvsieve.core.errors import KvsieveError
from kvsieve.reports.provenance import provenance, source_hash
from kvsieve.serving.server import Server

WARM_UP_REQUESTS = 2
WARM_UP_TOKENS = 4


def run_bench(
    options: Options, console: Console, keep: Callable[[BenchResult], None]
) -> BenchResult:
    """Measure every arm under every workload.

    Args:
        options: What to do.
        console: Gets progress; a console on stderr.
        keep: Called with what is finished after every repeat and every point of a sweep, and
            when something went wrong. What it gets is not complete and has no ratios.

    Returns:
        The complete result.

    Raises:
        ServerError: A server did not start, or ended.
        BenchError: A request failed, or an arm did not do what it is there for.
    """
    bench = Bench(options, console, keep)
    try:
        with Fleet(options, console) as fleet:
            bench.measure_all(fleet)
    except BaseException as error:
        is_ours = isinstance(error, KvsieveError)
        bench.failure = str(error) if is_ours else f"{type(error).__name__}: {error}"
        keep(bench.result(is_complete=False))
        raise
    return bench.result(is_complete=True)


class Bench:
    """One benchmark while it runs.

    Attributes:
        failure: Why it ended early, if it did.
    """

    def __init__(
        self, options: Options, console: Console, keep: Callable[[BenchResult], None]
    ) -> None:
        self.failure: str | None = None
        self._options = options
        self._console = console
        self._keep = keep
        self._birth = provenance(seed=options.seed)
        self._fleet: Fleet | None = None
        self._repeats: dict[str, list[Repeat]] = {name: [] for name in options.workloads}
        self._points: dict[str, dict[str, list[SweepPoint]]] = {}
        self._warm: set[tuple[int, str]] = set()

    def measure_all(self, fleet: Fleet) -> None:
        """Every repeat of every workload, and then the sweeps."""
        self._fleet = fleet
        options = self._options
        for name in options.workloads:
            for number in range(options.repeats):
                self._repeats[name].append(self._repeat(name, number))
                self._keep(self.result(is_complete=False))
        if options.sweep:
            for name in options.workloads:
                self._sweep(name)

    def result(self, *, is_complete: bool) -> BenchResult:
        """What was measured so far; ratios only if it is complete."""
        options = self._options
        records = self._fleet.records if self._fleet else {}
        result = BenchResult(
            complete=is_complete,
            failure=self.failure,
            model=describe_model(options.model),
            load=LoadRecord(
                **asdict(options.load),
                requests=options.requests,
                scale=options.scale,
                repeats=options.repeats,
                seed=options.seed,
                ttft_goal_s=options.goals.ttft_s,
                tpot_goal_s=options.goals.tpot_s,
            ),
            flags=options.flags,
            one_at_a_time=options.one_at_a_time,
            resource="gpu" if options.gpus else "cpu",
            arms=tuple(records[arm.name] for arm in options.arms if arm.name in records),
            workloads=tuple(self._workload(name, is_complete) for name in options.workloads),
            notes=(),
            provenance={
                **self._birth,
                "source_changed_meanwhile": source_hash() != self._birth["source_sha256"],
            },
        )
        return result.model_copy(update={"notes": notes_on(result)})

    def _workload(self, name: str, is_complete: bool) -> WorkloadResult:
        chats = self._options.chats(name, self._options.num_requests(WORKLOADS[name]), 0)
        repeats = self._repeats[name]
        if is_complete:
            repeats = [with_ratios(repeat) for repeat in repeats]
        return WorkloadResult(
            name=name,
            summary=WORKLOADS[name].summary,
            prompt_tokens=_range([n for chat in chats for n in chat.prompt_lengths]),
            output_tokens=_range([n for chat in chats for n in chat.answer_tokens]),
            repeats=tuple(repeats),
            ratios=summarise_repeats(repeats) if is_complete else {},
            sweep=self._sweep_so_far(name),
        )

    def _repeat(self, name: str, number: int) -> Repeat:
        """Every arm once; the order turns round from one repeat to the next."""
        options = self._options
        requests = options.num_requests(WORKLOADS[name])
        chats = options.chats(name, requests, number)
        order = options.arms if number % 2 == 0 else options.arms[::-1]
        label = f"{name}, repeat {number + 1}/{options.repeats}"
        runs = {}
        for arm in order:
            assert self._fleet is not None
            with self._fleet.use(arm) as server:
                runs[arm.name] = self._run(
                    server, arm, name, label, chats, options.load.concurrency, number
                )
        return Repeat(order=tuple(arm.name for arm in order), arms=runs, ratios={})

    def _sweep(self, name: str) -> None:
        arms = self._options.arms
        self._points[name] = {arm.name: [] for arm in arms}
        assert self._fleet is not None
        if self._options.one_at_a_time:
            for arm in arms:
                with self._fleet.use(arm) as server:
                    while self._point(name, arm, server):
                        pass
            return
        is_open, turn = True, 0
        while is_open:
            is_open = False
            for arm in arms if turn % 2 == 0 else arms[::-1]:
                with self._fleet.use(arm) as server:
                    is_open |= self._point(name, arm, server)
            turn += 1

    def _point(self, name: str, arm: Arm, server: Server) -> bool:
        """Measure one more point of the arm; False if the answer is known."""
        options, points = self._options, self._points[name][arm.name]
        assert options.sweep is not None
        clients = next_concurrency(
            {each.concurrency: each.met for each in points}, options.sweep.limit
        )
        if clients is None:
            return False
        workload = WORKLOADS[name]
        requests = max(
            options.num_requests(workload, clients),
            REQUESTS_PER_CLIENT * clients * workload.turns,
        )
        names = ("sweep", clients)
        chats = options.chats(name, requests, *names)
        label = f"{name}, sweep, {clients} client{'s' if clients > 1 else ''}"
        run = self._run(server, arm, name, label, chats, clients, *names)
        met = run.ttft.p50 < options.sweep.bound_s
        points.append(SweepPoint(concurrency=clients, met=met, run=run))
        self._keep(self.result(is_complete=False))
        return True

    def _sweep_so_far(self, name: str) -> Sweep | None:
        plan = self._options.sweep
        if plan is None or name not in self._points:
            return None
        met = {
            arm: {each.concurrency: each.met for each in points}
            for arm, points in self._points[name].items()
        }
        return Sweep(
            bound_s=plan.bound_s,
            limit=plan.limit,
            points={arm: tuple(points) for arm, points in self._points[name].items()},
            highest={
                arm: highest_met(seen)
                for arm, seen in met.items()
                if next_concurrency(seen, plan.limit) is None
            },
        )

    def _run(
        self,
        server: Server,
        arm: Arm,
        name: str,
        label: str,
        chats: Sequence[Chat],
        concurrency: int | None,
        *names: str | int,
    ) -> ArmRun:
        options, fleet = self._options, self._fleet
        assert fleet is not None
        self._check_fits(fleet, arm, name, chats)
        words = fleet.words(server)
        if (server.pid, name) not in self._warm:
            self._warm_up(fleet, server, arm, name, chats, words)
        scripts = write_scripts(chats, words, options.seed, name, *names)
        arrivals = () if concurrency else arrivals_of(options, scripts, name, *names)
        run = Run(label, scripts, concurrency, arrivals)
        with bar(self._console, f"{label}, {arm.name}", run.num_requests) as advance:
            measured = measure(fleet, server, arm, run, options, advance)
        self._console.print(line(label, arm.name, measured), highlight=False, soft_wrap=True)
        return measured

    def _warm_up(
        self,
        fleet: Fleet,
        server: Server,
        arm: Arm,
        name: str,
        chats: Sequence[Chat],
        words: Sequence[int],
    ) -> None:
        """Let the server allocate what the longest prompts need before anything is timed."""
        longest = max(chat.prompt_lengths[-1] for chat in chats)
        short = [Chat(0, (longest,), (WARM_UP_TOKENS,))] * WARM_UP_REQUESTS
        scripts = write_scripts(short, words, self._options.seed, name, "warm-up")
        run = Run(f"{name}, warm-up", scripts, WARM_UP_REQUESTS)
        with bar(self._console, f"{name}, warm-up, {arm.name}", len(short)) as advance:
            measure(fleet, server, arm, run, self._options, advance)
        self._warm.add((server.pid, name))

    def _check_fits(self, fleet: Fleet, arm: Arm, name: str, chats: Sequence[Chat]) -> None:
        longest = fleet.records[arm.name].max_model_len
        needed = max(chat.context_tokens for chat in chats)
        if longest is not None and needed > longest:
            raise BenchError(
                f"{name} has requests of {needed} tokens at --scale {self._options.scale:g}, and"
                f" the {arm.name} server takes {longest}: raise --max-model-len, or lower --scale"
            )


def with_ratios(repeat: Repeat) -> Repeat:
    """The repeat with every arm's ratios to stock."""
    stock = repeat.arms[STOCK]
    ratios = {arm: ratios_to_stock(run, stock) for arm, run in repeat.arms.items() if arm != STOCK}
    return repeat.model_copy(update={"ratios": ratios})


def summarise_repeats(repeats: Sequence[Repeat]) -> dict[str, dict[str, RatioSummary]]:
    """By arm and quantity, the ratios of all repeats; quantities without a ratio are left out."""
    if not repeats:
        return {}
    found: dict[str, dict[str, RatioSummary]] = {}
    for arm in repeats[0].ratios:
        found[arm] = {}
        for quantity in QUANTITIES:
            ratios = summarise_ratios([repeat.ratios[arm][quantity.key] for repeat in repeats])
            if ratios is not None:
                found[arm][quantity.key] = RatioSummary(**asdict(ratios))
    return found


def describe_model(model: str) -> ModelRecord:
    """What tells one model from another in a result."""
    folder = Path(model).expanduser()
    config = folder / "config.json"
    digest = hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None
    return ModelRecord(given=model, name=folder.name, config_sha256=digest)


def _range(counts: Sequence[int]) -> tuple[int, int, int]:
    return min(counts), round(statistics.median(counts)), max(counts)
