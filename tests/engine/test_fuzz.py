"""Random traffic: invariants after every step, and each request as the oracle writes it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.engine import sabotage
from tests.engine.agreement import DEEP_SCORE_EPSILON, Agreement
from tests.engine.async_scheduling import make_async_engine
from tests.engine.engines import make_engine
from tests.engine.fuzz import Asked, Round, Traffic, run_traffic
from tests.engine.host import EngineHost, HostError
from tests.oracle.snapkv_oracle import Oracle

pytestmark = pytest.mark.engine

NUM_LAYERS = 6
MIXED_BUDGETS = (None, 68, 96, 130, 255, "full", "10%", "40%")
# One layer class of 2 layers per group, 2 * (64 + 64) * 4 bytes per token and layer.
BLOCK_BYTES = 32 * 2 * (64 + 64) * 4 * 2


def pool_of(num_blocks: int) -> int:
    """Memory for a pool of so many blocks, in bytes."""
    return num_blocks * BLOCK_BYTES


def start_engine(
    host: EngineHost,
    model: str,
    budget: int,
    chunk: int,
    pool: int,
    asynchronous: bool = False,
    **options: object,
) -> None:
    host.call(
        make_async_engine if asynchronous else make_engine,
        "fuzz",
        model,
        {"budget": budget, "full_layers": 2},
        skip_tokenizer_init=True,
        max_model_len=544,
        max_num_batched_tokens=chunk,
        kv_cache_memory_bytes=pool_of(pool),
        **options,
    )


def nominal_budget(asked: Asked, budget: int) -> int:
    """The budget that a request should have had: its own, or the operator's; all if full."""
    prompt_tokens = len(asked.prompt)
    if asked.mode == "full" or asked.kv_budget == "full":
        return prompt_tokens
    if asked.kv_budget is None:
        return budget
    if isinstance(asked.kv_budget, int):
        return asked.kv_budget
    percent = int(asked.kv_budget.rstrip("%"))
    return max(68, -(-prompt_tokens * percent // 100))


def check_round(oracle: Oracle, outcome: Round, budget: int) -> Agreement:
    """Fail unless invariants held and every request agrees with the oracle."""
    assert not outcome.violations, "\n".join(outcome.violations)
    agreement = Agreement(score_epsilon=DEEP_SCORE_EPSILON)
    for asked, generated in outcome.outcomes:
        prompt_tokens = len(asked.prompt)
        own_budget = nominal_budget(asked, budget)
        start = max(0, (prompt_tokens - own_budget) // 32 * 32)
        common = {"block_size": 32, "full_layers": {0, 1}}
        text = generated
        if asked.mode == "shadow":
            # What would be kept is scored like a sieve's; the text is the full cache's.
            scored = replace(
                generated, token_ids=generated.token_ids[:1], logprobs=generated.logprobs[:1]
            )
            agreement.compare(oracle, asked.prompt, scored, budget=own_budget, **common)
            text = replace(generated, kept={})
            own_budget = prompt_tokens
        agreement.compare(oracle, asked.prompt, text, budget=own_budget, **common)
        report = generated.report
        held = prompt_tokens - (start if asked.mode == "sieve" else 0)
        would_drop = start * 4 if asked.mode == "shadow" else 0
        given = (report["stored_tokens"]["sieved"], report["would_drop_tokens"])
        if given != (held, would_drop):
            agreement.disagreements.append(f"{asked.mode} {prompt_tokens}: reported {given}")
    agreement.check(max_logprob_difference=2e-3, max_tie_share=5e-3)
    return agreement


@pytest.fixture(scope="module")
def oracle(tiny_llama: str) -> Oracle:
    return Oracle(tiny_llama)


ROUNDS = [
    # budget, chunk, pool (blocks of 2 layers; a prompt of 500 takes 48), engine options
    pytest.param(96, 64, 400, {}, Traffic(1), id="plentiful-pool"),
    pytest.param(
        96,
        64,
        54,
        {},
        Traffic(2, max_prompt=200, max_output=120, arrival_chance=0.9),
        id="tiny-pool-preempts",
    ),
    pytest.param(96, 200, 120, {}, Traffic(3, abort_chance=0.08, max_output=30), id="aborts"),
    pytest.param(
        100,
        150,
        150,
        {"enable_prefix_caching": True},
        Traffic(4, shared_prefix=200, abort_chance=0.04),
        id="shared-prefix",
    ),
    pytest.param(
        100,
        150,
        100,
        {"enable_prefix_caching": True, "asynchronous": True},
        Traffic(
            8,
            num_requests=16,
            shared_prefix=100,
            turns=0.4,
            abort_chance=0.02,
            max_output=60,
            arrival_chance=0.3,
            burst=3,
            budgets=MIXED_BUDGETS,
            modes=("sieve", "shadow", "full"),
            switch_chance=0.1,
            reset_chance=0.02,
        ),
        id="async-and-everything",
    ),
]


@pytest.mark.parametrize(("budget", "chunk", "pool", "options", "traffic"), ROUNDS)
def test_random_traffic_on_v1(
    v1_host: EngineHost,
    tiny_llama: str,
    oracle: Oracle,
    budget: int,
    chunk: int,
    pool: int,
    options: dict[str, object],
    traffic: Traffic,
) -> None:
    start_engine(v1_host, tiny_llama, budget, chunk, pool, **options)
    outcome = v1_host.call(run_traffic, "fuzz", traffic)
    check_round(oracle, outcome, budget)
    if traffic.seed == 2:
        assert outcome.events["preemption"] > 0, "the pool was meant to be too small"


def test_random_traffic_on_v2(v2_host: EngineHost, tiny_llama: str, oracle: Oracle) -> None:
    start_engine(v2_host, tiny_llama, 96, 120, 110)
    traffic = Traffic(5, num_requests=6, max_output=6, max_prompt=400)
    check_round(oracle, v2_host.call(run_traffic, "fuzz", traffic), 96)


EVENTS: Counter[str] = Counter()
"""What happened to requests in all long rounds together."""
WANTED_EVENTS = 20_000


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 210))
def test_much_random_traffic_on_v2(
    v2_host: EngineHost, tiny_llama: str, oracle: Oracle, seed: int
) -> None:
    EVENTS.update(
        check_random_round(v2_host, tiny_llama, oracle, seed, num_requests=10, max_output=12).events
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1090))
def test_much_random_traffic_on_v1(
    v1_host: EngineHost, tiny_llama: str, oracle: Oracle, seed: int
) -> None:
    EVENTS.update(
        check_random_round(v1_host, tiny_llama, oracle, seed, num_requests=80, max_output=60).events
    )


@pytest.mark.long
def test_the_random_traffic_was_enough() -> None:
    print(dict(EVENTS))
    assert sum(EVENTS.values()) >= WANTED_EVENTS, EVENTS
    for kind in ("abort", "preemption", "prefix hit", "switch", "reset", "sieve", "shadow"):
        assert EVENTS[kind] > 100, EVENTS


def check_random_round(
    host: EngineHost, model: str, oracle: Oracle, seed: int, *, num_requests: int, max_output: int
) -> Round:
    """A round in which everything is drawn: budgets, chunks, pool, prefixes, aborts, modes."""
    draw = random.Random(seed)
    budget = draw.choice([68, 96, 100, 160, 255])
    chunk = draw.choice([17, 31, 33, 64, 150, 300])
    # 51 blocks are the least that a request of 544 tokens needs.
    pool = draw.choice([54, 70, 120, 400])
    priorities = draw.random() < 0.3
    start_engine(
        host,
        model,
        budget,
        chunk,
        pool,
        asynchronous=seed % 3 == 0,
        enable_prefix_caching=draw.random() < 0.75,
        scheduling_policy="priority" if priorities else "fcfs",
    )
    traffic = Traffic(
        seed,
        num_requests=num_requests,
        max_prompt=draw.choice([120, 300, 500]),
        max_output=draw.choice([4, max_output]),
        arrival_chance=draw.choice([0.1, 0.5, 1.0]),
        abort_chance=draw.choice([0.0, 0.05]),
        shared_prefix=draw.choice([0, 60, 200]),
        turns=draw.choice([0.0, 0.3, 0.6]),
        budgets=draw.choice([(None,), MIXED_BUDGETS]),
        modes=draw.choice([("sieve",), ("sieve", "shadow", "full")]),
        switch_chance=draw.choice([0.0, 0.1]),
        reset_chance=draw.choice([0.0, 0.0, 0.02]),
        priorities=priorities,
    )
    outcome = host.call(run_traffic, "fuzz", traffic)
    check_round(oracle, outcome, budget)
    return outcome


@pytest.fixture(scope="module")
def sabotaged_host() -> Iterator[EngineHost]:
    host = EngineHost("v1")
    yield host
    host.close()


@pytest.mark.parametrize(
    "bug", sabotage.BUGS, ids=[f"{bug.__name__}: {rule}" for bug, rule in sabotage.BUGS.items()]
)
def test_a_planted_bug_is_caught(
    sabotaged_host: EngineHost, tiny_llama: str, oracle: Oracle, bug: Callable[[], None]
) -> None:
    sabotaged_host.call(sabotage.plant, bug.__name__)
    try:
        with pytest.raises((AssertionError, HostError)):
            check_hard_round(sabotaged_host, tiny_llama, oracle)
    finally:
        sabotaged_host.call(sabotage.undo)


def test_without_a_planted_bug_the_same_rounds_pass(
    sabotaged_host: EngineHost, tiny_llama: str, oracle: Oracle
) -> None:
    check_hard_round(sabotaged_host, tiny_llama, oracle)


def check_hard_round(host: EngineHost, model: str, oracle: Oracle) -> None:
    """Five small rounds that need every rule."""
    start_engine(host, model, 96, 1000, 250, enable_prefix_caching=True)
    shared = Traffic(
        6,
        num_requests=14,
        max_prompt=400,
        max_output=40,
        shared_prefix=250,
        turns=0.4,
        burst=5,
        budgets=(None, 68, 160),
        reset_chance=0.1,
    )
    check_round(oracle, host.call(run_traffic, "fuzz", shared), 96)
    chat = Traffic(9, num_requests=8, max_prompt=400, arrival_chance=0.1, turns=0.9)
    check_round(oracle, host.call(run_traffic, "fuzz", chat), 96)
    start_engine(host, model, 68, 31, 150, enable_prefix_caching=False)
    aborting = Traffic(3, num_requests=12, max_prompt=220, max_output=6, abort_chance=0.3)
    check_round(oracle, host.call(run_traffic, "fuzz", aborting), 68)
    start_engine(host, model, 68, 150, 54, enable_prefix_caching=False)
    preempting = Traffic(2, num_requests=8, max_prompt=220, max_output=200, arrival_chance=1.0)
    outcome = host.call(run_traffic, "fuzz", preempting)
    check_round(oracle, outcome, 68)
    assert outcome.events["preemption"] > 0, "the pool was meant to be too small"
    start_engine(host, model, 96, 150, 54, enable_prefix_caching=False)
    tight = Traffic(7, num_requests=8, max_prompt=220, max_output=60, arrival_chance=1.0)
    outcome = host.call(run_traffic, "fuzz", tight)
    check_round(oracle, outcome, 96)
    assert outcome.events["preemption"] == 0, "freed first, the blocks suffice"
