"""Window scores and accumulated attention against float64 loops."""

from __future__ import annotations

import pytest
import torch

from kvsieve import kernels
from kvsieve.kernels import cpu_scores
from tests.unit.kernel_cases import (
    NAN,
    SHAPES,
    Inputs,
    Shape,
    lse_of,
    make_inputs,
    paged,
    weights_of,
    window_scores_of,
)

IMPLS = ["reference", "cpu"]
SMALL = Shape(20, 90, 2, 3, 64, torch.float32)


@pytest.fixture
def poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is allocated without being written holds NaN."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        return empty(*args, **kwargs).fill_(NAN)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.usefixtures("poisoned_scratch")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_window_scores_are_the_softmax_summed_over_queries(shape: Shape, impl: str) -> None:
    inputs = make_inputs(shape)
    weights, lse = weights_of(inputs), lse_of(inputs)
    assert weights.sum(dim=-1).allclose(torch.ones(1, dtype=torch.float64))
    for power in (1, 2):
        for given in (None, lse):
            by_head = (weights**power).sum(dim=2)

            scores, reduced = (
                kernels.window_scores(
                    inputs.query, inputs.key, inputs.scale, impl=impl, power=power, lse=given,
                    reduce_group=reduce_group,
                )
                for reduce_group in (False, True)
            )  # fmt: skip

            assert scores.dtype == reduced.dtype == torch.float32
            torch.testing.assert_close(scores.double(), by_head, rtol=2e-5, atol=1e-6)
            torch.testing.assert_close(reduced.double(), by_head.sum(1), rtol=2e-5, atol=1e-6)


@pytest.mark.usefixtures("poisoned_scratch")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_powers_come_from_one_pass(shape: Shape, impl: str) -> None:
    inputs = make_inputs(shape)
    weights = weights_of(inputs)

    sums, squares = kernels.window_scores_and_squares(
        inputs.query, inputs.key, inputs.scale, impl=impl
    )

    torch.testing.assert_close(sums.double(), weights.sum(dim=2), rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(squares.double(), (weights**2).sum(dim=2), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "transposed"])
@pytest.mark.parametrize("impl", IMPLS)
def test_keys_may_lie_in_any_cache(layout: str, impl: str) -> None:
    inputs = make_inputs(SMALL)
    pages, blocks = paged(inputs.key, 16, layout)
    keys = kernels.PagedRows(pages, blocks, SMALL.prompt)
    assert torch.equal(keys.dense(), inputs.key)
    strided = torch.stack([inputs.key, inputs.key], dim=-1)[..., 0]

    expected = window_scores_of(inputs, 1, False)

    for given in (keys, strided):
        scores = kernels.window_scores(inputs.query, given, inputs.scale, impl=impl)
        torch.testing.assert_close(scores.double(), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("tile_bytes", [1, 4 * 90 * 2, 4 * 90 * 7])
def test_tiles_may_be_as_small_as_one_row(
    tile_bytes: int, with_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(SMALL._replace(dtype=torch.bfloat16))
    monkeypatch.setattr(cpu_scores, "TILE_BYTES", tile_bytes)
    monkeypatch.setattr(cpu_scores, "KEY_TILE_BYTES", 4 * 64 * 7)
    monkeypatch.setattr(cpu_scores, "MAX_ROWS", 8)

    scores = kernels.window_scores(
        inputs.query, inputs.key, inputs.scale, impl="cpu", lse=lse_of(inputs) if with_lse else None
    )

    expected = window_scores_of(inputs, 1, False)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_ten_thousand_stay_finite(dtype: torch.dtype, impl: str, with_lse: bool) -> None:
    inputs = make_inputs(SMALL._replace(dtype=dtype), size=60.0)
    query, key = inputs.query.float(), inputs.key.float()
    largest = float((query.abs().amax() * key.abs().amax()) * 64 * inputs.scale)
    assert torch.einsum("whd,gnd->whgn", query, key).abs().max() * inputs.scale > 1e4

    scores = kernels.window_scores(
        inputs.query, inputs.key, inputs.scale, impl=impl, lse=lse_of(inputs) if with_lse else None
    )

    assert torch.isfinite(scores).all()
    # Logits round at the size of their terms, and an error in one is relative in its weight.
    tolerance = largest * torch.finfo(torch.float32).eps
    torch.testing.assert_close(
        scores.double(), window_scores_of(inputs, 1, False), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_a_key_that_is_no_number_spoils_its_own_kv_head_alone(impl: str) -> None:
    inputs = make_inputs(SMALL)
    lse = lse_of(inputs)
    clean = kernels.window_scores(inputs.query, inputs.key, inputs.scale, impl=impl)
    by_lse = kernels.window_scores(inputs.query, inputs.key, inputs.scale, impl=impl, lse=lse)
    inputs.key[0, 17, 3] = NAN

    scores = kernels.window_scores(inputs.query, inputs.key, inputs.scale, impl=impl)
    spoiled = kernels.window_scores(inputs.query, inputs.key, inputs.scale, impl=impl, lse=lse)

    assert scores[0].isnan().all()
    assert torch.equal(scores[1], clean[1])
    # With the denominators known, only the key's own weights are unknown.
    assert spoiled[0, :, 17].isnan().all()
    by_lse[0, :, 17] = NAN
    torch.testing.assert_close(spoiled, by_lse, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_same_inputs_give_the_same_bits(impl: str) -> None:
    inputs = make_inputs(SHAPES[7])
    lse = lse_of(inputs)
    for given in (None, lse):
        first, second = (
            kernels.window_scores(inputs.query, inputs.key, inputs.scale, impl=impl, lse=given)
            for _ in range(2)
        )
        assert torch.equal(first, second)


@pytest.mark.usefixtures("poisoned_scratch")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("noise_rows", [None, "shared", "each"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 1, 1, 1, 64, torch.float32),
        Shape(63, 63, 2, 3, 64, torch.float32),
        Shape(100, 100, 1, 8, 96, torch.bfloat16),
        Shape(600, 2000, 1, 3, 64, torch.float32),
        Shape(150, 2000, 1, 7, 128, torch.float16),
    ],
    ids=str,
)
def test_attention_sums_are_the_softmax_summed_over_queries_and_group(
    shape: Shape, noise_rows: str | None, impl: str
) -> None:
    inputs = make_inputs(shape)
    noise, temperature = None, 1.0
    if noise_rows is not None:
        rows = shape.group if noise_rows == "each" else 1
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(shape.kv_heads, rows, shape.prompt, generator=generator)
        temperature = 1.7

    sums = kernels.attention_sums(
        inputs.query, inputs.key, inputs.scale, impl=impl, noise=noise, temperature=temperature
    )

    expected = weights_of(inputs, noise, temperature).sum(dim=(1, 2))
    torch.testing.assert_close(sums.double(), expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 64, 250])
def test_chunks_add_up_to_the_whole_prompt(chunk: int) -> None:
    inputs = make_inputs(Shape(250, 250, 2, 3, 64, torch.float32))
    total = torch.zeros(2, 250)
    for first in range(0, 250, chunk):
        end = min(first + chunk, 250)
        total[:, :end] += kernels.attention_sums(
            inputs.query[first:end], inputs.key[:, :end], inputs.scale, impl="cpu"
        )

    expected = weights_of(inputs).sum(dim=(1, 2))
    torch.testing.assert_close(total.double(), expected, rtol=2e-5, atol=1e-5)


@pytest.mark.usefixtures("poisoned_scratch")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_window_mean_is_a_softmax_of_the_groups_largest_logits(
    shape: Shape, impl: str
) -> None:
    inputs = make_inputs(shape)

    scores = kernels.grouped_window_mean(inputs.query, inputs.key, inputs.scale, impl=impl)

    assert scores.shape == (shape.kv_heads, shape.prompt - shape.window)
    torch.testing.assert_close(scores.double(), _grouped(inputs), rtol=2e-5, atol=1e-7)


def _grouped(inputs: Inputs) -> torch.Tensor:
    query, key = inputs.query.double(), inputs.key.double()
    window, heads, _ = query.shape
    kv_heads, prompt, _ = key.shape
    group = heads // kv_heads
    mean = torch.zeros(kv_heads, prompt - window, dtype=torch.float64)
    for kv_head in range(kv_heads):
        for index in range(window):
            mine = query[index, kv_head * group : (kv_head + 1) * group]
            logits = (key[kv_head, : prompt - window] @ mine.t()).max(dim=1).values * inputs.scale
            mean[kv_head] += torch.softmax(logits, 0) / window
    return mean


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("offset", [-31.0, 0.0, 31.0, 40.0])
def test_rows_are_right_on_both_sides_of_the_limit_above_which_they_are_shifted(
    offset: float, power: int
) -> None:
    inputs = make_inputs(Shape(20, 500, 1, 2, 64, torch.float32), size=0.1)
    # One more feature adds the same to every logit of a row, which no softmax sees.
    inputs.query[..., 0], inputs.key[..., 0] = offset / cpu_scores.LOG2E / inputs.scale, 1.0

    scores = kernels.window_scores(inputs.query, inputs.key, inputs.scale, impl="cpu", power=power)

    torch.testing.assert_close(
        scores.double(), window_scores_of(inputs, power, False), rtol=1e-4, atol=0
    )
