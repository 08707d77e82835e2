"""Where results come from: the package that runs, its commit and the machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from kvsieve.reports.provenance import provenance, without_secrets

ROOT = Path(__file__).resolve().parents[2]


def test_provenance_is_json_and_names_command_seed_and_versions() -> None:
    birth = json.loads(json.dumps(provenance(seed=5)))

    assert birth["seed"] == 5 and birth["argv"] == without_secrets(sys.argv)
    assert birth["date"].endswith("+00:00")
    assert {"python", "kvsieve", "torch"} <= set(birth["versions"])
    assert birth["machine"]["cores"] == os.cpu_count()
    assert isinstance(birth["machine"]["gpus"], list)


def test_secrets_on_the_command_line_are_hidden() -> None:
    argv = "x --api-key K1 --url http://me:K2@host/v1 --hf_token=K3 --max-tokens 32 --api-key --k"

    shown = " ".join(without_secrets(argv.split()))

    assert shown == (
        "x --api-key *** --url http://***@host/v1 --hf_token=*** --max-tokens 32 --api-key --k"
    )


def test_source_and_commit_are_those_of_the_package_that_runs(tmp_path: Path) -> None:
    for room in ("core", "reports"):
        shutil.copytree(ROOT / "src" / "kvsieve" / room, tmp_path / "src" / "kvsieve" / room)
    package = shutil.copy(ROOT / "src" / "kvsieve" / "__init__.py", tmp_path / "src" / "kvsieve")

    def birth() -> dict[str, object]:
        code = (
            "import json; from kvsieve.reports.provenance import provenance\n"
            "print(json.dumps(provenance()))"
        )
        environment = {
            **os.environ,
            "PYTHONPATH": str(tmp_path / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        ran = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        answer: dict[str, object] = json.loads(ran.stdout)
        return answer

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    copied = birth()
    git("init")
    git("add", "src")
    git("commit", "-m", "x")
    committed = birth()
    with open(package, "a") as file:
        file.write("# changed\n")
    changed = birth()

    assert (copied["commit"], copied["uncommitted"]) == ("unknown", [])
    assert (committed["commit"], committed["uncommitted"]) == (git("rev-parse", "HEAD"), [])
    assert changed["uncommitted"] == [" M src/kvsieve/__init__.py"]
    assert copied["source_sha256"] == committed["source_sha256"] != changed["source_sha256"]
