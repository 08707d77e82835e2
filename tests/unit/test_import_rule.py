"""The import rule: an arrow may import what it points to, and nothing else.

    cli -> calibrate -> {evals, bench, inspect, demo, planning} -> {serving, reports} -> engine
        -> {policies, pruning, kernels} -> core, and pruning -> policies

Otherwise rooms on one level do not import one another, and only `engine` imports vLLM.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
MAX_LINES = 400


@dataclass(frozen=True)
class Allowed:
    """What the files of one room may import besides the standard library and their own room."""

    rooms: frozenset[str]
    packages: frozenset[str] | None
    """Third-party packages by top-level name. None: any but vLLM."""


def allow(rooms: str = "", packages: str | None = None) -> Allowed:
    names = None if packages is None else frozenset(packages.split())
    return Allowed(frozenset(rooms.split()), names)


UP_TO_ENGINE = "kvsieve core policies pruning kernels engine"

# One line per room. `kvsieve` is the package's own `__init__`, which re-exports from core.
RULE = {
    "core": allow(packages="pydantic"),
    "kvsieve": allow("core", packages=""),
    "policies": allow("core", packages="torch"),
    "pruning": allow("core policies", packages="pydantic torch"),
    "kernels": allow("core", packages="torch triton"),
    "engine": allow("kvsieve core policies pruning kernels"),
    "serving": allow(UP_TO_ENGINE),
    "reports": allow("kvsieve core"),
    "evals": allow(f"{UP_TO_ENGINE} serving reports"),
    "bench": allow(f"{UP_TO_ENGINE} serving reports"),
    "inspect": allow(f"{UP_TO_ENGINE} serving reports"),
    "calibrate": allow(f"{UP_TO_ENGINE} reports evals inspect"),
    "demo": allow(f"{UP_TO_ENGINE} serving"),
    "planning": allow("kvsieve core pruning", packages="transformers"),
    "cli": allow(f"{UP_TO_ENGINE} serving reports evals bench inspect calibrate demo planning"),
    "__main__": allow("cli", packages=""),
}
IMPORTS_VLLM = "engine"


def room_of(module: str) -> str:
    """The room of a dotted name inside kvsieve: `kvsieve.core.plan` is in `core`."""
    return module.split(".")[1] if "." in module else "kvsieve"


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import in the file, those inside functions too."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for name in names:
                    yield node.lineno, name.name
            case ast.ImportFrom(names=names):
                base = absolute_base(node, module, is_package)
                for name in names:
                    # What is imported may itself be a room: `from kvsieve import engine`.
                    is_room = base == "kvsieve" and name.name in RULE
                    yield node.lineno, f"{base}.{name.name}" if is_room else base
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def absolute_base(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The absolute name of what stands after `from`, relative imports resolved."""
    if node.level == 0:
        return node.module or ""
    parents = module.split(".")
    keep = len(parents) - node.level + is_package
    return ".".join(parents[:keep] + ([node.module] if node.module else []))


def complaint(room: str, imported: str) -> str | None:
    """Why a file of the room may not import the module, or None if it may."""
    allowed = RULE[room]
    top = imported.partition(".")[0]
    if top == "kvsieve":
        other = room_of(imported)
        if other == room or other in allowed.rooms:
            return None
        return f"{room} may not import {other}"
    if top == "vllm":
        return None if room == IMPORTS_VLLM else f"only {IMPORTS_VLLM} may import vllm"
    if top in sys.stdlib_module_names or allowed.packages is None or top in allowed.packages:
        return None
    return f"{room} may not import the package {top}"


def violations(source: Path) -> list[str]:
    """Everything under `source/kvsieve` that breaks the rule, as `file:line: reason`."""
    found: list[str] = []
    for path in sorted((source / "kvsieve").rglob("*.py")):
        where = path.relative_to(source).as_posix()
        is_package = path.name == "__init__.py"
        parts = path.relative_to(source).with_suffix("").parts
        module = ".".join(parts[:-1] if is_package else parts)
        room = room_of(module)
        if room not in RULE:
            found.append(f"{where}:1: {room} is no room of the import rule")
            continue
        for line, imported in imported_modules(ast.parse(path.read_text()), module, is_package):
            reason = complaint(room, imported)
            if reason:
                found.append(f"{where}:{line}: {reason}")
    # `from torch import a, b` is one violation.
    return list(dict.fromkeys(found))


def plant(source: Path, file: str, text: str) -> None:
    path = source / "kvsieve" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_source_follows_the_rule() -> None:
    assert violations(SOURCE) == []


def test_walk_reads_the_source() -> None:
    assert {"__init__.py", "config.py"} <= {path.name for path in SOURCE.rglob("*.py")}


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("core/a.py", "import torch", "1: core may not import the package torch"),
        ("core/a.py", "from kvsieve.policies import b", "1: core may not import policies"),
        ("core/a.py", "from kvsieve import SieveConfig", "1: core may not import kvsieve"),
        ("core/a.py", "import kvsieve", "1: core may not import kvsieve"),
        ("__init__.py", "from kvsieve import engine", "1: kvsieve may not import engine"),
        ("__init__.py", "from .engine import x", "1: kvsieve may not import engine"),
        ("policies/a.py", "from ..kernels.b import c", "1: policies may not import kernels"),
        ("policies/__init__.py", "from ..kernels import c", "1: policies may not import kernels"),
        ("policies/sub/a.py", "from ...kernels import c", "1: policies may not import kernels"),
        ("policies/a.py", "from kvsieve.pruning import c", "1: policies may not import pruning"),
        ("pruning/a.py", "from kvsieve.kernels import c", "1: pruning may not import kernels"),
        ("kernels/a.py", "from kvsieve.policies.b import c", "1: kernels may not import policies"),
        ("kernels/a.py", "import numpy as np", "1: kernels may not import the package numpy"),
        ("engine/a.py", "import kvsieve.serving.b", "1: engine may not import serving"),
        ("evals/a.py", "from kvsieve.bench import b", "1: evals may not import bench"),
        ("serving/a.py", "def f():\n    from vllm import LLM", "2: only engine may import vllm"),
        ("cli/a.py", "if TYPE_CHECKING:\n    import vllm.config", "2: only engine may import vllm"),
        ("cli/a.py", "importlib.import_module('vllm')", "1: only engine may import vllm"),
        ("bench/a.py", "__import__('vllm.envs')", "1: only engine may import vllm"),
        ("stray.py", "", "1: stray is no room of the import rule"),
        ("helpers/a.py", "", "1: helpers is no room of the import rule"),
    ],
)
def test_planted_violation_is_found(tmp_path: Path, file: str, text: str, reason: str) -> None:
    plant(tmp_path, file, text)

    assert violations(tmp_path) == [f"kvsieve/{file}:{reason}"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("core/b.py", "from . import c\nfrom .d import e"),
        ("core/a.py", "import math\nimport pydantic\nfrom kvsieve.core.b import c"),
        ("policies/a.py", "import torch.nn.functional as F\nfrom kvsieve.core.plan import x"),
        ("kernels/a.py", "def f():\n    import triton"),
        ("pruning/a.py", "from kvsieve.policies import Evidence"),
        ("planning/a.py", "from kvsieve.pruning import pruning_from_config"),
        ("engine/a.py", "import vllm, numpy\nfrom kvsieve.policies import b"),
        ("cli/a.py", "from kvsieve import __version__, demo\nimport rich"),
    ],
)
def test_allowed_import_is_not_found(tmp_path: Path, file: str, text: str) -> None:
    plant(tmp_path, file, text)

    assert violations(tmp_path) == []


def untidy_files(source: Path) -> list[str]:
    """Modules called `utils`, and files too long to be read in one sitting."""
    found: list[str] = []
    for path in sorted(source.rglob("*.py")):
        where = path.relative_to(source)
        lines = len(path.read_text().splitlines())
        if "utils" in where.with_suffix("").parts:
            found.append(f"{where.as_posix()}: name it after the concept it holds")
        if lines > MAX_LINES:
            found.append(f"{where.as_posix()}: {lines} lines, at most {MAX_LINES}")
    return found


def test_source_is_tidy() -> None:
    assert untidy_files(SOURCE) == []


def test_untidy_files_are_found(tmp_path: Path) -> None:
    plant(tmp_path, "core/utils.py", "")
    plant(tmp_path, "engine/utils/a.py", "x = 1\n" * MAX_LINES)
    plant(tmp_path, "engine/long.py", "x = 1\n" * (MAX_LINES + 1))

    assert untidy_files(tmp_path) == [
        "kvsieve/core/utils.py: name it after the concept it holds",
        "kvsieve/engine/long.py: 401 lines, at most 400",
        "kvsieve/engine/utils/a.py: name it after the concept it holds",
    ]


BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Block())
"""

PARSE_CONFIG = """
import kvsieve
assert kvsieve.SieveConfig.parse({"budget": 512}).budget == 512
"""


def run_without(blocked: set[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that cannot import the blocked packages."""
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=blocked) + code],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_config_parses_without_vllm_torch_transformers_triton() -> None:
    ran = run_without({"vllm", "torch", "transformers", "triton"}, PARSE_CONFIG)

    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("package", ["kvsieve.policies", "kvsieve.pruning", "kvsieve.kernels"])
def test_tensor_code_imports_without_vllm_transformers_triton(package: str) -> None:
    ran = run_without({"vllm", "transformers", "triton"}, f"import {package}")

    assert ran.returncode == 0, ran.stderr


def test_block_bites() -> None:
    ran = run_without({"pydantic"}, PARSE_CONFIG)

    assert ran.returncode != 0
    assert "pydantic is blocked" in ran.stderr
