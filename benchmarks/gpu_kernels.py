"""The Triton kernels on this machine's GPU: right, and how far from the memory's speed.

python benchmarks/gpu_kernels.py [--json FILE]
python benchmarks/gpu_kernels.py --compile-only [--json FILE]

Each kernel is compared with the reference and then timed: CUDA events, the median of 50 calls with
a cold L2, beside the time in which a large copy moves as many bytes. With `--compile-only` the
kernels are compiled for sm_80, sm_89 and sm_90, which needs no GPU, and their registers are
listed. Without a GPU nothing is measured: exit status 2.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

from kvsieve.reports.provenance import provenance


def main() -> int:
    """Compile or measure; returns the exit status."""
    parser = argparse.ArgumentParser(description="Check and time the Triton kernels on a GPU.")
    parser.add_argument(
        "--compile-only", action="store_true", help="compile for sm_80, 89 and 90; needs no GPU"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    arguments = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        return refuse("Triton is not installed: install kvsieve[gpu]")
    if arguments.compile_only:
        from kernels import compiling

        source = birth()
        usages = compiling.compile_all()
        print(compiling.table(usages))
        write(arguments.json, {"provenance": source, "compiled": compiling.as_records(usages)})
        return 1 if any(usage.spills for usage in usages) else 0
    if not torch.cuda.is_available():
        return refuse(
            "there is no CUDA GPU here, so nothing was checked or timed; --compile-only compiles"
            " the kernels without one"
        )
    from kernels import measuring

    source = birth()
    bandwidth = measuring.copy_bandwidth()
    results = []
    try:
        for setting in measuring.SETTINGS:
            results += measuring.measure(setting, bandwidth)
    except measuring.WrongResultError as error:
        print(f"gpu_kernels: {error}", file=sys.stderr)
        return 1
    print(f"{torch.cuda.get_device_name()}: a copy moves {bandwidth / 1e9:.0f} GB/s")
    print(measuring.table(results))
    measured = {"provenance": source, "copy_bytes_per_second": bandwidth, "results": results}
    write(arguments.json, measured)
    return 0


def refuse(reason: str) -> int:
    """Say why nothing can be done."""
    print(f"gpu_kernels: {reason}", file=sys.stderr)
    return 2


def birth() -> dict[str, Any]:
    """Provenance with Triton's version; GPU and driver are in `machine`."""
    import triton

    source = provenance()
    source["versions"]["triton"] = triton.__version__
    return source


def write(file: Path | None, content: dict[str, Any]) -> None:
    """Write JSON where a file was asked for."""
    if file is not None:
        file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
