"""Forced texts: passages, how far a distribution is from another, and the settings asked for."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve.core.errors import ConfigError
from kvsieve.evals.fidelity import compare, is_the_models_own, kl
from kvsieve.evals.passages import (
    CONTINUATION,
    CUE,
    FIDELITY,
    PASSAGE,
    PASSAGE_TASKS,
    RECALL,
    PassageTask,
    passage_items,
    read_text,
)
from kvsieve.evals.settings import Setting, every_setting
from kvsieve.serving.client import TokenLogprobs

Logprobs = dict[int, float]


@st.composite
def pairs_of_distributions(draw: st.DrawFn) -> tuple[Logprobs, Logprobs]:
    size = draw(st.integers(1, 30))
    logits = st.lists(st.floats(-12, 12), min_size=size, max_size=size)
    return softmax(draw(logits)), softmax(draw(logits))


def softmax(logits: list[float]) -> Logprobs:
    total = math.log(sum(map(math.exp, logits)))
    return {token: logit - total for token, logit in enumerate(logits)}


def exact_kl(p: Logprobs, q: Logprobs) -> float:
    return sum(math.exp(p[token]) * (p[token] - q[token]) for token in p)


def top(distribution: Logprobs, count: int) -> Logprobs:
    best = sorted(distribution, key=lambda token: -distribution[token])[:count]
    return {token: distribution[token] for token in best}


@given(pairs_of_distributions(), st.integers(1, 30))
def test_the_divergence_is_a_lower_bound(pair: tuple[Logprobs, Logprobs], count: int) -> None:
    p, q = pair
    found = kl(top(p, count), top(q, count))
    assert 0 <= found <= exact_kl(p, q) + 1e-6


@given(pairs_of_distributions())
def test_the_divergence_is_exact_over_the_whole_vocabulary(pair: tuple[Logprobs, Logprobs]) -> None:
    assert kl(*pair) == pytest.approx(max(0.0, exact_kl(*pair)), abs=1e-6)


@given(pairs_of_distributions(), st.integers(1, 30))
def test_equal_distributions_do_not_diverge(pair: tuple[Logprobs, Logprobs], count: int) -> None:
    assert kl(top(pair[0], count), top(pair[0], count)) == pytest.approx(0.0, abs=1e-6)


def step(token: int, **values: float) -> TokenLogprobs:
    listed = {int(name[1:]): value for name, value in values.items()}
    return TokenLogprobs(token, listed[token], listed)


def test_a_comparison_counts_what_it_says() -> None:
    full = [
        step(1, t1=math.log(0.6), t2=math.log(0.3)),
        step(2, t1=math.log(0.6), t2=math.log(0.3)),
    ]
    other = [full[0], step(2, t1=math.log(0.3), t2=math.log(0.6))]
    found = compare(full, other)
    assert (found.agreement, found.accuracy) == (0.5, 1.0)
    assert math.exp(found.nll) == pytest.approx(1 / 0.6)
    assert found.kl == pytest.approx(0.3 * math.log(2) / 2)
    same = compare(full, full)
    assert (same.kl, same.agreement, same.accuracy) == (0.0, 1.0, 0.5)


def test_a_tie_is_decided_alike_on_both_sides() -> None:
    one = step(1, t1=-1.0, t2=-1.0)
    two = TokenLogprobs(1, -1.0, {2: -1.0, 1: -1.0})
    assert compare([one], [two]).agreement == 1.0


@pytest.mark.parametrize("other", [[], [step(2, t2=-0.1)], [step(1, t1=-0.1)] * 2])
def test_runs_over_other_texts_are_not_compared(other: list[TokenLogprobs]) -> None:
    with pytest.raises(ValueError, match="did not say the same tokens"):
        compare([step(1, t1=-0.1)], other)


@given(pairs_of_distributions(), st.integers(1, 21))
def test_a_models_distribution_is_taken_for_one(
    pair: tuple[Logprobs, Logprobs], count: int
) -> None:
    listed = top(pair[0], count)
    token = next(iter(listed))
    assert is_the_models_own(TokenLogprobs(token, listed[token], listed))


@pytest.mark.parametrize(
    "listed",
    [
        {7: 0.0, 8: -9999.0, 9: -9999.0},  # What forcing makes of them: processed_logprobs.
        {7: 13.5, 8: 11.0, 9: 2.0},  # raw_logits.
        {7: -0.1, 8: -0.2, 9: -0.3},  # They sum to more than 1.
    ],
)
def test_other_scores_are_not(listed: Logprobs) -> None:
    assert not is_the_models_own(TokenLogprobs(7, listed[7], listed))


@given(
    st.sampled_from([FIDELITY, RECALL]),
    st.integers(300, 3000),
    st.integers(300, 1200),
    st.integers(1, 12),
    st.integers(0, 99),
    st.integers(0, 2),
)
def test_passages_have_their_length_and_do_not_overlap(
    task: PassageTask, text_length: int, length: int, count: int, seed: int, marks: int
) -> None:
    text, beginning = list(range(text_length)), [-1] * marks
    judged = CONTINUATION if task is FIDELITY else PASSAGE
    room = length - marks
    needed = room + count * CONTINUATION if task is FIDELITY else max(count * PASSAGE, room)
    ask = {"length": length, "count": count, "seed": seed, "beginning": beginning}
    if length < judged + PASSAGE + marks or text_length < needed:
        with pytest.raises(ConfigError, match="--lengths"):
            passage_items(task, text, **ask)
        return
    items = passage_items(task, text, **ask)
    assert len({item.item_id for item in items}) == len(items) == count
    seen: list[range] = []
    for item in items:
        prompt = list(item.prompt_ids)
        assert len(prompt) == length and prompt[:marks] == beginning
        if task is FIDELITY:
            assert len(item.forced_ids) == CONTINUATION
            start = item.forced_ids[0]
            # The continuation is what follows the prompt.
            assert prompt[marks:] + list(item.forced_ids) == list(
                range(start - length + marks, start + CONTINUATION)
            )
            seen.append(range(start, start + CONTINUATION))
        else:
            first = prompt[marks : marks + PASSAGE]
            assert prompt[-CUE:] + list(item.forced_ids) == first
            assert first == list(range(first[0], first[0] + PASSAGE))
            # The gap does not hold the passage, and repeats nothing.
            gap = prompt[marks + PASSAGE : -CUE]
            assert not set(gap) & set(first) and len(set(gap)) == len(gap)
            seen.append(range(first[0], first[0] + PASSAGE))
    assert all(one.stop <= two.start for one, two in pairwise(seen))


def test_the_seed_moves_the_passages() -> None:
    one, two, again = (
        passage_items(FIDELITY, list(range(5000)), length=600, count=4, seed=seed)
        for seed in (0, 1, 0)
    )
    assert one == again
    assert all(a.prompt_ids != b.prompt_ids for a, b in zip(one, two, strict=True))


def test_passages_are_the_same_in_another_process() -> None:
    script = (
        "from kvsieve.evals.passages import *\n"
        "for task in PASSAGE_TASKS.values():\n"
        "    for item in passage_items(task, range(4000), length=700, count=3, seed=5):\n"
        "        print(item.item_id, item.sha256)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = [
        f"{item.item_id} {item.sha256}"
        for task in PASSAGE_TASKS.values()
        for item in passage_items(task, range(4000), length=700, count=3, seed=5)
    ]
    assert done.stdout.splitlines() == here


def test_what_is_wrong_with_a_passage_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        passage_items(RECALL, range(300), length=400, count=2, seed=0)
    shortest, short_text = caught.value.reasons
    assert "at least 512 tokens (--lengths), given: 400" in shortest
    assert "a text of 512 tokens, and it has 300" in short_text and "--count" in short_text


def test_a_text_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xe9\xff")
    for path in (tmp_path / "latin", tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            read_text(path)
    assert len(read_text(None)) > 10_000


def test_settings_are_every_policy_at_every_budget() -> None:
    found = every_setting(["snapkv", "random"], ["25%", "256"])
    assert [(one.policy, one.kv_budget) for one in found] == [
        ("snapkv", "25%"),
        ("snapkv", 256),
        ("random", "25%"),
        ("random", 256),
    ]
    assert [one.name for one in found[:2]] == ["snapkv 25%", "snapkv 256"]
    assert not any(one.is_full for one in found) and Setting("random", "full").name == "full"


def test_all_that_is_wrong_with_settings_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        every_setting(
            ["snapkv", "nosuch", "snapkv"],
            ["256", "0256", "0", "120%", "full", "many", "-1", "25 %"],
        )
    said = str(caught.value)
    for part in (
        "there is no policy 'nosuch'",
        "policy 'snapkv' is given twice",
        "budget '0256' is given twice",
        "given: '0'",
        "given: '120%'",
        "full KV is always asked: leave 'full' out",
        "given: 'many'",
        "given: '-1'",
    ):
        assert part in said
    assert len(caught.value.reasons) == 8


def test_no_settings_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        every_setting([], [])
    assert caught.value.reasons == ("give at least one policy", "give at least one budget")
