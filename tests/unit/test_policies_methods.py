"""What is peculiar to single methods."""

from __future__ import annotations

import math

import pytest
import torch

from kvsieve import ConfigError
from kvsieve.policies import parse_settings, policy_from_config
from kvsieve.policies.chunkkv import rank_by_chunk
from kvsieve.policies.keyformer import gumbel_noise
from tests.unit.policy_parts import HEAD_SIZE, Shape, make_tensors, policy_of


@pytest.mark.parametrize("name", ["tova", "chunkkv"])
def test_all_heads_keep_the_same_tokens(name: str) -> None:
    policy = policy_of(name)

    chosen = policy.choose(make_tensors(Shape(300, 3, 2)).evidence(policy), 90)

    assert torch.equal(chosen, chosen[:1].expand(3, -1))


@pytest.mark.parametrize("name", ["snapkv", "h2o", "keydiff", "random"])
def test_heads_choose_for_themselves(name: str) -> None:
    policy = policy_of(name)

    chosen = policy.choose(make_tensors(Shape(300, 2, 2)).evidence(policy), 90)

    assert not torch.equal(chosen[0], chosen[1])


def test_pyramidkv_is_snapkv_with_a_smaller_window_and_layer_budgets() -> None:
    pyramid = parse_settings({"policy": "pyramidkv"})
    snapkv = policy_of("snapkv", observation_window=8)
    policy = policy_from_config(pyramid)
    tensors = make_tensors(Shape(300, 2, 2))

    assert pyramid.layer_budgets == "pyramid"
    assert torch.equal(
        policy.choose(tensors.evidence(policy), 77), snapkv.choose(tensors.evidence(snapkv), 77)
    )


def test_layerwise_keeps_three_layers_full() -> None:
    assert parse_settings({"policy": "layerwise"}).full_layers == 3


def test_the_random_baseline_is_spread_over_the_prompt() -> None:
    policy = policy_of("random", num_recent_tokens=0)

    chosen = policy.choose(make_tensors(Shape(500, 2, 2)).evidence(policy), 104)

    # Chance of fewer than 25 of 100 in a half is nil.
    assert 25 < int((chosen < 250).sum(dim=1).min()) < 85


# Keyformer


def test_noise_of_a_position_depends_on_seed_head_and_position_alone() -> None:
    noise = gumbel_noise(3, 4, 2500)

    assert noise.shape == (4, 2500)
    assert torch.equal(noise[:, :1100], gumbel_noise(3, 4, 1100))
    assert torch.equal(noise[:2], gumbel_noise(3, 2, 2500))
    assert not torch.equal(noise, gumbel_noise(4, 4, 2500))
    assert len(set(noise.flatten().tolist())) > 9_900


def test_noise_is_gumbel() -> None:
    noise = gumbel_noise(0, 32, 4096).double()

    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)
    # The distribution function is exp(-exp(-x)).
    for point in (-1.0, 0.0, 2.0):
        share = float((noise < point).double().mean())
        assert share == pytest.approx(math.exp(-math.exp(-point)), abs=0.01)


def test_keyformer_of_great_temperature_ranks_as_if_all_logits_were_equal() -> None:
    policy = policy_of("keyformer", policy_options={"temperature": 1e9})
    evidence = make_tensors(Shape(50, 1, 2)).evidence(policy)

    scores = policy.candidate_scores(evidence, 1)[0]

    expected = [sum(1 / (i + 1) for i in range(j, 50)) * 2 for j in range(49)]
    assert scores.tolist() == pytest.approx(expected, rel=1e-4)


def test_the_seed_changes_keyformers_choice() -> None:
    tensors = make_tensors(Shape(300, 1, 2))
    policies = [policy_of("keyformer", policy_options={"seed": seed}) for seed in (0, 1)]

    one, other = (policy.choose(tensors.evidence(policy), 60) for policy in policies)

    assert not torch.equal(one, other)


# ChunkKV


def test_whole_chunks_are_kept_and_of_the_last_the_best_tokens() -> None:
    policy = policy_of("chunkkv", num_sink_tokens=0, pool_size=1)
    evidence = make_tensors(Shape(300, 2, 2)).evidence(policy)

    kept = set(policy.choose(evidence, 32 + 73)[0].tolist()) - set(range(268, 300))

    sizes = [len(kept & set(range(begin, begin + 20))) for begin in range(0, 268, 20)]
    partial = [index for index, size in enumerate(sizes) if 0 < size < (8 if index == 13 else 20)]
    assert len(partial) <= 1
    scores = evidence.window_attention()[..., :268].mean(dim=1).sum(dim=0)
    for index in partial:
        chunk = set(range(20 * index, min(268, 20 * index + 20)))
        assert min(scores[list(chunk & kept)]) >= max(scores[list(chunk - kept)])


def test_chunks_rank_by_mean_then_place_and_tokens_by_score_then_place() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 9.0, 5.0])

    # Means 2, 2 and 7 (of what is there), 5 alone; chunks of 2: (1 3) (2 2) (2 9) (5).
    assert rank_by_chunk(scores, 2).tolist() == [0, 1, 2, 3, 5, 6, 4]


def test_a_broken_token_leaves_its_chunk_sound() -> None:
    scores = torch.tensor([4.0, float("nan"), 1.0, 1.0, float("nan"), float("nan")])

    assert rank_by_chunk(scores, 2).tolist() == [5, 0, 3, 4, 1, 2]


def test_one_chunk_for_everything_is_ranked_by_token() -> None:
    scores = torch.rand(50, generator=torch.Generator().manual_seed(0))

    assert torch.equal(rank_by_chunk(scores, 10_000).argsort(), scores.argsort())
    assert torch.equal(rank_by_chunk(scores, 1).argsort(), scores.argsort())


# R-KV, CriticalKV


def test_rkv_keeps_the_newest_of_repeated_keys() -> None:
    policy = policy_of("rkv", policy_options={"mix_lambda": 0.0})
    tensors = make_tensors(Shape(60, 1, 1))
    tensors.keys[:] = torch.eye(HEAD_SIZE)[torch.arange(60) % HEAD_SIZE]

    scores = policy.candidate_scores(tensors.evidence(policy), 20)[0]

    # 52 candidates; from position 44 on a key is the last of its kind.
    assert float(scores[44:].min()) > float(scores[:44].max())


def test_rkv_refuses_fewer_recent_tokens_than_its_window() -> None:
    with pytest.raises(ConfigError, match=r"num_recent_tokens \(4\) must be at least"):
        policy_of("rkv", num_recent_tokens=4)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_criticalkv_of_one_stage(ratio: float) -> None:
    policy = policy_of("criticalkv", policy_options={"first_stage_ratio": ratio, "epsilon": 0.0})
    snapkv = policy_of("snapkv")
    tensors = make_tensors(Shape(300, 2, 2))

    chosen = policy.choose(tensors.evidence(policy), 90)
    by_attention = snapkv.choose(tensors.evidence(snapkv), 90)

    assert torch.equal(chosen, by_attention) == (ratio == 1.0)


# Key norms and differences, with keys whose squares overflow


@pytest.mark.parametrize("name", ["keydiff", "knorm"])
def test_huge_keys_rank_as_their_size_says(name: str) -> None:
    policy = policy_of(name)
    tensors = make_tensors(Shape(120, 2, 2))
    plain = policy.choose(tensors.evidence(policy), 30)
    tensors.keys[:] *= 1e30

    assert torch.equal(policy.choose(tensors.evidence(policy), 30), plain)


@pytest.mark.parametrize("name", ["keydiff", "knorm", "expected_attention"])
def test_a_broken_key_goes_and_changes_nothing_else(name: str) -> None:
    policy = policy_of(name)
    tensors = make_tensors(Shape(120, 1, 2))
    tensors.keys[0, 17] = 0.0
    without = set(policy.choose(tensors.evidence(policy), 119)[0].tolist())
    tensors.keys[0, 17] = float("nan")

    chosen = policy.choose(tensors.evidence(policy), 119)[0].tolist()
    half = policy.choose(tensors.evidence(policy), 60)[0].tolist()

    assert set(range(120)) - set(chosen) == {17} and len(without) == 119
    tensors.keys[0, 17] = 0.0
    scores = policy.candidate_scores(tensors.evidence(policy), 60)
    scores[0, 17] = float("-inf")
    assert len(set(half) - set(scores[0].topk(60).indices.tolist()) - {0, 1, 2, 3}) <= 3


def test_a_chunk_longer_than_the_prompt_is_the_prompt() -> None:
    scores = torch.rand(300, generator=torch.Generator().manual_seed(0))

    assert torch.equal(rank_by_chunk(scores, 2**31 - 1), rank_by_chunk(scores, 300))
