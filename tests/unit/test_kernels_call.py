"""Calls that make no sense say what is wrong, and what is stated about memory holds."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from kvsieve import kernels
from kvsieve.kernels import cpu_rows, cpu_scores
from tests.unit.kernel_cases import Shape, lse_of, make_inputs, peak_bytes

SHAPE = Shape(4, 10, 2, 3, 64, torch.float32)


def test_an_unknown_implementation_is_an_error_that_names_the_known() -> None:
    inputs = make_inputs(SHAPE)
    with pytest.raises(kernels.KernelError, match=r"'cuda'; it has reference, cpu, triton"):
        kernels.window_scores(inputs.query, inputs.key, 0.1, impl="cuda")
    with pytest.raises(kernels.KernelError, match=r"'triton'; it has reference, cpu"):
        kernels.key_redundancy(inputs.key, impl="triton")


def test_triton_without_triton_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = make_inputs(SHAPE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(kernels.KernelError, match=r"install it with kvsieve\[gpu\], or pass impl="):
        kernels.window_scores(inputs.query, inputs.key, 0.1, impl="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(11, 6, 64)}, "must be 1 to 10"),
        ({"query": torch.zeros(0, 6, 64)}, "must be 1 to 10"),
        ({"query": torch.zeros(4, 5, 64)}, "a multiple of 2"),
        ({"query": torch.zeros(4, 6, 32)}, "do not fit 10 keys of 2 heads of size 64"),
        ({"power": 3}, "power must be 1 or 2, not 3"),
        ({"lse": torch.zeros(4, 6)}, r"\(6, 4\), not \(4, 6\)"),
    ],
)
def test_shapes_that_do_not_fit_are_errors(change: dict[str, Any], message: str) -> None:
    inputs = make_inputs(SHAPE)
    arguments = {"query": inputs.query, "keys": inputs.key, "scale": 0.1, "impl": "cpu", **change}
    with pytest.raises(ValueError, match=message):
        kernels.window_scores(**arguments)


def test_other_arguments_that_do_not_fit_are_errors() -> None:
    inputs = make_inputs(SHAPE)
    with pytest.raises(ValueError, match="noise must be one of"):
        kernels.attention_sums(
            inputs.query, inputs.key, 0.1, impl="cpu", noise=torch.zeros(2, 2, 10)
        )
    with pytest.raises(ValueError, match="temperature must be above 0"):
        kernels.attention_sums(inputs.query, inputs.key, 0.1, impl="cpu", temperature=0.0)
    with pytest.raises(ValueError, match="does not fit 2 KV heads of size 64"):
        kernels.output_norms(inputs.value, torch.zeros(3, 64, 8), impl="cpu")
    with pytest.raises(ValueError, match="10 tokens need 3 blocks of 4; the block table has 2"):
        kernels.PagedRows(torch.zeros(9, 4, 2, 64), torch.zeros(2), 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prompt", [300, 3000, 40_000])
def test_scoring_takes_no_more_memory_than_stated(prompt: int, dtype: torch.dtype) -> None:
    shape = Shape(64, prompt, 2, 4, 64, dtype)
    inputs = make_inputs(shape)
    query, key, scale = inputs.query, inputs.key, inputs.scale
    lse = torch.zeros(8, 64) if prompt > 5000 else lse_of(inputs)
    noise = torch.zeros(2, 1, prompt)
    bound = cpu_scores.scratch_bytes(prompt, 64)
    with_noise = cpu_scores.scratch_bytes(prompt, 64, noise_rows=2)
    runs = [
        (lambda: kernels.window_scores(query, key, scale, impl="cpu"), bound),
        (lambda: kernels.window_scores(query, key, scale, impl="cpu", lse=lse), bound),
        (lambda: kernels.attention_sums(query, key, scale, impl="cpu"), bound),
        (lambda: kernels.attention_sums(query, key, scale, impl="cpu", noise=noise), with_noise),
        (lambda: kernels.grouped_window_mean(query, key, scale, impl="cpu"), bound),
    ]
    for run, stated in runs:
        peak, result = peak_bytes(run)
        assert peak - result <= stated
    # A few MiB, however long the prompt; all logits at once would be 4 * 8 * 64 * prompt bytes.
    assert bound < 7 * 2**20


@pytest.mark.parametrize("prompt", [300, 3000])
def test_keys_and_values_take_no_more_memory_than_stated(prompt: int) -> None:
    inputs = make_inputs(Shape(1, prompt, 2, 2, 64, torch.bfloat16))
    weight = torch.ones(4, 64, 576, dtype=torch.bfloat16)

    peak, result = peak_bytes(lambda: kernels.key_redundancy(inputs.key, impl="cpu"))
    assert peak - result <= cpu_rows.redundancy_scratch_bytes(prompt, 64)
    assert cpu_rows.redundancy_scratch_bytes(prompt, 64) < 8 * 2**20

    peak, result = peak_bytes(lambda: kernels.output_norms(inputs.value, weight, impl="cpu"))
    assert peak - result <= cpu_rows.norms_scratch_bytes(64, 576)
