"""Random traffic in which prompts are pruned: invariants, and each request as the oracles say."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engine import sabotage
from tests.engine.agreement import DEEP_SCORE_EPSILON, Agreement
from tests.engine.async_scheduling import make_async_engine
from tests.engine.engines import generate, make_engine
from tests.engine.fuzz import Asked, Round, Traffic, run_traffic
from tests.engine.host import EngineHost, HostError
from tests.engine.models import random_prompt
from tests.engine.prune_agreement import METHODS, check, load, reference_of, stored
from tests.oracle.snapkv_oracle import Oracle

pytestmark = pytest.mark.engine

BUDGET = 128
BLOCK_BYTES = 32 * 2 * (64 + 64) * 4 * 6
"""One group of six layers."""
WISHES = (None, "none", "fastkv@1", "asl@3", *METHODS)


def start(host: EngineHost, model: str, *, step: int, pool: int, **options: Any) -> None:
    asynchronous = options.pop("asynchronous", False)
    prune = options.pop("prune", "fastkv")
    host.call(
        make_async_engine if asynchronous else make_engine,
        "fuzz",
        model,
        {"budget": BUDGET, "prune": prune},
        skip_tokenizer_init=True,
        max_model_len=544,
        max_num_batched_tokens=step,
        kv_cache_memory_bytes=pool * BLOCK_BYTES,
        **options,
    )


@dataclass(frozen=True)
class Oracles:
    """The references: one for prompts that are pruned, one for those that are only sieved."""

    model: Any
    sieve: Oracle


def check_round(oracles: Oracles, outcome: Round, prune: str = "fastkv") -> dict[str, int]:
    """Fail unless invariants held and every request agrees with its reference.

    Returns:
        Requests that were pruned, by method.
    """
    assert not outcome.violations, "\n".join(outcome.violations)
    pruned: dict[str, int] = {}
    ties = 0
    agreement = Agreement(score_epsilon=DEEP_SCORE_EPSILON)
    for asked, generated in outcome.outcomes:
        if generated.report["pruned"] is None:
            fits = stored(len(asked.prompt), BUDGET) == len(asked.prompt)
            assert fits or asked.prune == "none" or generated.report["not_pruned"]
            agreement.compare(
                oracles.sieve,
                asked.prompt,
                generated,
                budget=BUDGET,
                block_size=32,
                full_layers=set(),
            )
            continue
        wish = asked.prune or prune
        method, _, layer = wish.partition("@")
        assert generated.report["pruned"]["method"] == method
        changes: dict[str, Any] = {}
        if "asl" in method:
            changes = {"min_layer": int(layer or 2), "observed_layers": 2}
        elif layer:
            changes = {"layer": int(layer)}
        reference = reference_of(
            oracles.model, asked.prompt, method, num_tokens=len(generated.token_ids), **changes
        )
        ties += check(reference, generated)
        pruned[method] = pruned.get(method, 0) + 1
    agreement.check(max_logprob_difference=2e-3, max_tie_share=5e-3)
    assert ties <= max(1, len(outcome.outcomes) // 20)
    return pruned


@pytest.fixture(scope="module")
def oracles(tiny_llama: str) -> Oracles:
    return Oracles(load(tiny_llama), Oracle(tiny_llama))


ROUNDS = [
    # tokens of a step, blocks of the pool (a prompt of 500 takes 16), engine options
    pytest.param(552, 90, {}, Traffic(1, prunes=WISHES), id="whole-prompts"),
    pytest.param(
        200, 60, {}, Traffic(2, num_requests=14, abort_chance=0.08, prunes=WISHES), id="chunks"
    ),
    pytest.param(
        552,
        19,
        {},
        Traffic(3, max_prompt=220, max_output=120, arrival_chance=0.9, prunes=WISHES),
        id="tiny-pool-preempts",
    ),
    pytest.param(
        180,
        19,
        {"enable_prefix_caching": True, "asynchronous": True},
        Traffic(
            4,
            num_requests=16,
            max_prompt=240,
            max_output=100,
            burst=3,
            abort_chance=0.02,
            shared_prefix=60,
            reset_chance=0.02,
            prunes=WISHES,
        ),
        id="async-shared-prefix",
    ),
]


@pytest.mark.parametrize(("step", "pool", "options", "traffic"), ROUNDS)
def test_random_traffic_on_v1(
    v1_host: EngineHost,
    tiny_llama: str,
    oracles: Oracles,
    step: int,
    pool: int,
    options: dict[str, Any],
    traffic: Traffic,
) -> None:
    start(v1_host, tiny_llama, step=step, pool=pool, **options)
    outcome = v1_host.call(run_traffic, "fuzz", traffic)
    assert check_round(oracles, outcome)
    if traffic.seed == 3:
        assert outcome.events["preemption"] > 0, "the pool was meant to be too small"


def test_random_traffic_on_v2(v2_host: EngineHost, tiny_llama: str, oracles: Oracles) -> None:
    start(v2_host, tiny_llama, step=200, pool=40)
    traffic = Traffic(5, num_requests=6, max_output=6, max_prompt=400, prunes=WISHES)
    assert check_round(oracles, v2_host.call(run_traffic, "fuzz", traffic))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3000, 3100))
def test_much_random_traffic(
    v1_host: EngineHost, tiny_llama: str, oracles: Oracles, seed: int
) -> None:
    draw = random.Random(seed)
    prune = draw.choice(["fastkv", "fastkv", "asl", "gemfilter"])
    start(
        v1_host,
        tiny_llama,
        step=draw.choice([150, 200, 330, 552]),
        pool=draw.choice([19, 24, 40, 100]),
        prune=prune,
        asynchronous=seed % 3 == 0,
        enable_prefix_caching=draw.random() < 0.5,
    )
    traffic = Traffic(
        seed,
        num_requests=16,
        max_prompt=draw.choice([180, 300, 500]),
        max_output=draw.choice([4, 60]),
        arrival_chance=draw.choice([0.1, 0.5, 1.0]),
        burst=draw.choice([1, 4]),
        abort_chance=draw.choice([0.0, 0.05, 0.2]),
        shared_prefix=draw.choice([0, 100]),
        reset_chance=draw.choice([0.0, 0.02]),
        prunes=WISHES,
    )
    check_round(oracles, v1_host.call(run_traffic, "fuzz", traffic), prune)


@pytest.fixture(scope="module")
def sabotaged_host() -> Iterator[EngineHost]:
    host = EngineHost("v1")
    yield host
    host.close()


def check_hard_rounds(host: EngineHost, path: str, oracles: Oracles) -> None:
    """Small rounds that need every rule of pruning."""
    start(host, path, step=200, pool=60, enable_prefix_caching=True)
    chunks = Traffic(
        6, num_requests=10, burst=4, shared_prefix=60, abort_chance=0.05, prunes=WISHES
    )
    check_round(oracles, host.call(run_traffic, "fuzz", chunks))
    start(host, path, step=1500, pool=100, enable_prefix_caching=True)
    whole = Traffic(7, num_requests=14, burst=8, prunes=("none", *METHODS))
    check_round(oracles, host.call(run_traffic, "fuzz", whole))
    # One step in which a prompt is pruned before the token rows of one that is not.
    wishes = ("fastkv@1", "none", "asl@3", "none")
    prompts = [random_prompt(300 + index, index) for index in range(len(wishes))]
    requests = [
        {"ignore_eos": True, "max_tokens": 4, "detokenize": False, "extra_args": {"kv_prune": wish}}
        for wish in wishes
    ]
    outcomes = host.call(generate, "fuzz", prompts, requests)
    together = Round(
        outcomes=[
            (Asked(prompt, None, "sieve", wish), generated)
            for prompt, wish, generated in zip(prompts, wishes, outcomes, strict=True)
        ]
    )
    assert sum(check_round(oracles, together).values()) == 2


@pytest.mark.parametrize(
    "bug",
    sabotage.PRUNING_BUGS,
    ids=[f"{bug.__name__}: {rule}" for bug, rule in sabotage.PRUNING_BUGS.items()],
)
def test_a_planted_bug_is_caught(
    sabotaged_host: EngineHost, tiny_llama: str, oracles: Oracles, bug: Callable[[], None]
) -> None:
    sabotaged_host.call(sabotage.plant, bug.__name__)
    try:
        with pytest.raises((AssertionError, HostError)):
            check_hard_rounds(sabotaged_host, tiny_llama, oracles)
    finally:
        sabotaged_host.call(sabotage.undo)


def test_without_a_planted_bug_the_same_rounds_pass(
    sabotaged_host: EngineHost, tiny_llama: str, oracles: Oracles
) -> None:
    check_hard_rounds(sabotaged_host, tiny_llama, oracles)
