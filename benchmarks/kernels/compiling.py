"""Compiling the Triton kernels ahead of time, for GPUs that need not be there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from kvsieve.kernels import triton_move, triton_scores

ARCHITECTURES = (80, 89, 90)
HEAD_SIZES = (64, 128)
ITEM_BYTES = {"fp32": 4, "bf16": 2}
WINDOW = 32
GROUP = 4
USAGE = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Variant:
    """One kernel with the constants that it is compiled for."""

    kernel: str
    function: Any
    head_size: int
    dtype: str
    constants: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel needs of the hardware, as `ptxas -v` reports it."""

    kernel: str
    architecture: int
    head_size: int
    dtype: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    num_warps: int

    @property
    def spills(self) -> bool:
        """Whether registers go to memory."""
        return self.spill_store_bytes + self.spill_load_bytes + self.stack_bytes > 0


def variants() -> Iterator[Variant]:
    """Every kernel in the tilings that `tiling` chooses."""
    for head_size in HEAD_SIZES:
        for dtype, item_bytes in ITEM_BYTES.items():
            sizes = triton_scores.tiling(WINDOW, head_size, item_bytes)
            tile = {
                "GROUP": GROUP,
                "WINDOW": WINDOW,
                "HEAD_SIZE": head_size,
                "BLOCK_D": triton.next_power_of_2(head_size),
                "BLOCK_K": sizes.block_k,
                "BLOCK_Q": sizes.block_q,
            }
            options = {"num_warps": sizes.num_warps, "num_stages": sizes.num_stages}
            lse = triton_scores._lse_kernel
            yield Variant("log-sum-exp", lse, head_size, dtype, tile, options)
            for reduce_group, power in ((False, 1), (True, 1), (True, 2)):
                name = f"scores^{power}" + (", group" if reduce_group else "")
                constants = {**tile, "POWER": power, "REDUCE_GROUP": reduce_group}
                score = triton_scores._score_kernel
                yield Variant(name, score, head_size, dtype, constants, options)
            for gather in (True, False):
                constants = {
                    "GATHER": gather,
                    "HEAD_SIZE": head_size,
                    "BLOCK_D": triton.next_power_of_2(head_size),
                    "ROWS": triton_move.ROWS_PER_PROGRAM,
                }
                name = "gather" if gather else "scatter"
                move = triton_move._move_kernel
                yield Variant(name, move, head_size, dtype, constants, {"num_warps": 4})


def compile_all(architectures: tuple[int, ...] = ARCHITECTURES) -> list[Usage]:
    """Compile every variant for every architecture, given as 80 for sm_80."""
    return [
        compile_one(variant, architecture)
        for architecture in architectures
        for variant in variants()
    ]


def compile_one(variant: Variant, architecture: int) -> Usage:
    """Compile to PTX with Triton, then with ptxas, which says what it used."""
    signature, constants, attributes = _specialise(variant)
    source = ASTSource(variant.function, signature, constants, attributes)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options=variant.options)
    log = _assemble(compiled.asm["ptx"], architecture)
    registers, spills = USAGE.search(log), SPILLS.search(log)
    if registers is None or spills is None:
        raise RuntimeError(f"ptxas did not say what {variant.kernel} uses:\n{log}")
    stack, stores, loads = (int(number) for number in spills.groups())
    return Usage(
        kernel=variant.kernel,
        architecture=architecture,
        head_size=variant.head_size,
        dtype=variant.dtype,
        registers=int(registers.group(1)),
        stack_bytes=stack,
        spill_store_bytes=stores,
        spill_load_bytes=loads,
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
    )


def table(usages: list[Usage]) -> str:
    """The usages as lines of text."""
    lines = [
        f"{'kernel':<18} {'sm':>3} {'head':>4} {'type':>5} {'registers':>9} {'spilled B':>9}"
        f" {'shared B':>8} {'warps':>5}"
    ]
    lines += [
        f"{usage.kernel:<18} {usage.architecture:>3} {usage.head_size:>4} {usage.dtype:>5}"
        f" {usage.registers:>9} {usage.spill_store_bytes + usage.spill_load_bytes:>9}"
        f" {usage.shared_bytes:>8} {usage.num_warps:>5}"
        for usage in usages
    ]
    return "\n".join(lines)


def as_records(usages: list[Usage]) -> list[dict[str, Any]]:
    """The usages as JSON can hold them."""
    return [{**asdict(usage), "spills": usage.spills} for usage in usages]


def _specialise(
    variant: Variant,
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], list[list[Any]]]]:
    """Signature, constants and attributes as a launch on contiguous rows would have them."""
    integers = {"start", "num_keep", "num_tokens", "tokens_per_split", "block_size"}
    pointers = {
        "query": variant.dtype,
        "pages": variant.dtype,
        "kept": variant.dtype,
        "blocks": "i32",
        "positions": "i64",
        "partial": "fp32",
        "lse_log2": "fp32",
        "scores": "fp32",
    }
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(variant.function.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
            constants[name] = variant.constants[name]
        elif name in ("stride_dim", "stride_query_dim"):
            # Triton makes a constant of an argument that is one.
            signature[name] = "constexpr"
            constants[name] = 1
        elif name in pointers:
            signature[name] = f"*{pointers[name]}"
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif name == "scale_log2":
            signature[name] = "fp32"
        elif name in integers:
            signature[name] = "i32"
        else:
            signature[name] = "i32"
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _assemble(ptx: str, architecture: int) -> str:
    """What ptxas says, run as Triton runs it (which ships one for each PTX version)."""
    target = re.search(r"\.target (sm_\w+)", ptx)
    if target is None:
        raise RuntimeError("Triton's PTX names no target")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        ran = subprocess.run(
            [
                get_ptxas(architecture).path,
                "-lineinfo",
                "-v",
                "--regAllocOptLevel=2",
                f"--gpu-name={target.group(1)}",
                source,
                "-o",
                f"{source}.cubin",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    if ran.returncode:
        raise RuntimeError(f"ptxas ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
    return ran.stderr
