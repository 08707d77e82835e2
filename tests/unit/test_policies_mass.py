"""Mass: the share of the window's attention that went to what is dropped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.policies import attention_mass_lost, parse_settings, policy_from_config
from tests.oracle.policy_references import attention
from tests.unit.policy_parts import Shape, make_tensors


@settings(max_examples=25)
@given(st.integers(0, 1000), st.integers(1, 8), st.integers(1, 50), st.data())
def test_mass_lost_is_what_a_dense_softmax_gives_to_the_dropped(
    seed: int, window: int, tokens: int, data: st.DataObject
) -> None:
    keep = data.draw(st.integers(0, tokens))
    tensors = make_tensors(Shape(tokens, 2, 2), seed, num_positions=64)
    config = parse_settings({"policy": "snapkv", "observation_window": window})
    evidence = tensors.evidence(policy_from_config(config))
    generator = torch.Generator().manual_seed(seed)
    kept = [
        torch.randperm(tokens, generator=generator)[:keep].sort().values.tolist() for _ in range(2)
    ]

    lost = attention_mass_lost(
        evidence.window_attention(), torch.tensor(kept, dtype=torch.int64).view(2, keep)
    )

    weights = attention(tensors.prompt(), max(0, tokens - window))
    dropped = [
        float(row[[j for j in range(tokens) if j not in kept[head // 2]]].sum())
        for head in range(4)
        for row in weights[head]
    ]
    assert float(lost) == pytest.approx(sum(dropped) / len(dropped), abs=1e-5)


def test_nothing_dropped_nothing_lost() -> None:
    scores = torch.rand(2, 3, 10, generator=torch.Generator().manual_seed(0))

    assert float(attention_mass_lost(scores, torch.arange(10).expand(2, -1))) == pytest.approx(
        0, abs=1e-6
    )


def test_everything_dropped_everything_lost() -> None:
    scores = torch.rand(2, 3, 10, generator=torch.Generator().manual_seed(0))

    assert float(attention_mass_lost(scores, torch.empty(2, 0, dtype=torch.int64))) == 1
