"""What is found beside a layer's attention module."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsieve.engine.layers import ROTARY_MARKS, find_rotary


class RotaryEmbedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cos_sin_cache = torch.rand(64, 8)
        self.is_neox_style = True


def model_with(**attributes: Any) -> torch.nn.Module:
    """A model whose only layer has an attention with these attributes around it."""
    attention = torch.nn.Module()
    attention.attn = torch.nn.Identity()
    for name, value in attributes.items():
        setattr(attention, name, value)
    model = torch.nn.Module()
    model.self_attn = attention
    return model


@pytest.mark.parametrize("marks", [{}, {"use_rope": True}, {"v1": True}, {"force_rope": 1}])
def test_a_rotary_embedding_that_is_applied_is_found(marks: dict[str, Any]) -> None:
    rotary = RotaryEmbedding()

    found = find_rotary(model_with(rotary_emb=rotary, **marks), "self_attn.attn")

    assert found is not None
    assert found.cos_sin is rotary.cos_sin_cache and found.is_neox


@pytest.mark.parametrize("mark", ROTARY_MARKS)
def test_a_rotary_embedding_that_is_not_applied_is_none(mark: str) -> None:
    for no in (False, 0):
        model = model_with(rotary_emb=RotaryEmbedding(), **{mark: no})
        assert find_rotary(model, "self_attn.attn") is None


def test_a_layer_without_a_rotary_embedding_has_none() -> None:
    assert find_rotary(model_with(), "self_attn.attn") is None
    assert find_rotary(model_with(rotary_emb=None), "self_attn.attn") is None


# Conditions of vLLM's models that do not tell layers with full attention from each other: there is
# no `rotary_emb` where they do not hold, or another branch applies it.
HARMLESS = {
    "self.is_local_attention and self.rotary_emb is not None",
    "self.rotary_emb is not None",
    "self.is_kv_shared_layer",
    "self.hpc_rope_norm is not None",
    "self.config.use_mem_rope",
    "loop_idx == 0",
}


def test_every_mark_of_vllms_models_is_known() -> None:
    vllm = find_spec("vllm")
    assert vllm is not None and vllm.origin is not None
    conditions = set()
    for file in (Path(vllm.origin).parent / "model_executor" / "models").glob("*.py"):
        text = file.read_text()
        if "self.rotary_emb(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.If) and any(
                "self.rotary_emb(" in ast.unparse(statement) for statement in node.body
            ):
                conditions.add(ast.unparse(node.test))
    known = {
        condition
        for condition in conditions
        for mark in ROTARY_MARKS
        if f"self.{mark}" in condition.split()
    }
    assert conditions - known <= HARMLESS
    for mark in ROTARY_MARKS:
        assert any(f"self.{mark}" in condition.split() for condition in known), mark
