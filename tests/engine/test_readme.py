"""Every command of the README is run: as written, but on the test's model and a free port."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.server import Server, free_port

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(kind: str) -> list[str]:
    """The code blocks of a kind, in order."""
    return re.findall(rf"^```{kind}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[str]:
    """The commands of a shell block, continued lines joined and comments dropped."""
    lines = block.replace("\\\n", " ").splitlines()
    return [
        line.split("   #")[0].strip() for line in lines if line.strip() and not line.startswith("#")
    ]


def environment(model: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "MODEL": model, "HF_HUB_OFFLINE": "1"}


def test_it_opens_with_exactly_two_commands() -> None:
    assert [command.split("   ")[0] for command in commands(blocks("sh")[0])] == [
        "make demo",
        "make test",
    ]
    assert README.index("make demo") < 100


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z-]+)", README))))
def test_make_knows_the_target(target: str) -> None:
    subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


def test_the_verbs_run(real_model: str) -> None:
    lines = [
        line
        for line in commands(blocks("sh")[1])
        if not line.startswith((". .venv", "export MODEL="))
    ]
    assert [line.split()[1] for line in lines] == ["doctor", "plan", "generate"]
    for line in lines:
        done = subprocess.run(
            line, shell=True, cwd=ROOT, env=environment(real_model), capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr[-3000:]}"
    assert '"sieved": true' in done.stderr
    assert "DEC and Xerox" in done.stdout


@pytest.mark.parametrize("number", [0, 1], ids=["kvsieve-serve", "plain-vllm"])
def test_the_servers_serve(real_model: str, tmp_path: Path, number: int) -> None:
    port = free_port()
    (line,) = commands(blocks("sh serve")[number])
    words = shlex.split(line.replace("$MODEL", real_model))
    program = str(Path(sys.executable).parent / words[0])
    with Server([program, *words[1:], "--port", str(port)], port, tmp_path / "log") as server:
        (client,) = blocks("sh client")
        done = subprocess.run(
            client.replace("8000", str(port)),
            shell=True,
            env=environment(real_model),
            capture_output=True,
            text=True,
            check=True,
        )
        response = json.loads(done.stdout)
        assert response["choices"][0]["text"]
        report = response["kv_transfer_params"]["kvsieve"]
        assert report["sieved"] is False
        assert report["layers"] == {"full": 0, "sieved": 30}
        assert "kvsieve: mode sieve, kvsieve over 30 sieved layers" in server.log.read_text()
        own_budget(port, real_model, tmp_path)
        if number == 0:
            switch(port, real_model)
    assert server.exit_status == 0, server.log.read_text()[-2000:]


def test_the_server_that_prunes_prunes(real_model: str, tmp_path: Path) -> None:
    port = free_port()
    (line,) = commands(blocks("sh pruning serve")[0])
    words = shlex.split(line.replace("$MODEL", real_model))
    program = str(Path(sys.executable).parent / words[0])
    (client,) = blocks("python pruning client")
    script = tmp_path / "client.py"
    script.write_text(client.replace("8000", str(port)))
    with Server([program, *words[1:], "--port", str(port)], port, tmp_path / "log"):
        done = subprocess.run(
            [sys.executable, str(script)],
            env=environment(real_model),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("{'method': 'asl', 'layer': ")


def own_budget(port: int, model: str, folder: Path) -> None:
    """Run the README's request with a budget of its own."""
    (program,) = blocks("python client")
    script = folder / "client.py"
    script.write_text(program.replace("8000", str(port)))
    done = subprocess.run(
        [sys.executable, str(script)], env=environment(model), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'budget': 128, 'sieved': True" in done.stdout


def switch(port: int, model: str) -> None:
    """Run the README's command that changes the mode."""
    (line,) = commands(blocks("sh mode")[0])
    done = subprocess.run(
        line.replace("8000", str(port)),
        shell=True,
        env=environment(model),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "full" in done.stdout


def test_the_settings_table_is_the_configuration() -> None:
    from kvsieve import SieveConfig

    table = README.split("## Settings")[1].split("## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert named == list(SieveConfig.model_fields)
    for row in rows:
        names = re.findall(r"`(\w+)`", row.split("|")[1])
        default = SieveConfig.model_fields[names[0]].get_default(call_default_factory=True)
        if len(names) == 1 and default not in (None, (), {}):
            assert f"`{default}`" in row.split("|")[2]


def test_the_response_shown_has_the_fields_of_the_report() -> None:
    from dataclasses import fields

    from kvsieve import SieveReport

    (shown,) = blocks("json")
    report = json.loads(f"{{{shown}}}")["kv_transfer_params"]["kvsieve"]
    assert list(report) == [field.name for field in fields(SieveReport)]


def test_the_python_program_runs(real_model: str, tmp_path: Path) -> None:
    (program,) = blocks("python")
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env=environment(real_model),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'sieved': True" in done.stdout
    assert "DEC and Xerox" in done.stdout
