"""`kvsieve eval` as a user runs it, against one running server and its modes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from kvsieve.core.errors import ConfigError
from kvsieve.evals.record import ProofError
from kvsieve.evals.results import EvalResults
from kvsieve.evals.session import Endpoint, Session, evaluate
from kvsieve.evals.settings import every_setting
from kvsieve.evals.workload import Wanted
from kvsieve.serving.client import RequestError
from tests.browser import browser
from tests.engine.server import Server, free_port

pytestmark = pytest.mark.engine

SERVE = [
    *("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "800"),
    *("--kv-cache-memory-bytes", "1G", "--max-num-seqs", "8", "--enable-prompt-tokens-details"),
    *("--budget", "256", "--forced-tokens", "--mode-endpoint"),
]
TASKS, LENGTH = ("niah", "second_question", "fidelity"), 600


@pytest.fixture(scope="module")
def server(real_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "kvsieve", "serve", real_model, *SERVE, "--port", str(port)]
    with Server(command, port, tmp_path_factory.mktemp("server") / "log") as server:
        yield server
    assert server.exit_status == 0, server.log.read_text()[-2000:]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eval") / "out"


def kvsieve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvsieve", *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def arguments(server: Server, model: str, out: Path, *more: str) -> list[str]:
    return [
        *("eval", model, "--base-url", server.url, "--out", str(out), "--count", "2"),
        *("--tasks", ",".join(TASKS), "--lengths", str(LENGTH), *more),
    ]


def session(server: Server, model: str, out: Path, *budgets: str) -> Session:
    """The same as `arguments`, to be run in this process, where nothing is imported again."""
    return Session(
        model=model,
        wanted=Wanted(TASKS, (), (LENGTH,), 2, 0),
        settings=every_setting(["kvsieve"], budgets),
        chat=False,
        out=out,
        endpoint=Endpoint(server.url, model),
    )


def run(asked: Session) -> EvalResults:
    return evaluate(asked, Console(quiet=True))


def requests_of(server: Server) -> dict[str, int]:
    """Requests that arrived, by mode, from `/metrics`."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    found = re.findall(r'^kvsieve_requests_total\{.*mode="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return {mode: int(float(count)) for mode, count in found}


def test_the_command_judges_a_running_server(server: Server, real_model: str, out: Path) -> None:
    done = kvsieve(*arguments(server, real_model, out, "--budgets", "50%"))

    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    found = EvalResults.model_validate_json((out / "results.json").read_text())
    by_name = {(one.task, one.setting): one for one in found.tasks}
    assert len(found.records) == len(TASKS) * 2 * 2
    full, half = (by_name["fidelity", name] for name in ("full", "kvsieve 50%"))
    # The model finds a needle at this length, and half of the cache shifts its distribution a bit.
    assert by_name["niah", "full"].score.value == 1.0
    assert full.score.value == 1.0 and full.kv_share == 1.0
    assert 0.8 < half.score.value < 1.0 and 0.0 < half.kl.value < 0.1
    assert half.sieved_share == 1.0 and 0.5 < half.kv_share < 0.7 and 0 < half.mass_lost < 0.2
    assert all(record.prompt_tokens <= LENGTH for record in found.records)
    assert any(record.cached_tokens for record in found.records if not record.setting.is_full)
    assert "kvsieve 50%" in done.stdout and found.run["endpoint"] == server.url
    with browser() as page:
        for width in (1300, 400):
            page.open(out / "report.html", width=width, phone=width == 400)
            assert page.complaints == [] and len(page.requested) == 1
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert "kvsieve 50%" in page.evaluate("document.body.innerText")


def test_a_finished_run_asks_nothing(server: Server, real_model: str, out: Path) -> None:
    before, results = requests_of(server), json.loads((out / "results.json").read_text())

    done = kvsieve(*arguments(server, real_model, out, "--budgets", "50%"))

    assert done.returncode == 0 and "nothing is asked" in done.stderr
    assert requests_of(server) == before
    again = json.loads((out / "results.json").read_text())
    assert (again["tasks"], again["records"]) == (results["tasks"], results["records"])


def test_another_budget_is_asked_alone_and_compared(
    server: Server, real_model: str, out: Path, tmp_path: Path
) -> None:
    before = requests_of(server)

    found = run(session(server, real_model, out, "50%", "128"))

    after = requests_of(server)
    # Six items at 128; before them one request that nothing is refused for each of the two
    # budgets, and one that the server keeps what it kept.
    assert after["sieve"] - before["sieve"] == 6 + 3
    # Full KV where its distribution is needed again, and one request at first.
    assert after["full"] - before["full"] == 2 + 1
    assert {one.setting for one in found.of("all")} == {"full", "kvsieve 50%", "kvsieve 128"}
    (tmp_path / "after.json").write_text(found.model_dump_json())
    done = kvsieve(
        *("eval", "--compare", str(out / "results.json"), str(tmp_path / "after.json")),
        *("--out", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    assert "Nothing changed beyond what chance explains." in done.stdout
    assert (tmp_path / "comparison.html").exists()


def test_a_server_that_does_not_sieve_is_not_judged(
    server: Server, real_model: str, tmp_path: Path
) -> None:
    asked = session(server, real_model, tmp_path / "full", "25%")
    try:
        assert kvsieve("mode", "full", "--url", server.url).returncode == 0
        with pytest.raises(ProofError, match="the server reports mode 'full'"):
            run(asked)
        assert kvsieve("mode", "shadow", "--url", server.url).returncode == 0
        done = kvsieve(*arguments(server, real_model, tmp_path / "shadow", "--budgets", "25%"))
    finally:
        assert kvsieve("mode", "sieve", "--url", server.url).returncode == 0

    assert done.returncode == 2 and done.stdout == ""
    assert "the server reports mode 'shadow'" in " ".join(done.stderr.split())
    assert not (tmp_path / "shadow" / "results.json").exists()


def test_budgets_below_the_smallest_are_refused_together(
    server: Server, real_model: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(session(server, real_model, tmp_path, "3", "50%", "43"))

    three, nearly = caught.value.reasons
    assert "kv_budget 3 is too small: the smallest that this server allows is 44" in three
    assert "kv_budget 43 is too small" in nearly
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 1


def test_other_servers_are_refused_with_a_sentence(
    server: Server, real_model: str, tmp_path: Path
) -> None:
    asked = session(server, real_model, tmp_path / "dead", "50%")
    nowhere = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RequestError, match=f"no answer from {nowhere}"):
        run(replace(asked, endpoint=Endpoint(nowhere, "m")))
    with pytest.raises(ConfigError, match="has no model 'm'"):
        run(replace(asked, endpoint=Endpoint(server.url, "m"), out=tmp_path / "misnamed"))
    long = Wanted(("niah",), (), (LENGTH, 900), 1, 0)
    with pytest.raises(ConfigError, match="the server takes 800"):
        run(replace(asked, wanted=long, out=tmp_path / "long"))
