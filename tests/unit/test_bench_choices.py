"""The command line of `kvsieve bench`: what it comes to, and every reason against it at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvsieve.bench.choices import Choices, choose, flag_value
from kvsieve.bench.options import Options
from kvsieve.bench.workload import WORKLOADS
from kvsieve.cli.bench import bench
from kvsieve.core.errors import ConfigError

GIVEN = Choices(
    model="m",
    budgets="128,25%",
    policies=None,
    settings={},
    workloads="mixed",
    scale=0.1,
    concurrency=None,
    rate=None,
    requests=None,
    repeats=2,
    seed=0,
    ttft_goal=None,
    tpot_goal=None,
    sweep=False,
    ttft_p50=None,
    sweep_limit=8,
    one_at_a_time=None,
    kv_cache_gib=1.0,
    json_file=None,
    html_file=None,
)


def chosen(*, num_gpus: int = 0, **changes: Any) -> Options:
    own = ("--budgets", "--concurrency", "--ttft-goal")
    return choose(dataclasses.replace(GIVEN, **changes), num_gpus=num_gpus, own_options=own)


def reasons(**changes: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        chosen(**changes)
    return caught.value.reasons


def test_stock_and_an_arm_for_each_budget() -> None:
    options = chosen(settings={"full_layers": "0-2"})
    assert [arm.name for arm in options.arms] == ["stock", "budget-128", "budget-25%"]
    assert [arm.settings for arm in options.arms] == [
        None,
        {"full_layers": "0-2", "budget": "128"},
        {"full_layers": "0-2", "budget": "25%"},
    ]
    assert options.flags == (
        *("--kv-cache-memory-bytes", str(2**30)),
        "--enable-prompt-tokens-details",
    )
    assert options.load.concurrency == 8 and not options.one_at_a_time and options.gpus == 0
    specs = [options.spec(arm) for arm in options.arms]
    assert {spec.flags for spec in specs} == {options.flags}
    assert specs[0].settings is None


def test_a_gpu_holds_one_server_at_a_time_unless_told_otherwise() -> None:
    options = chosen(num_gpus=4, kv_cache_gib=None, flags=("--tensor-parallel-size=2",))
    assert options.one_at_a_time and options.gpus == 2
    assert not chosen(num_gpus=1, one_at_a_time=False).one_at_a_time


def test_requests_follow_from_the_clients() -> None:
    options = chosen(concurrency=3)
    assert options.num_requests(WORKLOADS["mixed"]) == 12
    assert options.num_requests(WORKLOADS["multi-turn"]) == 60
    assert options.num_requests(WORKLOADS["mixed"], concurrency=5) == 20
    assert chosen(rate=2.0).num_requests(WORKLOADS["mixed"]) == 32
    assert chosen(requests=9).num_requests(WORKLOADS["mixed"]) == 9


def test_arms_share_their_chats_and_repeats_do_not() -> None:
    options = chosen()
    assert options.chats("mixed", 8, 0) == options.chats("mixed", 8, 0)
    assert options.chats("mixed", 8, 0) != options.chats("mixed", 8, 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_cache_gib": None}, "say how much each gets with --kv-cache-gib"),
        ({"flags": ("--kv-cache-memory-bytes", "1G")}, "say the same: give one of them"),
        ({"flags": ("--kv_cache_memory_bytes=1G",)}, "say the same: give one of them"),
        ({"flags": ("--port", "1")}, "--port cannot be passed on"),
        ({"flags": ("--served_model_name=x",)}, "--served-model-name cannot be passed on"),
        ({"flags": ("--disable-log-stats",)}, "switches off /metrics"),
        ({"flags": ("--additional-config", "{}")}, "make the stock arm a sieved one"),
        ({"flags": ("--budget", "128")}, "unknown option --budget; did you mean --budgets?"),
        ({"flags": ("extra",)}, "unexpected argument 'extra'"),
        ({"budgets": ","}, "--budgets names none"),
        ({"budgets": "128,abc"}, "'abc' is neither a number of tokens nor a share"),
        ({"budgets": "10"}, "budget 10 is too small: the smallest legal budget is 44"),
        ({"budgets": "128,128 , 0128"}, "--budgets has 'budget-128' twice"),
        ({"policies": "nonsense"}, "policy: "),
        ({"settings": {"prune_options": {"layer": 3}}}, "do nothing while prune is 'none'"),
        ({"workloads": "mixed,mixt"}, "no workload is called 'mixt'; there are long-prompt"),
        ({"workloads": " "}, "--workload names none"),
        ({"concurrency": 1, "rate": 1.0}, "give one of them"),
        ({"scale": 0.0}, "--scale must be a number above 0"),
        ({"rate": float("nan")}, "--rate must be a number above 0"),
        ({"ttft_goal": float("inf")}, "--ttft-goal must be a number above 0"),
        ({"requests": 0}, "--requests must be at least 1"),
        ({"repeats": 0}, "--repeats must be at least 1, or 0 together with --sweep"),
        ({"sweep": True}, "give --ttft-p50 SECONDS"),
        ({"ttft_p50": 1.0}, "give --sweep too"),
        ({"requests": 4, "concurrency": 8}, "give --requests 8 or more"),
        (
            {"requests": 9, "concurrency": 2, "workloads": "multi-turn"},
            None,
        ),
        (
            {"requests": 5, "concurrency": 2, "workloads": "multi-turn"},
            "multi-turn makes 5 of each chat: give --requests 10 or more",
        ),
        (
            {"workloads": "long-prompt", "flags": ("--max-model-len", "300")},
            "long-prompt has requests of 450 tokens at --scale 0.1, and --max-model-len is 300",
        ),
    ],
)
def test_what_cannot_work_is_said(changes: dict[str, Any], said: str | None) -> None:
    if said is None:
        chosen(**changes)
        return
    (reason,) = reasons(**changes)
    assert said in reason


def test_a_switched_off_sieve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIEVE_DISABLE", "1")
    assert any("KVSIEVE_DISABLE is set" in reason for reason in reasons())


def test_a_folder_that_is_missing_is_found_before_the_work(tmp_path: Path) -> None:
    (reason,) = reasons(json_file=tmp_path / "none" / "a.json", html_file=tmp_path)
    assert "does not exist" in reason and "is a folder" in reason


def test_what_is_wrong_with_a_setting_is_said_once() -> None:
    assert len(reasons(settings={"pool_size": 4})) == 1


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ([], None),
        (["--max-model-len", "5"], "5"),
        (["--max_model_len=5"], "5"),
        (["--max-model-len", "5", "--max-model-len=6"], "6"),
        (["--max-model-len"], ""),
        (["--max-model-length", "5"], None),
    ],
)
def test_a_flag_is_found_in_every_spelling(flags: list[str], value: str | None) -> None:
    assert flag_value(flags, "--max-model-len") == value


def command(*words: str) -> Any:
    """What the command says; a `ConfigError` is in `exception`."""
    app = typer.Typer()
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench)
    return CliRunner().invoke(app, list(words))


def test_the_command_says_every_reason_at_once() -> None:
    done = command(
        *("/no/such/model", "--budgets", "1,x", "--workload", "y", "--port", "80"),
        *("--concurency", "3", "--", "--max-model-len", "x"),
    )
    assert isinstance(done.exception, ConfigError)
    said = "\n".join(done.exception.reasons)
    for part in (
        "there is no folder /no/such/model",
        "budget 1 is too small",
        "'x' is neither",
        "no workload is called 'y'",
        "--port cannot be passed on",
        "did you mean --concurrency?",
        "--kv-cache-gib",
    ):
        assert part in said
    assert len(done.exception.reasons) == 7


def test_the_command_needs_a_model() -> None:
    done = command("--budgets", "128")
    assert done.exit_code == 2 and "give the MODEL to serve" in done.output
