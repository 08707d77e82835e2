"""Random traffic through one engine, step by step, with every invariant checked in between.

Runs inside an engine's process. The outcome of each request is returned, and the test
compares it with the oracle; what can be checked from inside is checked here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

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
        abort_chance: Chance that a running or waiting request is aborted in a step.
        shared_prefix: Tokens that all prompts start with.
    """

    seed: int
    num_requests: int = 12
    max_prompt: int = 500
    max_output: int = 16
    arrival_chance: float = 0.5
    abort_chance: float = 0.0
    shared_prefix: int = 0


@dataclass
class Round:
    """What a round of traffic gave.

    Attributes:
        outcomes: Prompt and outcome of each request that was not aborted.
        steps: Steps of the engine.
        preemptions: Preemptions that happened.
        aborted: Requests aborted.
        violations: Broken invariants, in words.
    """

    outcomes: list[tuple[list[int], Generated]] = field(default_factory=list)
    steps: int = 0
    preemptions: int = 0
    aborted: int = 0
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
        self.preemptions: dict[str, int] = {}
        self.baseline = self.pool.get_num_free_blocks()

    def run(self) -> Round:
        traffic = self.traffic
        prefix = random_prompt(traffic.shared_prefix, 999_999)
        waiting = []
        for index in range(traffic.num_requests):
            length = self.random.randint(1, traffic.max_prompt)
            tail = random_prompt(max(1, length - len(prefix)), traffic.seed * 1000 + index)
            waiting.append((f"{traffic.seed}-{index}", [*prefix[: length - 1], *tail]))
        prompts = dict(waiting)
        selections = engines.capture_selections(self.name)
        alive: set[str] = set()
        for ring in self.sieve.observer._rings.values():
            ring.fill_(float("nan"))
        for cache in self.caches:
            cache[0].fill_(NULL_MARK)

        while waiting or alive:
            if waiting and (not alive or self.random.random() < traffic.arrival_chance):
                request_id, prompt = waiting.pop()
                alive.add(request_id)
                self._add(request_id, prompt)
            if alive and self.random.random() < traffic.abort_chance:
                victim = self.random.choice(sorted(alive))
                self.llm_engine.abort_request([victim])
                alive.discard(victim)
                self.round.aborted += 1
            self._overwrite_freed_blocks()
            for output in self.llm_engine.step():
                if output.finished:
                    alive.discard(output.request_id)
                    kept = engines._selection(selections, output.request_id)
                    self.round.outcomes.append(
                        (prompts[output.request_id], as_generated(output, kept))
                    )
            self.round.steps += 1
            self._check_step()
            if self.round.violations or self.round.steps > 5000:
                break
        self._check_end()
        return self.round

    def _add(self, request_id: str, prompt: list[int]) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=self.random.randint(1, self.traffic.max_output),
        )
        self.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)

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
        for request in self.scheduler.requests.values():
            self.preemptions[request.request_id] = request.num_preemptions
        self.round.preemptions = sum(self.preemptions.values())
        for cache in self.caches:
            if not torch.all(cache[0] == NULL_MARK):
                complain(f"step {self.round.steps}: the null block was written to")
                break
        holders: dict[int, int] = {}
        for manager in self.managers:
            spec = manager.kv_cache_spec
            for request_id, blocks in manager.req_to_blocks.items():
                request = self.scheduler.requests[request_id]
                held = [block for block in blocks if not block.is_null]
                for block in held:
                    holders[block.block_id] = holders.get(block.block_id, 0) + 1
                prompt_tokens = request.num_prompt_tokens
                start = spec.start(prompt_tokens) if hasattr(spec, "start") else 0
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
        if self.pool.get_num_free_blocks() + len(holders) != self.baseline:
            complain(
                f"step {self.round.steps}: {len(holders)} blocks held and"
                f" {self.pool.get_num_free_blocks()} free, of {self.baseline}"
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
        if self.scheduler._rows or self.scheduler._to_free:
            complain("the scheduler remembers requests that are gone")
        if any(manager._freed for manager in self.scheduler.sieved_managers):
            complain("a manager remembers requests that are gone")
