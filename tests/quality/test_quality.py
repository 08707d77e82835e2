"""What the sieve costs, against committed bounds; and whether the bounds would notice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvsieve.evals.record import Record
from kvsieve.evals.results import quality
from kvsieve.evals.statistics import paired_difference
from tests.quality.gate import BUDGETS, LONG, SHORT, Suite, below, means, read_bounds, run

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return run(SHORT, SHORT.policies, tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Record]]:
    # Each policy has a server of its own; full KV runs on all of them.
    return run(LONG, ("snapkv", "streaming_llm", "random"), tmp_path_factory.mktemp("long"))


def passed_off(records: list[Record], policy: str, suite: Suite) -> list[Record]:
    """The records as they would be if the sieve of the suite's first policy did something else."""
    return [
        record.model_copy(update={"policy": suite.policies[0]})
        for record in records
        if record.policy == policy
    ]


def test_full_kv_is_what_the_model_is_known_for(short: list[Record]) -> None:
    found = means(record for record in short if record.setting.is_full)
    assert found["full / niah / score"][0] == 1.0
    assert found["full / recall / score"][0] > 0.9
    assert found["full / fidelity / agreement"][0] == 1.0
    assert found["full / fidelity / minus_kl"][0] == 0.0


def test_every_request_of_a_budget_was_sieved(short: list[Record]) -> None:
    assert all(record.sieved != record.setting.is_full for record in short)


def test_quality_is_within_the_bounds(short: list[Record]) -> None:
    assert below(short, read_bounds(SHORT)) == []


@pytest.mark.long
def test_quality_of_every_policy_is_within_the_bounds(long: list[Record]) -> None:
    assert below(long, read_bounds(LONG)) == []


@pytest.mark.long
@pytest.mark.parametrize("policy", ["streaming_llm", "random"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_broken_sieve_would_be_noticed(long: list[Record], policy: str, budget: str) -> None:
    bounds = {
        key: bound
        for key, bound in read_bounds(LONG).items()
        if key.startswith(f"snapkv {budget} / ")
    }
    failing = below(passed_off(long, policy, LONG), bounds)
    assert any("niah_essay" in words or "multi_turn" in words for words in failing), failing


@pytest.mark.long
@pytest.mark.parametrize("policy", ["streaming_llm", "random"])
def test_a_broken_sieve_scores_clearly_lower(long: list[Record], policy: str) -> None:
    # At 25% this model has lost so much that the window alone is not clearly worse.
    budget = "50%"
    scores = {
        name: {r.item_id: quality(r) for r in long if (r.policy, r.kv_budget) == (name, budget)}
        for name in ("snapkv", policy)
    }
    broken, sound = (
        [scores[name][item] for item in scores["snapkv"]] for name in (policy, "snapkv")
    )
    assert paired_difference(broken, sound).high < 0


@pytest.mark.long
@pytest.mark.parametrize("policy", ["streaming_llm", "random"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("task", LONG.tasks)
def test_every_task_tells_a_broken_sieve_from_full_kv(
    long: list[Record], policy: str, budget: str, task: str
) -> None:
    broken, full = (
        [quality(r) for r in long if (r.policy, r.task, r.kv_budget) == (policy, task, kept)]
        for kept in (budget, "full")
    )
    assert paired_difference(broken, full).high < 0
