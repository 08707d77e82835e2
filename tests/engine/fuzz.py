"""Random traffic through one engine, step by step, with every invariant checked in between.

Runs inside an engine's process. The outcome of each request is returned, and the test
compares it with the oracle; what can be checked from inside is checked here.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.engine import engines
from tests.engine.engines import BLOCK_SIZE, Generated, as_generated
from tests.engine.models import random_prompt

NULL_MARK = 7.0
"""What the null block holds: a write to it would show."""
FREED_MARK = 1e3
"""What freed blocks are overwritten with: a read of one shows in the text. Finite, because
the kernel multiplies masked slots by zero."""


@dataclass
class Traffic:
    """Parameters of one round.

    Attributes:
        seed: Seed of lengths, arrivals and aborts.
        num_requests: Requests of the round.
        max_prompt: Longest prompt, in tokens.
        max_output: Longest answer, in tokens.
        arrival_chance: Chance that another request arrives in a step.
        burst: Requests that arrive together, at most.
        abort_chance: Chance that a running or waiting request is aborted in a step.
        shared_prefix: Tokens that all prompts start with.
        turns: Chance that a request continues an earlier one (prompt, answer and more) or
            repeats it.
        budgets: What requests ask for as `kv_budget`; drawn for each.
        modes: Modes that a switch may choose.
        switch_chance: Chance that the mode is switched in a step.
        reset_chance: Chance that the prefix cache is reset in a step, running requests and all.
        priorities: Whether requests have priorities (the engine must schedule by them).
        prunes: What requests ask for as `kv_prune`; drawn for each.
    """

    seed: int
    num_requests: int = 12
    max_prompt: int = 500
    max_output: int = 16
    arrival_chance: float = 0.5
    burst: int = 1
    abort_chance: float = 0.0
    shared_prefix: int = 0
    turns: float = 0.0
    budgets: tuple[Any, ...] = (None,)
    modes: tuple[str, ...] = ("sieve",)
    switch_chance: float = 0.0
    reset_chance: float = 0.0
    priorities: bool = False
    prunes: tuple[Any, ...] = (None,)


@dataclass
class Asked:
    """One request of a round: what was sent, and the mode at that time."""

    prompt: list[int]
    kv_budget: Any
    mode: str
    prune: str | None = None


@dataclass
class Round:
    """What a round of traffic gave.

    Attributes:
        outcomes: What was asked and what came of it, for each request that was not aborted.
        steps: Steps of the engine.
        events: What happened to requests, by kind.
        violations: Broken invariants, in words.
    """

    outcomes: list[tuple[Asked, Generated]] = field(default_factory=list)
    steps: int = 0
    events: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def run_traffic(name: str, traffic: Traffic) -> Round:
    """Drive a named sieved engine with random traffic and check it after every step."""
    return _Fuzz(name, traffic).run()


class _Fuzz:
    def __init__(self, name: str, traffic: Traffic) -> None:
        self.name = name
        self.traffic = traffic
        self.random = random.Random(traffic.seed)
        self.llm_engine = engines._engines[name].llm_engine
        self.scheduler = engines.scheduler(name)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        self.sieve = engines.worker(name).sieve
        self.caches = list(
            {
                layer.kv_cache.data_ptr(): layer.kv_cache
                for layer in engines.core(
                    name
                ).vllm_config.compilation_config.static_forward_context.values()
            }.values()
        )
        self.round = Round()
        self.asked: dict[str, Asked] = {}
        self.preemptions: dict[str, int] = {}
        self.counted: dict[str, set[str]] = {}
        self.baseline = self.pool.get_num_free_blocks()

    def run(self) -> Round:
        traffic = self.traffic
        self.prefix = random_prompt(traffic.shared_prefix, 999_999)
        self.scheduler.set_kvsieve_mode(traffic.modes[0])
        waiting = [f"{traffic.seed}-{index}" for index in range(traffic.num_requests)]
        selections = engines.capture_selections(self.name)
        alive: set[str] = set()
        for ring in self.sieve.observer._rings.values():
            ring.fill_(float("nan"))
        for cache in self.caches:
            cache[0].fill_(NULL_MARK)

        while waiting or alive:
            if waiting and (not alive or self._happens(traffic.arrival_chance)):
                together = 1 if traffic.burst == 1 else self.random.randint(1, traffic.burst)
                for _ in range(min(together, len(waiting))):
                    request_id = waiting.pop()
                    alive.add(request_id)
                    self._add(request_id)
            if alive and self._happens(traffic.abort_chance):
                victim = self.random.choice(sorted(alive))
                self.llm_engine.abort_request([victim])
                alive.discard(victim)
                self.round.events["abort"] += 1
            if self._happens(traffic.switch_chance):
                self.scheduler.set_kvsieve_mode(self.random.choice(traffic.modes))
                self.round.events["switch"] += 1
            if self._happens(traffic.reset_chance):
                self.scheduler.reset_prefix_cache(reset_running_requests=True)
                self.round.events["reset"] += 1
            self._overwrite_freed_blocks()
            for output in self.llm_engine.step():
                if output.finished:
                    alive.discard(output.request_id)
                    kept = engines._selection(selections, output.request_id)
                    self.round.outcomes.append(
                        (self.asked[output.request_id], as_generated(output, kept))
                    )
                    self.round.events["finish"] += 1
                    self.round.events["prefix hit"] += bool(output.num_cached_tokens)
            self.round.steps += 1
            self._check_step()
            if self.round.violations or self.round.steps > 20_000:
                break
        self._check_end()
        return self.round

    def _happens(self, chance: float) -> bool:
        # Drawn only where it matters, so that rounds without a feature stay as they were.
        return chance > 0 and self.random.random() < chance

    def _prompt(self, request_id: str) -> list[int]:
        traffic = self.traffic
        length = self.random.randint(1, traffic.max_prompt)
        seed = traffic.seed * 1000 + int(request_id.rsplit("-", 1)[1])
        before = self.prefix
        if self.round.outcomes and self._happens(traffic.turns):
            asked, generated = self.random.choice(self.round.outcomes)
            if self.random.random() < 0.3:
                return asked.prompt
            before = [*asked.prompt, *generated.token_ids][: traffic.max_prompt - 1]
            length = min(traffic.max_prompt, len(before) + self.random.randint(1, 80))
        tail = random_prompt(max(1, length - len(before)), seed)
        return [*before[: length - 1], *tail]

    def _add(self, request_id: str) -> None:
        from vllm import SamplingParams

        traffic = self.traffic
        prompt = self._prompt(request_id)
        kv_budget = self.random.choice(traffic.budgets) if len(traffic.budgets) > 1 else None
        prune = self.random.choice(traffic.prunes) if len(traffic.prunes) > 1 else None
        self.asked[request_id] = Asked(prompt, kv_budget, self.scheduler.kvsieve_mode, prune)
        wishes = {"kv_budget": kv_budget, "kv_prune": prune}
        extra_args = {key: value for key, value in wishes.items() if value is not None}
        sampling = SamplingParams(
            temperature=0,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=self.random.randint(1, traffic.max_output),
            extra_args=extra_args or None,
        )
        priority = self.random.randint(0, 2) if traffic.priorities else 0
        self.llm_engine.add_request(
            request_id, {"prompt_token_ids": prompt}, sampling, priority=priority
        )
        self.round.events["arrival"] += 1

    def _count(self, request_id: str, event: str) -> None:
        seen = self.counted.setdefault(request_id, set())
        if event not in seen:
            seen.add(event)
            self.round.events[event] += 1

    def _overwrite_freed_blocks(self) -> None:
        """Make reads of freed blocks visible; blocks of the prefix cache keep their content."""
        freed = [
            block.block_id
            for block in self.pool.free_block_queue.get_all_free_blocks()
            if block.block_hash is None
        ]
        for cache in self.caches:
            cache[freed] = FREED_MARK

    def _check_step(self) -> None:
        complain = self.round.violations.append
        for request_id, request in self.scheduler.requests.items():
            self.preemptions[request_id] = request.num_preemptions
            plan = self.scheduler.planned[request_id]
            if plan.is_observed and request.num_computed_tokens >= plan.prompt_tokens:
                self._count(request_id, plan.treatment.mode)
        self.round.events["preemption"] = sum(self.preemptions.values())
        for cache in self.caches:
            if not torch.all(cache[0] == NULL_MARK):
                complain(f"step {self.round.steps}: the null block was written to")
                break
        self._check_published()
        holders: dict[int, int] = {}
        for manager in self.managers:
            for request_id, blocks in manager.req_to_blocks.items():
                request = self.scheduler.requests[request_id]
                held = [block for block in blocks if not block.is_null]
                for block in held:
                    holders[block.block_id] = holders.get(block.block_id, 0) + 1
                start = 0
                if manager in self.scheduler.sieved_managers:
                    start = self.scheduler.planned[request_id].starts[0]
                nulls = len(blocks) - len(held)
                if any(block.is_null for block in blocks[nulls:]):
                    complain(f"step {self.round.steps}: a hole in the blocks of {request_id}")
                if nulls > start // BLOCK_SIZE:
                    complain(
                        f"step {self.round.steps}: {request_id} lost {nulls} blocks, but"
                        f" {start // BLOCK_SIZE} lie before its start"
                    )
                if request.num_computed_tokens > len(blocks) * BLOCK_SIZE:
                    complain(f"step {self.round.steps}: tokens of {request_id} have no block")
        for block_id, count in holders.items():
            if self.pool.blocks[block_id].ref_cnt != count:
                complain(
                    f"step {self.round.steps}: block {block_id} is held {count} times and counted"
                    f" {self.pool.blocks[block_id].ref_cnt} times"
                )
                break
        copies = self.scheduler.tail_copies.num_held
        if self.pool.get_num_free_blocks() + len(holders) + copies != self.baseline:
            complain(
                f"step {self.round.steps}: {len(holders)} blocks held, {copies} copies and"
                f" {self.pool.get_num_free_blocks()} free, of {self.baseline}"
            )

    def _check_published(self) -> None:
        """No block that holds something else than a prompt is known to the prefix cache."""
        for request_id, request in self.scheduler.requests.items():
            plan = self.scheduler.planned[request_id]
            if not plan.is_sieved:
                continue
            for manager in self.managers:
                blocks = manager.req_to_blocks.get(request_id, [])
                first_private = request.num_prompt_tokens // BLOCK_SIZE
                if manager in self.scheduler.sieved_managers:
                    first_private = plan.starts[0] // BLOCK_SIZE
                if plan.is_pruned:
                    first_private = 0
                if any(block.block_hash is not None for block in blocks[first_private:]):
                    self.round.violations.append(
                        f"step {self.round.steps}: {request_id} published what is not its prompt"
                    )

    def _check_end(self) -> None:
        complain = self.round.violations.append
        if self.pool.get_num_free_blocks() != self.baseline:
            complain(f"{self.baseline - self.pool.get_num_free_blocks()} blocks did not come back")
        # Windows of aborted requests are given back with the next step's message.
        from vllm import SamplingParams

        self.llm_engine.add_request(
            f"{self.traffic.seed}-last",
            {"prompt_token_ids": [5]},
            SamplingParams(max_tokens=1, detokenize=False),
        )
        while self.llm_engine.has_unfinished_requests():
            self.llm_engine.step()
        if self.sieve.observer.num_open:
            complain(f"{self.sieve.observer.num_open} observation windows did not come back")
        scheduler = self.scheduler
        if self.sieve.pruner is not None and self.sieve.pruner.num_carried:
            complain("chunks of pruned prompts did not come back")
        if scheduler.proof._rows or scheduler._to_free or scheduler.planned._plans:
            complain("the scheduler remembers requests that are gone")
        if scheduler.tail_copies._in_flight or scheduler.tail_copies._keys:
            complain("copies of tails were not given back")
        if any(m._freed or m._tail_hits for m in scheduler.sieved_managers):
            complain("a manager remembers requests that are gone")
