"""A mixed load on running servers, for as long as told, and what it left behind.

python benchmarks/soak.py --url kvsieve=http://127.0.0.1:8000 --url stock=http://127.0.0.1:8001

Two servers get the same requests: every worker sends a request to one and then to the other, in
alternating order, so that both carry the same load all the time. Exit status 1: an unexpected
error, a leak, or memory that grows; 2: a server was not found.

Start the servers yourself, with one thread each where they share few cores, and with a pool so
small that the load has touched all of it before memory is judged (a fifth of the time):

    export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1
    FLAGS="--host 127.0.0.1 --enforce-eager --dtype float32 --block-size 32 --max-model-len 4096
      --max-num-seqs 8 --kv-cache-memory-bytes 512M --served-model-name soak
      --disable-uvicorn-access-log"
    kvsieve serve $MODEL --budget 256 --port 8000 $FLAGS &
    VLLM_PLUGINS= python -m vllm.entrypoints.openai.api_server --model $MODEL --port 8001 $FLAGS &
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from pairing.progress import clocked
from rich.console import Console
from soaking.client import Outcome, Server
from soaking.jobs import Job, Load
from soaking.verdict import FINE, print_summary, summarize
from soaking.vllm_bench import run_rounds
from soaking.watch import Watch, find_processes

from kvsieve.reports.provenance import provenance

SAMPLE_EVERY_S = 10.0
DEAD_AFTER = 20
"""Connections that fail in a row before a server is taken for dead."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; exits with a message if it makes no sense."""
    parser = argparse.ArgumentParser(description="A mixed load on running OpenAI servers.")
    parser.add_argument(
        "--url",
        action="append",
        required=True,
        metavar="[NAME=]URL",
        help="a server's root; once or twice. Ratios are of the first to the second",
    )
    parser.add_argument(
        "--pid",
        action="append",
        type=int,
        help="process of the server, in the order of --url (default: who listens on its port)",
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="default: 60")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at once; default: 4")
    parser.add_argument("--seed", type=int, default=0, help="seed of the load; default: 0")
    parser.add_argument(
        "--no-budgets", action="store_true", help="send no budgets per request to any server"
    )
    parser.add_argument(
        "--max-growth",
        type=float,
        default=50.0,
        metavar="MB_PER_HOUR",
        help="memory growth that is allowed, beyond two standard errors; default: 50",
    )
    parser.add_argument(
        "--drain", type=float, default=120.0, metavar="SECONDS", help="patience; default: 120"
    )
    parser.add_argument(
        "--bench", metavar="FOLDER", help="run `vllm bench serve` beside it; the tokenizer's folder"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every raw figure to FILE")
    arguments = parser.parse_args(argv)
    if len(arguments.url) > 2:
        parser.error("--url is given once or twice")
    if arguments.pid and len(arguments.pid) != len(arguments.url):
        parser.error("--pid is given for every --url or for none")
    if arguments.minutes <= 0 or arguments.concurrency < 1:
        parser.error("--minutes and --concurrency must be positive")
    return arguments


class Soak:
    """One soak.

    Args:
        arguments: The command line.
        say: Prints a line of progress.
    """

    def __init__(self, arguments: argparse.Namespace, say: Any) -> None:
        self.arguments = arguments
        self.say = say
        self.began = time.monotonic()
        self.servers = [Server(*_named(text), self.began) for text in arguments.url]
        self.watches: list[Watch] = []
        self.outcomes: list[Outcome] = []
        self.rounds: list[dict[str, Any]] = []
        self._stop = asyncio.Event()
        self._failures_in_a_row = dict.fromkeys((server.name for server in self.servers), 0)

    async def run(self) -> dict[str, Any]:
        """Load the servers, drain them, and return the summary.

        Raises:
            LookupError: A server's processes were not found.
            openai.OpenAIError: A server does not answer before the load starts.
        """
        for server in self.servers:
            await server.inspect(budgets=not self.arguments.no_budgets)
            budgets = "with" if server.sieve else "without"
            self.say(f"{server.name}: {server.model}, {budgets} budgets per request")
        pids = self.arguments.pid
        for index, server in enumerate(self.servers):
            roots = [psutil.Process(pids[index])] if pids else find_processes(server.url)
            self.watches.append(Watch(server, roots))
        load = Load(
            self.arguments.seed,
            min(server.max_model_len for server in self.servers),
            any(server.sieve for server in self.servers),
        )
        self.began = time.monotonic()
        for server in self.servers:
            server.began = self.began
        async with httpx.AsyncClient(trust_env=False) as http:
            seconds = await self._load(iter(load), http)
            self.say(f"draining after {len(self.outcomes)} requests")
            drained = {watch.server.name: await self._drain(watch, http) for watch in self.watches}
        for server in self.servers:
            await server.close()
        summary = summarize(
            self.watches, self.outcomes, drained, seconds, self.arguments.max_growth
        )
        summary["bench"] = self.rounds
        for one in self.rounds:
            if not one["stopped"] and (one["exit"] or one["failed"] or not one["succeeded"]):
                summary["problems"].append(f"{one['server']}: vllm bench serve failed: {one}")
        return summary

    async def _load(self, jobs: Iterator[Job], http: httpx.AsyncClient) -> float:
        """Run the load; returns how long it took, in seconds."""
        tasks = [asyncio.create_task(self._work(jobs)) for _ in range(self.arguments.concurrency)]
        watching = asyncio.create_task(self._watch(http))
        benching = None
        if self.arguments.bench:
            log = Path(f"/tmp/kvsieve-soak-bench-{os.getpid()}.log")
            self.say(f"log of vllm bench serve: {log}")
            rounds = run_rounds(
                self.servers, self.arguments.bench, self.arguments.seed, log, self._stop
            )
            benching = asyncio.create_task(rounds)
        try:
            await asyncio.wait_for(self._stop.wait(), 60 * self.arguments.minutes)
        except TimeoutError:
            self._stop.set()
        await asyncio.gather(*tasks)
        seconds = time.monotonic() - self.began
        if benching:
            self.rounds = await benching
        await watching
        return seconds

    async def _work(self, jobs: Iterator[Job]) -> None:
        while not self._stop.is_set():
            job = next(jobs)
            # ABBA: whoever is first finds the other's cold caches, and so each is first as often.
            order = self.servers if job.number % 4 in (0, 3) else self.servers[::-1]
            for server in order:
                if job.sieve_only and not server.sieve:
                    continue
                outcome = await server.run(job)
                self.outcomes.append(outcome)
                self._note(outcome)

    def _note(self, outcome: Outcome) -> None:
        if outcome.status not in FINE:
            self.say(f"ERROR {outcome.server}, {outcome.status}: {outcome.error}")
        lost = outcome.status == "APIConnectionError"
        failures = self._failures_in_a_row[outcome.server] + 1 if lost else 0
        self._failures_in_a_row[outcome.server] = failures
        if failures >= DEAD_AFTER and not self._stop.is_set():
            self.say(f"{outcome.server} is dead: stopping")
            self._stop.set()

    async def _watch(self, http: httpx.AsyncClient) -> None:
        while True:
            for watch in self.watches:
                await watch.sample(self.began, http)
            if len(self.watches[0].samples) % 6 == 1:
                self._say_state()
            try:
                await asyncio.wait_for(self._stop.wait(), SAMPLE_EVERY_S)
            except TimeoutError:
                continue
            break
        for watch in self.watches:
            await watch.sample(self.began, http)

    def _say_state(self) -> None:
        bad = sum(outcome.status not in FINE for outcome in self.outcomes)
        memory = ", ".join(
            f"{watch.server.name} {watch.samples[-1]['rss_mb']:.0f} MB" for watch in self.watches
        )
        self.say(f"{len(self.outcomes)} requests, {bad} errors; {memory}")

    async def _drain(self, watch: Watch, http: httpx.AsyncClient) -> bool:
        try:
            return await watch.drained(self.began, http, self.arguments.drain)
        except Exception as error:
            self.say(f"{watch.server.name} does not answer any more: {error}")
            return False


def _named(text: str) -> tuple[str, str]:
    name, separator, url = text.partition("=")
    if separator and "/" not in name:
        return name, url
    return text.split("//")[-1].strip("/"), text


def main(argv: Sequence[str] | None = None) -> int:
    """Run a soak; returns the exit status."""
    arguments = parse_arguments(argv)
    progress = Console(stderr=True, highlight=False)
    began = time.monotonic()
    say = clocked(progress, began)

    birth = provenance(seed=arguments.seed)
    soak = Soak(arguments, say)
    try:
        summary = asyncio.run(soak.run())
    except (LookupError, openai.OpenAIError) as error:
        say(f"the load did not start: {error}")
        return 2
    if arguments.json:
        content = {
            "provenance": birth,
            "summary": summary,
            "samples": {watch.server.name: watch.samples for watch in soak.watches},
            "outcomes": [dataclasses.asdict(outcome) for outcome in soak.outcomes],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    print_summary(Console(width=None if os.isatty(1) else 140), summary, soak.outcomes)
    return 1 if summary["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
