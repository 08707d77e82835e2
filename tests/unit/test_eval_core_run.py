"""A whole evaluation against a small server: what it asks, refuses, keeps and goes on with."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvsieve.cli.main import app
from kvsieve.core.errors import ConfigError, KvsieveError
from kvsieve.evals.prompts import PromptMaker
from kvsieve.evals.record import ProofError
from kvsieve.evals.results import EvalResults
from kvsieve.evals.session import Endpoint, Session, evaluate
from kvsieve.evals.settings import every_setting
from kvsieve.evals.workload import Wanted, make_items
from kvsieve.serving.client import RequestError
from tests.unit.eval_parts import results_of, save_tokenizer
from tests.unit.test_eval_core_results import HALF, niah
from tests.unit.vllm_double import Double, Handler, running_double


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def double() -> Iterator[Double]:
    with running_double() as double:
        yield double


@pytest.fixture
def session(model: str, double: Double, tmp_path: Path) -> Session:
    return Session(
        model=model,
        wanted=Wanted(("niah", "second_question", "fidelity"), (), (600,), 2, 0),
        settings=every_setting(["snapkv"], ["50%", "25%"]),
        chat=False,
        out=tmp_path / "out",
        endpoint=Endpoint(double.url, "model"),
        concurrency=2,
    )


def run(session: Session) -> tuple[EvalResults, str]:
    shown = io.StringIO()
    return evaluate(session, Console(file=shown, width=200)), shown.getvalue()


def error_of(session: Session) -> KvsieveError:
    with pytest.raises(KvsieveError) as caught:
        run(session)
    return caught.value


def journal_of(session: Session) -> list[str]:
    return (session.out / "journal.jsonl").read_text().splitlines()


def with_budgets(session: Session, *budgets: str) -> Session:
    return replace(session, settings=every_setting(["snapkv"], budgets))


def test_every_item_is_asked_under_every_setting(session: Session, double: Double) -> None:
    found, _ = run(session)
    assert {one.setting for one in found.of("fidelity")} == {"full", "snapkv 50%", "snapkv 25%"}
    assert len(found.records) == 3 * 6 and len(journal_of(session)) == 1 + 3 * 6
    full, half = (
        next(one for one in found.of("fidelity") if one.setting == name)
        for name in ("full", "snapkv 50%")
    )
    assert (full.score.value, full.kv_share, full.sieved_share) == (1.0, 1.0, 0.0)
    assert half.sieved_share == 1.0 and 0.5 < half.kv_share < 0.6 and half.mass_lost > 0
    # One request per setting to see that nothing is refused, then those of the items.
    assert len(double.bodies) == 3 + 3 * 6
    # Each item is asked with full KV first, so that the others find it in the prefix cache.
    first = {str(body["prompt"]): body for body in reversed(double.bodies)}
    assert all(body["vllm_xargs"]["kv_budget"] == "full" for body in first.values())


def test_a_second_run_asks_nothing(session: Session, double: Double) -> None:
    before, _ = run(session)
    double.bodies.clear()
    after, shown = run(session)
    assert double.bodies == [] and "nothing is asked" in shown
    assert (after.tasks, after.records) == (before.tasks, before.records)


def test_another_budget_asks_for_that_alone(session: Session, double: Double) -> None:
    run(session)
    double.bodies.clear()
    found, _ = run(with_budgets(session, "50%", "25%", "300"))
    assert {one.setting for one in found.of("all")} == {
        *("full", "snapkv 50%", "snapkv 25%", "snapkv 300")
    }
    asked = double.budgets()
    # Full KV again where its distribution is needed, which the journal does not keep.
    assert asked.count(300) == 6 + 1 and asked.count("full") == 2 + 1
    # One request sees that nothing is refused, and one that the server is as it was.
    assert asked.count("50%") + asked.count("25%") == 2 + 1


def test_a_server_with_other_settings_is_noticed(session: Session, double: Double) -> None:
    run(session)
    double.window = 64
    said = str(error_of(with_budgets(session, "25%", "300")))
    assert "does not keep what it kept when" in said and "--out" in said
    assert len(journal_of(session)) == 1 + 3 * 6
    double.window = 32
    run(with_budgets(session, "25%", "300"))


def test_a_server_that_dies_leaves_what_was_done(session: Session, double: Double) -> None:
    def fail(handler: Handler, body: dict[str, Any]) -> bool:
        if len(double.bodies) <= 12:
            return False
        handler.send(500, {"error": {"message": "EngineCore died", "code": 500}})
        return True

    double.fail = fail
    shown = io.StringIO()
    with pytest.raises(RequestError, match="500: EngineCore died"):
        evaluate(session, Console(file=shown, width=200))
    done = len(journal_of(session)) - 1
    assert 0 < done < 18 and f"{done} answers are in" in shown.getvalue()
    double.fail = lambda handler, body: False
    found, _ = run(session)
    clean, _ = run(replace(session, out=session.out.with_name("clean")))
    key = {(one.item_id, one.kv_budget): one for one in clean.records}
    assert all(key[one.item_id, one.kv_budget] == one for one in found.records)
    assert found.tasks == clean.tasks


def test_ctrl_c_leaves_what_was_done(session: Session, double: Double) -> None:
    # Two requests may arrive before either is looked at: the 13th is not always seen alone.
    key = threading.Lock()

    def fail(handler: Handler, body: dict[str, Any]) -> bool:
        if len(double.bodies) >= 13 and key.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)
        return False

    double.fail = fail
    shown = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        evaluate(session, Console(file=shown, width=200))
    assert "the same command goes on from there" in shown.getvalue()
    double.fail = lambda handler, body: False
    found, _ = run(session)
    assert len(found.records) == 18


@pytest.mark.parametrize("mode", ["full", "shadow"])
def test_a_server_that_does_not_sieve_gives_no_numbers(
    session: Session, double: Double, mode: str
) -> None:
    double.mode = mode
    error = error_of(session)
    assert isinstance(error, ProofError)
    assert f"the server reports mode '{mode}'" in str(error) and "`kvsieve mode`" in str(error)
    assert len(journal_of(session)) == 1


def unpruned(report: dict[str, Any]) -> dict[str, Any]:
    return {**report, "pruned": None, "not_pruned": "400 tokens must be read at once"}


def lacking(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key != "stored_tokens"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": "random"}, "give --policies random"),
        ({"forces": False}, "is its setting forced_tokens on"),
        ({"reports": lambda report: None}, "carries no report"),
        ({"reports": lacking}, "is the server another version?"),
        ({"reports": lambda report: {**report, "prompt_tokens": 5}}, "and reports on 5"),
        ({"reports": unpruned}, "was to be pruned and was not: 400 tokens must be read at once"),
    ],
)
def test_what_is_not_shown_is_not_believed(
    session: Session, double: Double, changes: dict[str, Any], said: str
) -> None:
    for name, value in changes.items():
        setattr(double, name, value)
    error = error_of(session)
    assert isinstance(error, ProofError) and said in str(error)
    assert len(journal_of(session)) == 1


def test_a_budget_that_arrived_as_another_is_noticed(session: Session, double: Double) -> None:
    double.reports = lambda report: {**report, "budget": 1024}
    assert "a budget of 200 tokens, and the server reports one of 1024" in str(
        error_of(with_budgets(session, "200"))
    )


def test_all_refusals_come_first_and_at_once(session: Session, double: Double) -> None:
    error = error_of(with_budgets(session, "3", "50%", "67"))
    assert isinstance(error, ConfigError) and len(error.reasons) == 2
    assert all("too small" in reason for reason in error.reasons)
    assert len(double.bodies) == 4 and len(journal_of(session)) == 1


def test_forced_tokens_must_be_allowed(session: Session, double: Double) -> None:
    double.takes_forced = False
    (reason,) = error_of(session).reasons
    assert "does not take forced_tokens" in reason and "full, 50%, 25%" in reason
    # Only where a task needs them.
    run(replace(session, wanted=replace(session.wanted, tasks=("niah",))))


def test_log_probabilities_must_be_the_models(session: Session, double: Double) -> None:
    double.logprobs_mode = "processed_logprobs"
    assert "--logprobs-mode" in str(error_of(session))


def test_what_does_not_fit_the_server_is_refused(session: Session, double: Double) -> None:
    double.max_model_len = 640
    (reason,) = error_of(session).reasons
    assert "second_question/600/" in reason and "the server takes 640" in reason
    assert "--lengths" in reason and "--max-model-len" in reason
    assert double.bodies == []
    double.max_model_len = None  # A server that does not say is asked all the same.
    run(session)


def test_a_model_that_the_server_lacks_is_refused(session: Session, double: Double) -> None:
    (reason,) = error_of(replace(session, endpoint=Endpoint(double.url, "other"))).reasons
    assert "no model 'other', but 'model'" in reason and double.bodies == []


def test_a_dead_server_is_named(session: Session) -> None:
    error = error_of(replace(session, endpoint=Endpoint("http://127.0.0.1:9", "model")))
    assert isinstance(error, RequestError) and "no answer from http://127.0.0.1:9" in str(error)


def test_another_runs_folder_is_refused_before_anything_is_asked(
    session: Session, double: Double
) -> None:
    run(session)
    double.bodies.clear()
    other = replace(session, wanted=replace(session.wanted, seed=1), sieve={"pool_size": 9})
    advice, *reasons = error_of(other).reasons
    assert "of another run" in advice and double.bodies == []
    assert reasons == ["seed was 0 and is 1", "sieve was {} and is {'pool_size': 9}"]


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", *arguments])


def refused(*arguments: str) -> str:
    done = command(*arguments)
    assert isinstance(done.exception, ConfigError), done.output
    return str(done.exception)


def test_all_that_is_wrong_with_a_command_is_said_at_once() -> None:
    said = refused(
        *("/nowhere", "--lengths", "64,x", "--tasks", "niah,niahh", "--budgets", "full,5x"),
        *("--policies", "nosuch", "--budget", "64", "--port=1", "--mode", "full"),
        *("--served-model-name", "m", "--pool-size", "4", "--max-prompt-tokens", "99"),
    )
    for part in (
        "there is no folder /nowhere",
        "--lengths must be whole numbers above 0 (given: '64,x')",
        "no task 'niahh'",
        "leave 'full' out of the budgets",
        "'5x'",
        "'nosuch'",
        "--budget: the budgets to compare are given to --budgets",
        "--port: an evaluation starts and addresses its servers itself",
        "--mode: the servers of an evaluation sieve",
        "--served-model-name is for a running server",
        "try 5",
        "--max-prompt-tokens is for files",
    ):
        assert part in said, part


def test_a_running_server_keeps_its_settings(model: str) -> None:
    said = refused(
        *(model, "--base-url", "http://127.0.0.1:9", "--policies", "snapkv,random"),
        *("--pool-size", "9", "--dtype", "float32", "--enforce-eager"),
    )
    assert "a running server has one policy" in said
    assert "leave out --pool-size, --dtype, --enforce-eager" in said


def test_the_command_shows_and_writes(model: str, double: Double, tmp_path: Path) -> None:
    out = tmp_path / "[red]o[/red]"
    arguments = [
        *(model, "--base-url", double.url, "--served-model-name", "model", "--out", str(out)),
        *("--tasks", "niah,fidelity", "--lengths", "600", "--count", "2", "--budgets", "200"),
        *("--policies", "snapkv"),
    ]
    done = command(*arguments)
    assert done.exit_code == 0, done.output
    assert "snapkv 200" in done.stdout and "[red]o[/red]" in done.stderr
    found = EvalResults.model_validate_json((out / "results.json").read_text())
    assert found.run["endpoint"] == double.url and found.run["model"] == model
    assert "Evaluation of" in (out / "report.html").read_text()
    done = command("--compare", *2 * [str(out / "results.json")], "--out", str(out))
    assert done.exit_code == 0 and "Nothing changed" in done.stdout
    assert (out / "comparison.html").exists() and (out / "comparison.json").exists()


def test_a_comparison_runs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(results_of(niah(s50=HALF)).model_dump_json())
    both = ["--compare", str(file), str(file)]
    said = refused("m", *both, "--seed", "3", "--tolernce", "1")
    assert said.endswith("leave out --tolernce, --seed, MODEL")
    (tmp_path / "file").touch()
    assert "cannot write in" in refused(*both, "--out", str(tmp_path / "file"))


def test_a_password_is_not_published(session: Session, double: Double) -> None:
    url = double.url.replace("://", "://me:secret@")
    found, shown = run(replace(session, endpoint=Endpoint(url, "model")))
    assert "secret" not in found.model_dump_json() + shown + "".join(journal_of(session))


def test_budgets_that_every_prompt_fits_are_refused(session: Session, double: Double) -> None:
    error = error_of(with_budgets(session, "200", "2000", "3000"))
    assert "nothing would be sieved to 2000, 3000 tokens" in str(error)
    assert double.bodies == []


def test_prompts_longer_than_the_model_takes_are_refused(session: Session, double: Double) -> None:
    maker = PromptMaker(session.model, chat=False)
    maker.max_length = 4096
    with pytest.raises(ConfigError, match="prompts of 99999999 tokens are longer than the 4096"):
        make_items(replace(session.wanted, lengths=(600, 99_999_999)), maker)


def test_an_address_that_is_none_is_refused(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = refused(model, "--base-url", "foo", "--out", str(out))
    assert "--base-url must begin with http:// or https:// (given: 'foo')" in said
    assert not out.exists()
