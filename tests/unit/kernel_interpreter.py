"""Runs the Triton kernels where TRITON_INTERPRET=1: `python -m tests.unit.kernel_interpreter FILE`.

A process of its own, since the interpreter is chosen when Triton is imported. Results go to FILE,
to be compared by `test_kernels_triton.py`. Scratch that was not written is NaN.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from kvsieve import kernels
from tests.unit.kernel_cases import (
    CASES,
    HUGE,
    MOVES,
    NAN,
    SPOILED,
    Inputs,
    kept_positions,
    lse_of,
    make_inputs,
    paged,
)


def poison_scratch() -> None:
    """Memory that is allocated without being written holds NaN from now on."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs).fill_(NAN)

    torch.empty = poisoned


def scores(inputs: Inputs, keys: kernels.Rows, **options: Any) -> torch.Tensor:
    return kernels.window_scores(inputs.query, keys, inputs.scale, impl="triton", **options)


def run() -> dict[str, torch.Tensor]:
    results = {}
    for name, (shape, block_size, layout) in CASES.items():
        inputs = make_inputs(shape)
        keys = kernels.PagedRows(*paged(inputs.key, block_size, layout), shape.prompt)
        # The kernel has no lse here, and computes it; and here it is given.
        results[f"{name}, 1"] = scores(inputs, keys)
        lse = lse_of(inputs)
        results[f"{name}, 2, reduced"] = scores(inputs, keys, power=2, reduce_group=True, lse=lse)
    huge = make_inputs(HUGE, size=60.0)
    results["huge"] = scores(huge, huge.key)
    results["huge, lse"] = scores(huge, huge.key, lse=lse_of(huge))
    spoiled = make_inputs(SPOILED)
    lse = lse_of(spoiled)
    spoiled.key[0, 17, 3] = NAN
    results["spoiled"] = scores(spoiled, spoiled.key)
    results["spoiled, lse"] = scores(spoiled, spoiled.key, lse=lse)
    again = make_inputs(SPOILED)
    results["once"], results["again"] = (scores(again, again.key) for _ in range(2))
    for layout, (shape, block_size, start) in MOVES.items():
        pages, blocks = paged(make_inputs(shape).value, block_size, layout)
        kernels.compact_pages(pages, blocks, kept_positions(shape), start, impl="triton")
        results[f"moved, {layout}"] = pages
    return results


if __name__ == "__main__":
    poison_scratch()
    torch.save(run(), sys.argv[1])
