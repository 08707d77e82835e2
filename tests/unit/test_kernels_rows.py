"""Redundancy of keys and output norms of values against float64 loops."""

from __future__ import annotations

import pytest
import torch

from kvsieve import kernels
from kvsieve.kernels import cpu_rows
from tests.unit.kernel_cases import NAN, Shape, make_inputs, paged

IMPLS = ["reference", "cpu"]
SHAPES = [
    Shape(1, 1, 1, 1, 64, torch.float32),
    Shape(1, 63, 2, 3, 64, torch.bfloat16),
    Shape(1, 100, 1, 4, 96, torch.float16),
    Shape(1, 400, 1, 2, 128, torch.float32),
]


def redundancy_of(key: torch.Tensor, threshold: float) -> torch.Tensor:
    kv_heads, tokens, _ = key.shape
    total = torch.zeros(kv_heads, tokens, dtype=torch.float64)
    for kv_head in range(kv_heads):
        rows = key[kv_head].double()
        lengths = rows.norm(dim=1)
        for row in range(tokens):
            cosines = rows @ rows[row] / (lengths * lengths[row]).clamp_min(1e-300)
            cosines[row] = 0.0
            similar = (cosines > threshold).nonzero().flatten().tolist()
            if similar:
                cosines[similar[-1]] = 0.0
            total[kv_head] += cosines / tokens
    return torch.softmax(total, dim=-1)


def with_copies(shape: Shape) -> torch.Tensor:
    """Keys of which some repeat earlier ones, exactly or nearly, and one is zero."""
    key = make_inputs(shape).key
    generator = torch.Generator().manual_seed(5)
    for token in range(1, shape.prompt):
        if token % 3 == 0:
            source = int(torch.randint(0, token, (1,), generator=generator))
            noise = 0.3 * torch.randn(shape.kv_heads, shape.head_size, generator=generator)
            key[:, token] = key[:, source] + noise.to(key.dtype)
    if shape.prompt > 50:
        key[:, 50] = 0.0
    return key


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_redundancy_spares_each_rows_newest_copy(shape: Shape, impl: str) -> None:
    key = with_copies(shape)

    redundancy = kernels.key_redundancy(key, impl=impl)

    expected = redundancy_of(key, 0.5)
    torch.testing.assert_close(redundancy.double(), expected, rtol=1e-5, atol=1e-8)
    if shape.prompt > 1:
        assert not torch.allclose(redundancy_of(key, 2.0), expected, rtol=1e-3)


def test_redundancy_takes_few_rows_and_columns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    key = with_copies(SHAPES[1])
    monkeypatch.setattr(cpu_rows, "MAX_KEY_ROWS", 5)
    monkeypatch.setattr(cpu_rows, "KEY_TILE_BYTES", 4 * 64 * 9)

    redundancy = kernels.key_redundancy(key, impl="cpu", threshold=0.3)

    expected = redundancy_of(key, 0.3)
    torch.testing.assert_close(redundancy.double(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_norms_are_l1_norms_of_what_a_value_adds(shape: Shape, impl: str) -> None:
    value = make_inputs(shape).value
    heads = shape.kv_heads * shape.group
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(heads, shape.head_size, 200, generator=generator)
    expected = torch.zeros(shape.kv_heads, shape.prompt, dtype=torch.float64)
    for head in range(heads):
        added = value[head // shape.group].double() @ weight[head].double()
        expected[head // shape.group] += added.abs().sum(dim=1) / shape.group
    pages, blocks = paged(value, 16, "hnd")

    for values in (value, kernels.PagedRows(pages, blocks, shape.prompt)):
        norms = kernels.output_norms(values, weight, impl=impl)
        torch.testing.assert_close(norms.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_value_or_key_that_is_no_number_spoils_only_what_depends_on_it(impl: str) -> None:
    inputs = make_inputs(SHAPES[1])
    weight = torch.ones(6, 64, 30)
    inputs.key[1, 20, 0] = inputs.value[1, 20, 0] = NAN

    norms = kernels.output_norms(inputs.value, weight, impl=impl)
    redundancy = kernels.key_redundancy(inputs.key, impl=impl)

    assert norms.isnan().nonzero().tolist() == [[1, 20]]
    assert redundancy[0].isfinite().all()
    assert redundancy[1].isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_the_same_inputs_give_the_same_bits(impl: str) -> None:
    inputs = make_inputs(SHAPES[3])
    weight = torch.ones(2, 128, 30)
    for run in (
        lambda: kernels.key_redundancy(inputs.key, impl=impl),
        lambda: kernels.output_norms(inputs.value, weight, impl=impl),
    ):
        assert torch.equal(run(), run())
