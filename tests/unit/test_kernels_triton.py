"""The Triton kernels: their results in Triton's interpreter, and that they compile for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvsieve.kernels import reference
from tests.unit.kernel_cases import (
    CASES,
    HUGE,
    MOVES,
    kept_positions,
    make_inputs,
    paged,
    weights_of,
    window_scores_of,
)

ROOT = Path(__file__).resolve().parents[2]


def run_python(*arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    """Run Python where Triton has been imported by nobody yet and where no GPU is seen."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "TRITON_INTERPRET": str(int(interpret)),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    file = tmp_path_factory.mktemp("triton") / "results.pt"
    ran = run_python("-m", "tests.unit.kernel_interpreter", str(file), interpret=True)
    assert ran.returncode == 0, ran.stderr
    results: dict[str, torch.Tensor] = torch.load(file)
    return results


@pytest.mark.parametrize("name", CASES)
def test_window_scores_equal_the_softmax_summed_over_queries(
    name: str, interpreted: dict[str, torch.Tensor]
) -> None:
    weights = weights_of(make_inputs(CASES[name][0]))
    by_head, squared = weights.sum(dim=2), (weights**2).sum(dim=(1, 2))

    torch.testing.assert_close(interpreted[f"{name}, 1"].double(), by_head, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(
        interpreted[f"{name}, 2, reduced"].double(), squared, rtol=2e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", ["huge", "huge, lse"])
def test_logits_of_ten_thousand_stay_finite(
    name: str, interpreted: dict[str, torch.Tensor]
) -> None:
    inputs = make_inputs(HUGE, size=60.0)
    terms = inputs.query.abs().amax() * inputs.key.abs().amax() * 64 * inputs.scale
    tolerance = float(terms) * torch.finfo(torch.float32).eps

    assert interpreted[name].isfinite().all()
    torch.testing.assert_close(
        interpreted[name].double(),
        window_scores_of(inputs, 1, False),
        rtol=tolerance,
        atol=tolerance,
    )


def test_a_key_that_is_no_number_spoils_its_own_kv_head_alone(
    interpreted: dict[str, torch.Tensor],
) -> None:
    whole, by_lse, clean = (interpreted[key] for key in ("spoiled", "spoiled, lse", "once"))

    assert whole[0].isnan().all()
    assert torch.equal(whole[1], clean[1])
    assert by_lse.isnan().nonzero().tolist() == [[0, 0, 17]]


def test_the_same_inputs_give_the_same_bits(interpreted: dict[str, torch.Tensor]) -> None:
    assert torch.equal(interpreted["once"], interpreted["again"])


@pytest.mark.parametrize("layout", MOVES)
def test_compaction_moves_the_kept_rows_and_nothing_else(
    layout: str, interpreted: dict[str, torch.Tensor]
) -> None:
    shape, block_size, start = MOVES[layout]
    rows, positions = make_inputs(shape).value, kept_positions(shape)
    moved = rows.clone()
    for kv_head in range(shape.kv_heads):
        for index, position in enumerate(positions[kv_head].tolist()):
            moved[kv_head, start + index] = rows[kv_head, position]
    expected, _ = paged(moved, block_size, layout)

    # Slots that nothing was written to keep their NaN.
    found = interpreted[f"moved, {layout}"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)

    pages, blocks = paged(rows, block_size, layout)
    reference.compact_pages(pages, blocks, positions, start)
    torch.testing.assert_close(pages, expected, rtol=0, atol=0, equal_nan=True)


def test_every_kernel_compiles_for_three_generations_without_spilling(tmp_path: Path) -> None:
    file = tmp_path / "compiled.json"

    ran = run_python("benchmarks/gpu_kernels.py", "--compile-only", "--json", str(file))

    assert ran.returncode == 0, ran.stderr
    compiled = json.loads(file.read_text())["compiled"]
    built = {(one["architecture"], one["head_size"], one["dtype"]) for one in compiled}
    assert built == {(sm, size, of) for sm in (80, 89, 90) for size in (64, 128) for of in TYPES}
    assert {one["kernel"] for one in compiled} >= {"log-sum-exp", "scores^1", "gather", "scatter"}
    assert [one for one in compiled if one["spills"]] == []
    assert max(one["registers"] for one in compiled) <= 128


TYPES = ("bf16", "fp32")


def test_without_a_gpu_the_benchmark_says_so_and_gives_no_figure(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"

    ran = run_python("benchmarks/gpu_kernels.py", "--json", str(file))

    assert ran.returncode == 2
    assert "no CUDA GPU" in ran.stderr and "--compile-only" in ran.stderr
    assert ran.stdout == "" and not file.exists()
