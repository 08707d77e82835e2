"""What holds for every method of the table; a new row inherits all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsieve import ConfigError
from kvsieve.kernels.dense import DenseEvidence
from kvsieve.policies import METHODS, Policy, Rotary, method_names, parse_settings, protect
from tests.oracle.policy_references import NEAR, PUBLISHED
from tests.unit.policy_parts import (
    ALL_METHODS,
    SHAPES,
    Shape,
    Tensors,
    budgets,
    expected_choice,
    make_policy,
    make_tensors,
)

MAX_NEAR_TIES = 2
"""Positions of a prompt and budget, over all heads, in which a near tie may fall otherwise."""


def test_every_method_has_an_independent_reference() -> None:
    assert set(PUBLISHED) == set(METHODS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ALL_METHODS)
def test_kept_sets_are_those_of_the_definition(name: str, shape: Shape, tmp_path: Path) -> None:
    policy, published = make_policy(name, shape.heads, tmp_path), PUBLISHED[name]
    tensors = make_tensors(shape)
    prompt = tensors.prompt()
    for keep in budgets(published, shape.tokens):
        chosen = policy.choose(tensors.evidence(policy), keep).tolist()

        num_candidates = shape.tokens - published.num_recent(keep)
        ranking = published.rank(prompt, published, num_candidates, keep)
        kept, close = expected_choice(ranking, published, shape.tokens, keep)
        different = 0
        for head in range(shape.kv_heads):
            wrong = set(chosen[head]) ^ set(kept[head])
            assert wrong <= close[head], (keep, head, sorted(wrong - close[head]))
            different += len(wrong)
        assert different <= 2 * MAX_NEAR_TIES


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", sorted(set(ALL_METHODS) - {"chunkkv"}))
def test_scores_are_those_of_the_definition_up_to_a_factor(
    name: str, shape: Shape, tmp_path: Path
) -> None:
    policy, published = make_policy(name, shape.heads, tmp_path), PUBLISHED[name]
    tensors = make_tensors(shape, seed=1)
    keep = budgets(published, shape.tokens)[0]

    scores = policy.candidate_scores(tensors.evidence(policy), keep).double()

    num_candidates = shape.tokens - published.num_recent(keep)
    ranking = published.rank(tensors.prompt(), published, num_candidates, keep)
    expected = ranking.levels[-1]
    assert scores.shape == expected.shape
    if len(ranking.levels) > 1:
        # Those that a first stage chose stand above all others and have no score of their own.
        assert torch.equal(scores > 1e30, ranking.levels[0] > 0)
        scores = scores.masked_fill(scores > 1e30, 0.0)
    if expected.numel() and bool(expected.any()):
        scores = scores * (expected.norm() / scores.norm())
        assert float((scores - expected).abs().max()) <= NEAR * float(expected.abs().max())


@pytest.mark.parametrize("name", ALL_METHODS)
def test_defaults_are_the_published_ones(name: str, tmp_path: Path) -> None:
    policy, published = make_policy(name, 4, tmp_path), PUBLISHED[name]

    assert policy.observation_window == published.window
    assert policy.num_recent_tokens == published.num_recent(10**9)
    assert policy.num_sink_tokens == published.sinks
    assert policy.recent_share == published.recent_share
    assert policy.pool_size == published.pool
    assert published.pool == 1 or policy.pooling == published.pooling
    assert policy.name == name


@pytest.mark.parametrize("name", ALL_METHODS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 90),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4]),
    seed=st.integers(0, 50),
    data=st.data(),
)
def test_choice_is_legal_keeps_what_it_must_and_repeats_itself(
    name: str,
    tmp_path: Path,
    tokens: int,
    kv_heads: int,
    group: int,
    seed: int,
    data: st.DataObject,
) -> None:
    tensors = make_tensors(Shape(tokens, kv_heads, group), seed, num_positions=640)
    policy = make_policy(name, kv_heads * group, tmp_path)
    keep = data.draw(st.integers(0, tokens), label="keep")

    chosen = policy.choose(tensors.evidence(policy), keep)

    assert chosen.shape == (kv_heads, keep) and chosen.dtype == torch.int64
    assert (chosen.diff(dim=1) > 0).all()
    assert not keep or 0 <= int(chosen.min()) <= int(chosen.max()) < tokens
    recent = min(policy.num_recent_tokens, keep)
    sinks = set(range(min(policy.num_sink_tokens, tokens - recent)))
    for row in chosen.tolist():
        assert set(range(tokens - recent, tokens)) <= set(row)
        assert keep - recent < len(sinks) or sinks <= set(row)
    again = make_policy(name, kv_heads * group, tmp_path)
    assert torch.equal(chosen, again.choose(tensors.evidence(again), keep))


@pytest.mark.parametrize("name", ALL_METHODS)
def test_more_than_the_prompt_is_refused(name: str, tmp_path: Path) -> None:
    policy = make_policy(name, 2, tmp_path)
    evidence = make_tensors(Shape(20, 1, 2)).evidence(policy)

    for keep in (-1, 21):
        with pytest.raises(ValueError, match=r"num_keep must be in \[0, 20\]"):
            policy.choose(evidence, keep)


@pytest.mark.parametrize("name", ALL_METHODS)
def test_protected_spans_are_kept(name: str, tmp_path: Path) -> None:
    policy = make_policy(name, 6, tmp_path)
    tokens = 300
    evidence = make_tensors(Shape(tokens, 2, 3)).evidence(policy)
    recent = policy.num_recent_tokens
    keep = recent + policy.num_sink_tokens + 30
    spans = [(10, 20), (21, 22), (30, 45)]

    chosen = policy.choose(evidence, keep, spans).tolist()

    for row in chosen:
        assert {*range(10, 20), 21, *range(30, 45)} <= set(row)
        assert set(range(policy.num_sink_tokens)) <= set(row)
        assert len(set(row)) == keep


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 299])
@pytest.mark.parametrize("name", ALL_METHODS)
def test_chunks_of_the_prompt_do_not_matter(name: str, chunk_size: int, tmp_path: Path) -> None:
    policy = make_policy(name, 6, tmp_path)
    tensors = make_tensors(Shape(300, 2, 3))
    keep = policy.num_recent_tokens + 40

    whole = policy.candidate_scores(tensors.evidence(policy), keep)
    chunked = policy.candidate_scores(tensors.evidence(policy, chunk_size), keep)

    assert torch.allclose(whole, chunked, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ALL_METHODS)
def test_state_is_as_large_as_announced(name: str, tmp_path: Path) -> None:
    policy = make_policy(name, 6, tmp_path)
    tensors = make_tensors(Shape(50, 2, 3))
    if policy.accumulator is None:
        with pytest.raises(AttributeError):
            tensors.evidence(policy).accumulated()
        return

    state = tensors.evidence(policy, 13).accumulated()

    parts = [state] if isinstance(state, torch.Tensor) else vars(state).values()
    held = sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
    assert held == policy.accumulator.num_bytes(50, 6, 2, 16)


class Watched(DenseEvidence):
    """Evidence that notes what it was asked for."""

    def __init__(self, tensors: Tensors, policy: Policy) -> None:
        vars(self).update(vars(tensors.evidence(policy)))
        self.asked: set[str] = set()
        self.rotary = WatchedRotary(tensors.rotary, self.asked)

    def keys(self) -> torch.Tensor:
        self.asked.add("keys")
        return super().keys()

    def values(self) -> torch.Tensor:
        self.asked.add("values")
        return super().values()

    def key_redundancy(self) -> torch.Tensor:
        self.asked.add("key_redundancy")
        return super().key_redundancy()

    def output_norms(self) -> torch.Tensor:
        self.asked.add("output_norms")
        return super().output_norms()


class WatchedRotary:
    """A rotary embedding that notes that it was looked at."""

    def __init__(self, rotary: Rotary, asked: set[str]) -> None:
        self._rotary, self._asked = rotary, asked

    def __getattr__(self, name: str) -> object:
        self._asked.add("rotary")
        return getattr(self._rotary, name)


@pytest.mark.parametrize("name", ALL_METHODS)
def test_a_policy_looks_at_what_it_declares_and_at_nothing_else(name: str, tmp_path: Path) -> None:
    policy = make_policy(name, 4, tmp_path)
    evidence = Watched(make_tensors(Shape(60, 2, 2)), policy)

    policy.choose(evidence, 50)

    assert evidence.asked == policy.looks_at


@pytest.mark.parametrize("name", ALL_METHODS)
def test_only_a_method_that_sees_the_question_changes_its_choice_with_it(
    name: str, tmp_path: Path
) -> None:
    policy = make_policy(name, 4, tmp_path)
    tensors = make_tensors(Shape(300, 2, 2))
    keep = policy.num_recent_tokens + 30
    before = policy.choose(tensors.evidence(policy), keep)
    tensors.queries[-policy.observation_window :] *= -1

    after = policy.choose(tensors.evidence(policy), keep)

    if METHODS[name].sees_question:
        assert policy.accumulator is None
        assert not torch.equal(before, after)
    elif policy.accumulator is None:
        assert torch.equal(before, after)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 1e30, -3e38])
@pytest.mark.parametrize("name", ALL_METHODS)
def test_broken_and_huge_keys_leave_a_legal_choice_that_repeats_itself(
    name: str, broken: float, tmp_path: Path
) -> None:
    policy = make_policy(name, 4, tmp_path)
    tensors = make_tensors(Shape(120, 2, 2))
    tensors.keys[0, 17] = broken
    keep = min(120, policy.num_recent_tokens + 50)

    chosen = policy.choose(tensors.evidence(policy), keep)

    assert chosen.shape == (2, keep) and (chosen.diff(dim=1) > 0).all()
    assert torch.equal(chosen, policy.choose(tensors.evidence(policy), keep))


class Level(DenseEvidence):
    """Evidence in which no token differs from another, to the last bit."""

    def __init__(self, tensors: Tensors, policy: Policy) -> None:
        vars(self).update(vars(tensors.evidence(policy)))
        self.queries = torch.zeros_like(self.queries)
        self.key, self.value = torch.ones_like(self.key), torch.ones_like(self.value)

    def window_attention(self, power: int = 1) -> torch.Tensor:
        return torch.ones_like(super().window_attention(power))

    def grouped_window_mean(self) -> torch.Tensor:
        return torch.ones_like(super().grouped_window_mean())

    def key_redundancy(self) -> torch.Tensor:
        return torch.ones_like(super().key_redundancy())

    def output_norms(self) -> torch.Tensor:
        return torch.ones_like(super().output_norms())

    def accumulated(self) -> object:
        state = super().accumulated()
        return torch.ones_like(state) if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("name", sorted(set(ALL_METHODS) - {"random"}))
def test_of_equal_tokens_the_later_are_kept(name: str, tmp_path: Path) -> None:
    # Without pooling: a mean over neighbours is lower at the ends.
    policy = make_policy(name, 2, tmp_path, pool_size=1)
    recent, sinks = min(80, policy.num_recent_tokens), policy.num_sink_tokens
    keep = min(80, recent + sinks + 9)

    chosen = policy.choose(Level(make_tensors(Shape(80, 1, 2)), policy), keep)

    first = min(sinks, 80 - recent)
    assert chosen[0].tolist() == [*range(first), *range(80 - keep + first, 80)]


@pytest.mark.parametrize("name", ALL_METHODS)
def test_scores_are_made_on_the_device_of_the_evidence(name: str, tmp_path: Path) -> None:
    policy = make_policy(name, 4, tmp_path)
    evidence = make_tensors(Shape(60, 2, 2)).evidence(policy, chunk_size=25)
    # A device without data: whatever is made elsewhere cannot be combined with what is there.
    for tensor in ("queries", "key", "value", "output_projection"):
        setattr(evidence, tensor, getattr(evidence, tensor).to("meta"))
    evidence.rotary = Rotary(evidence.rotary.cos_sin.to("meta"), evidence.rotary.is_neox)

    scores = policy.score(evidence)

    assert scores.device.type == "meta"
    assert (scores.shape[0], scores.shape[2]) == (2, 60)
    if policy.refine is not None:
        assert policy.refine(scores[:, 0], evidence, 50).device.type == "meta"
    assert protect(scores[:, 0], 4, [(10, 12)], 5, 50).device.type == "meta"


@pytest.mark.parametrize("name", ALL_METHODS)
def test_every_row_says_what_it_is(name: str) -> None:
    method = METHODS[name]

    assert method.name == name and name in method_names()
    assert method.summary and not method.summary.endswith(".")
    assert len(method.summary) <= 90
    assert method.source or name == "random"
    assert method.build.__doc__


@pytest.mark.parametrize("name", ALL_METHODS)
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} has no option 'depth'"):
        parse_settings({"policy": name, "policy_options": {"depth": 3}})


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in ALL_METHODS for option in METHODS[name].options],
)
def test_options_of_a_wrong_kind_are_refused(name: str, option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        parse_settings({"policy": name, "policy_options": {option: {"a": "table"}}})
