"""Expected attention: rotations, the queries' statistics, and what is left out of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvsieve.policies import Rotary
from kvsieve.policies.rotation import cos_and_sin, rotate, unrotate
from tests.unit.policy_parts import Shape, make_tensors, policy_of, turned


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [4, 16])
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_taking_a_rotation_off_undoes_it(is_neox: bool, rotary_dim: int, scale: float) -> None:
    frequencies = 100.0 ** (-np.arange(rotary_dim // 2) / (rotary_dim // 2))
    positions = torch.arange(5, 25, dtype=torch.float64)
    vectors = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(0)).double()
    angles = torch.arange(30.0, dtype=torch.float64)[:, None] * torch.from_numpy(frequencies)
    table = Rotary(scale * torch.cat([angles.cos(), angles.sin()], dim=1), is_neox)
    cos, sin = cos_and_sin(table, 5, 25)

    there = rotate(vectors, cos, sin, is_neox)

    expected = turned(vectors, positions, frequencies, is_neox)
    expected[..., :rotary_dim] *= scale
    assert torch.allclose(there, expected, atol=1e-12)
    assert torch.allclose(unrotate(there, cos, sin, is_neox), vectors, atol=1e-12)


def test_moments_are_those_of_queries_before_their_rotation() -> None:
    policy = policy_of("expected_attention")
    tensors = make_tensors(Shape(300, 2, 3))

    moments = tensors.evidence(policy, chunk_size=37).accumulated()

    plain = tensors.plain_queries[:, 4:].numpy()
    assert moments.count.tolist() == [296.0] * 6
    assert np.allclose(moments.mean().numpy(), plain.mean(axis=1), atol=1e-5)
    for head in range(6):
        expected = np.cov(plain[head].T, bias=True)
        assert np.allclose(moments.covariance()[head].numpy(), expected, atol=1e-4)


def test_without_covariance_no_products_are_held() -> None:
    policy = policy_of("expected_attention", policy_options={"use_covariance": False})
    assert policy.accumulator is not None

    assert policy.accumulator.num_bytes(10**6, 6, 2, 16) == 8 * 6 * 17
    state = make_tensors(Shape(50, 2, 3)).evidence(policy).accumulated()
    assert state.products is None and state.covariance() is None


def test_without_value_norms_values_are_not_looked_at() -> None:
    policy = policy_of("expected_attention", policy_options={"use_vnorm": False})
    tensors = make_tensors(Shape(200, 2, 2))
    before = policy.choose(tensors.evidence(policy), 60)
    tensors.values[:] = float("nan")

    assert "values" not in policy.looks_at
    assert torch.equal(policy.choose(tensors.evidence(policy), 60), before)
    scores = policy.candidate_scores(tensors.evidence(policy), 60)
    assert scores.sum(dim=1).tolist() == pytest.approx([1.0, 1.0])


def test_positions_beyond_the_rotary_table_do_not_count() -> None:
    tensors = make_tensors(Shape(100, 1, 2), num_positions=100 + 512)
    short = make_tensors(Shape(100, 1, 2), num_positions=140)
    policy = policy_of("expected_attention")
    next_40 = policy_of("expected_attention", policy_options={"n_future_positions": 40})

    cut = policy.candidate_scores(short.evidence(policy), 30)

    assert torch.equal(cut, next_40.candidate_scores(tensors.evidence(next_40), 30))
    full = make_tensors(Shape(100, 1, 2), num_positions=100)
    assert policy.candidate_scores(full.evidence(policy), 30).isfinite().all()


def test_a_broken_query_counts_for_nothing() -> None:
    policy = policy_of("expected_attention")
    tensors = make_tensors(Shape(300, 1, 2))
    tensors.queries[50, 0, 3] = float("nan")

    state = tensors.evidence(policy).accumulated()

    assert state.count.tolist() == [295.0, 296.0]
    assert policy.candidate_scores(tensors.evidence(policy), 60).isfinite().all()


def test_a_layer_without_rotary_embedding_has_nothing_to_undo() -> None:
    policy = policy_of("expected_attention")
    tensors = make_tensors(Shape(80, 1, 2))
    evidence = tensors.evidence(policy)
    evidence.rotary = None

    mean = evidence.accumulated().mean()

    assert torch.allclose(mean, tensors.queries[4:].double().mean(dim=0))
    assert policy.candidate_scores(evidence, 30).isfinite().all()
