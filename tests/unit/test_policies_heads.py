"""Policies that weigh the query heads of a group: by quotas (Ada-KV) or by a table (HeadKV)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsieve import ConfigError
from kvsieve.policies.adakv import head_quotas
from kvsieve.policies.headkv import head_capacities, layer_shares, read_head_scores
from tests.unit.policy_parts import Shape, make_policy, make_tensors, policy_of


def test_with_one_query_head_per_kv_head_adakv_is_snapkv() -> None:
    tensors = make_tensors(Shape(300, 3, 1))
    adakv, snapkv = policy_of("adakv"), policy_of("snapkv")

    assert torch.equal(
        adakv.choose(tensors.evidence(adakv), 90), snapkv.choose(tensors.evidence(snapkv), 90)
    )


def test_quotas_go_to_heads_whose_attention_is_spread() -> None:
    peaked = torch.tensor([0.9, 0.04, 0.03, 0.02, 0.01])
    spread = torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2])

    quotas = head_quotas(torch.stack([peaked, spread])[None], num_keep=3, alpha=0.5)

    # Of the best 6 entries the spread head has 5.
    assert quotas.tolist() == [[0.5 * 1 + 1.5, 0.5 * 5 + 1.5]]
    assert head_quotas(torch.stack([peaked, spread])[None], 3, alpha=1.0).tolist() == [[3.0, 3.0]]


def write_table(folder: Path, table: Any) -> str:
    path = folder / "heads.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return str(path)


def test_head_scores_are_read_in_the_authors_format(tmp_path: Path) -> None:
    table = {"0-1": [0.25, 0.75], "0-0": 1, "1-0": [0.0], "1-1": 0.5}

    assert read_head_scores(write_table(tmp_path, table)) == [[1.0, 0.5], [0.0, 0.5]]


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must hold an object"),
        ({}, "must hold an object"),
        ({"0": 1.0}, "'0' in .* is no 'layer-head'"),
        ({"a-b": 1.0}, "is no 'layer-head'"),
        ({"0-0": "high"}, "is no number"),
        ({"0-0": [True]}, "is no number"),
        ({"0-0": []}, "at least 0"),
        ({"0-0": -1.0}, "at least 0"),
        ('{"0-0": NaN}', "at least 0"),
        ({"0-0": 10**400}, "at least 0"),
        ({"0-0": [0.5, 10**400]}, "at least 0"),
        ({"9" * 5000 + "-0": 1.0}, "is no 'layer-head'"),
        ('{"0-0": 1, "0-1": 2, "0-1": 3}', "cannot be read as JSON: it names '0-1' twice"),
        ("[" * 100_000, "cannot be read as JSON: it is nested too deeply"),
        ({"0-0": 1.0, "1-1": 1.0}, "2 heads, but 2 layers of 2 are 4"),
        ({"0-0": 0.0, "0-1": [0, 0]}, "every score is 0"),
    ],
)
def test_tables_that_are_none_are_refused(tmp_path: Path, table: Any, complaint: str) -> None:
    path = write_table(tmp_path, table)

    with pytest.raises(ConfigError, match=complaint) as refusal:
        policy_of("headkv", policy_options={"head_scores": path})
    assert len(str(refusal.value)) < 400


def test_headkv_without_a_table_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs head_scores, the path of a JSON table"):
        policy_of("headkv")
    with pytest.raises(ConfigError, match="cannot be read"):
        policy_of("headkv", policy_options={"head_scores": str(tmp_path / "none.json")})


def test_a_table_of_another_model_is_refused(tmp_path: Path) -> None:
    policy = make_policy("headkv", 4, tmp_path)

    with pytest.raises(ValueError, match="4 query heads, and layer 1 of this model has 6"):
        policy.choose(make_tensors(Shape(60, 2, 3)).evidence(policy), 50)
    evidence = make_tensors(Shape(60, 2, 2)).evidence(policy)
    evidence.layer = 3
    with pytest.raises(ValueError, match="3 layers of 4 query heads, and layer 3"):
        policy.choose(evidence, 50)


def test_a_head_that_alone_has_a_score_alone_decides(tmp_path: Path) -> None:
    table = {f"{layer}-{head}": float(head == 2) for layer in range(3) for head in range(3)}
    path = write_table(tmp_path, table)
    policy = policy_of("headkv", policy_options={"head_scores": path, "beta": 1})
    snapkv = policy_of("snapkv")
    tensors = make_tensors(Shape(300, 1, 3))
    evidence = tensors.evidence(snapkv)
    third = evidence.window_attention()[:, 2:]
    evidence.window_attention = lambda power=1: third  # type: ignore[method-assign]

    chosen = policy.choose(tensors.evidence(policy), 90)

    assert torch.equal(chosen, snapkv.choose(evidence, 90))


def test_capacities_and_layer_shares_have_mean_one() -> None:
    scores = [[0.0, 1.0], [3.0, 4.0]]

    assert head_capacities(scores, beta=2.0, temp=1.0).tolist() == [[0.5, 0.75], [1.25, 1.5]]
    assert layer_shares(scores, beta=2.0) == [0.625, 1.375]
    huge = [[1e308, 1e308], [1e308, 5e307]]
    assert head_capacities(huge, beta=1.0, temp=1.0).sum() == pytest.approx(4)
    assert head_capacities(scores, beta=1.0, temp=0.0).tolist() == [[1.0, 1.0], [1.0, 1.0]]
