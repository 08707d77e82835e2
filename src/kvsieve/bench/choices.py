"""From the command line to `Options`: everything that cannot work is said at once."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsieve.bench.options import STOCK, Arm, Goals, Load, Options, SweepPlan
from kvsieve.bench.workload import WORKLOADS
from kvsieve.core.errors import ConfigError, KvsieveError
from kvsieve.engine.activation import is_disabled
from kvsieve.policies import parse_settings
from kvsieve.pruning import pruning_from_config
from kvsieve.reports.page import check_report_files

DEFAULT_CONCURRENCY = 8

# vLLM's block size where none is given: ours on CPUs, vLLM's on GPUs.
CPU_BLOCK_SIZE, GPU_BLOCK_SIZE = 32, 16

MEMORY_FLAG = "--kv-cache-memory-bytes"
CACHE_FLAG = "--enable-prompt-tokens-details"
"""Makes vLLM say with each response how much of its prompt the prefix cache had."""

_REFUSED_FLAGS = {
    **dict.fromkeys(
        ("--host", "--port", "--uds", "--api-key", "--served-model-name", "--model"),
        "the benchmark starts and addresses its servers itself: leave it out",
    ),
    "--disable-log-stats": "it switches off /metrics, which the benchmark reads: leave it out",
    "--additional-config": "it would make the stock arm a sieved one: use the sieve's own options",
    "--data-parallel-size": "/metrics of several engines cannot be told apart: leave it out",
}


@dataclass(frozen=True)
class Choices:
    """The command line as it was given; see the options' help texts."""

    model: str
    budgets: str
    policies: str | None
    settings: Mapping[str, Any]
    workloads: str
    scale: float
    concurrency: int | None
    rate: float | None
    requests: int | None
    repeats: int
    seed: int
    ttft_goal: float | None
    tpot_goal: float | None
    sweep: bool
    ttft_p50: float | None
    sweep_limit: int
    one_at_a_time: bool | None
    kv_cache_gib: float | None
    json_file: Path | None
    html_file: Path | None
    flags: Sequence[str] = ()


def choose(given: Choices, *, num_gpus: int, own_options: Collection[str] = ()) -> Options:
    """The benchmark that was asked for.

    Args:
        given: The command line.
        num_gpus: GPUs of this machine.
        own_options: Options of the command, to tell a misspelled one from a flag of vLLM.

    Raises:
        ConfigError: Every reason why it cannot run.
    """
    reasons: list[str] = []
    flags = list(given.flags)
    reasons += _flag_problems(flags, own_options)
    one_at_a_time = bool(num_gpus) if given.one_at_a_time is None else given.one_at_a_time
    reasons += _memory_problems(given, flags, one_at_a_time)
    if given.kv_cache_gib is not None:
        flags += [MEMORY_FLAG, str(int(given.kv_cache_gib * 2**30))]
    if not any(_plain(word) == CACHE_FLAG for word in flags):
        flags.append(CACHE_FLAG)
    arms = _arms(given, flags, num_gpus, reasons)
    workloads = _words(given.workloads)
    unknown = [name for name in workloads if name not in WORKLOADS]
    reasons += [
        f"no workload is called {name!r}; there are {', '.join(WORKLOADS)}" for name in unknown
    ]
    if not workloads:
        reasons.append(f"--workload names none; there are {', '.join(WORKLOADS)}")
    reasons += _load_problems(given)
    reasons += _report_problems(given)
    concurrency = given.concurrency
    if concurrency is None and given.rate is None:
        concurrency = DEFAULT_CONCURRENCY
    options = Options(
        model=given.model,
        arms=arms,
        workloads=workloads,
        scale=given.scale,
        load=Load(concurrency, given.rate),
        requests=given.requests,
        repeats=given.repeats,
        seed=given.seed,
        goals=Goals(given.ttft_goal, given.tpot_goal),
        sweep=SweepPlan(given.ttft_p50, given.sweep_limit)
        if given.sweep and given.ttft_p50
        else None,
        one_at_a_time=one_at_a_time,
        gpus=_gpus_of_a_server(flags) if num_gpus else 0,
        flags=tuple(flags),
        json_file=given.json_file,
        html_file=given.html_file,
    )
    if not unknown and not reasons:
        reasons += _size_problems(options)
    if reasons:
        raise ConfigError(reasons)
    return options


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """The value of a flag of `vllm serve`, in any of its spellings; None if it is not given.

    Args:
        flags: The flags.
        name: The flag with dashes, such as "--max-model-len".
    """
    value = None
    for index, word in enumerate(flags):
        flag, equals, after = word.partition("=")
        if _plain(flag) == name:
            following = flags[index + 1] if index + 1 < len(flags) else ""
            value = after if equals else following
    return value


def _plain(flag: str) -> str:
    return "--" + flag[2:].replace("_", "-") if flag.startswith("--") else flag


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _flag_problems(flags: Sequence[str], own_options: Collection[str]) -> list[str]:
    reasons = []
    for word in flags:
        flag = _plain(word.partition("=")[0])
        if not flag.startswith("--"):
            continue
        if flag in _REFUSED_FLAGS:
            reasons.append(f"{flag} cannot be passed on to vLLM: {_REFUSED_FLAGS[flag]}")
        elif near := difflib.get_close_matches(flag, own_options, n=1, cutoff=0.86):
            # Else vLLM would say so, half a minute later and in its log.
            reasons.append(f"unknown option {flag}; did you mean {near[0]}?")
    if flags and not flags[0].startswith("-"):
        reasons.append(f"unexpected argument {flags[0]!r}; flags of `vllm serve` begin with '--'")
    return reasons


def _memory_problems(given: Choices, flags: Sequence[str], one_at_a_time: bool) -> list[str]:
    has_flag = flag_value(flags, MEMORY_FLAG) is not None
    if has_flag and given.kv_cache_gib is not None:
        return [f"--kv-cache-gib and {MEMORY_FLAG} say the same: give one of them"]
    if not has_flag and given.kv_cache_gib is None and not one_at_a_time:
        return [
            "all servers are alive at once, and each would take nearly all memory for its KV"
            " cache: say how much each gets with --kv-cache-gib, or give --one-at-a-time"
        ]
    return []


def _arms(
    given: Choices, flags: Sequence[str], num_gpus: int, reasons: list[str]
) -> tuple[Arm, ...]:
    budgets = _words(given.budgets)
    if not budgets:
        reasons.append("--budgets names none: give tokens or shares, such as 256,25%")
    if is_disabled():
        reasons.append("KVSIEVE_DISABLE is set, which makes every arm a stock one: unset it")
    policies: tuple[str | None, ...] = _words(given.policies or "") or (None,)
    text = flag_value(flags, "--block-size") or ""
    default = GPU_BLOCK_SIZE if num_gpus else CPU_BLOCK_SIZE
    block_size = int(text) if text.isdecimal() else default
    arms = [Arm(STOCK, None)]
    found: list[str] = []
    for policy in policies:
        for budget in budgets:
            settings = {**given.settings, "budget": budget}
            if policy is not None:
                settings["policy"] = policy
            prefix = "budget" if len(policies) == 1 else policy
            try:
                config = parse_settings(settings)
                config.budget_rule(block_size)
                pruning_from_config(config)
            except ConfigError as error:
                found += error.reasons
                continue
            arms.append(Arm(f"{prefix}-{config.budget}", settings))
    # What is wrong with one setting is wrong with it in every arm.
    reasons += dict.fromkeys(found)
    names = [arm.name for arm in arms]
    reasons += [
        f"--budgets has {name!r} twice" for name in {n for n in names if names.count(n) > 1}
    ]
    return tuple(arms)


def _load_problems(given: Choices) -> list[str]:
    reasons = []
    if given.concurrency is not None and given.rate is not None:
        reasons.append("--concurrency is a closed loop and --rate an open one: give one of them")
    for option, value in (
        ("--scale", given.scale),
        ("--rate", given.rate),
        ("--ttft-goal", given.ttft_goal),
        ("--tpot-goal", given.tpot_goal),
        ("--ttft-p50", given.ttft_p50),
    ):
        # `not >` also catches what is not a number.
        if value is not None and not 0 < value < float("inf"):
            reasons.append(f"{option} must be a number above 0 (given: {value})")
    for option, count in (
        ("--concurrency", given.concurrency),
        ("--requests", given.requests),
        ("--sweep-limit", given.sweep_limit),
    ):
        if count is not None and count < 1:
            reasons.append(f"{option} must be at least 1 (given: {count})")
    if given.repeats < (0 if given.sweep else 1):
        reasons.append(
            f"--repeats must be at least 1, or 0 together with --sweep (given: {given.repeats})"
        )
    if given.sweep and given.ttft_p50 is None:
        reasons.append("--sweep needs the bound to keep: give --ttft-p50 SECONDS")
    if given.ttft_p50 is not None and not given.sweep:
        reasons.append("--ttft-p50 is the bound of a sweep: give --sweep too, or use --ttft-goal")
    return reasons


def _report_problems(given: Choices) -> list[str]:
    reasons = []
    try:
        check_report_files(given.html_file, given.json_file)
    except KvsieveError as error:
        reasons.append(str(error))
    missing = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if given.html_file is not None and missing:
        reasons.append(
            f"--html needs {' and '.join(missing)}, which is not installed: install"
            " 'kvsieve[eval]', or leave out --html (--json keeps everything)"
        )
    return reasons


def _size_problems(options: Options) -> list[str]:
    reasons = []
    text = flag_value(options.flags, "--max-model-len") or ""
    longest = int(text) if text.isdecimal() else None
    for name in options.workloads:
        workload = WORKLOADS[name]
        requests = options.num_requests(workload)
        clients = options.load.concurrency
        chats = -(-requests // workload.turns)
        if clients is not None and chats < clients and options.repeats:
            each = f", and {name} makes {workload.turns} of each chat" if workload.turns > 1 else ""
            reasons.append(
                f"{requests} requests never keep {clients} clients busy{each}: give --requests"
                f" {clients * workload.turns} or more"
            )
        needed = max(
            chat.context_tokens
            for repeat in range(max(options.repeats, 1))
            for chat in options.chats(name, requests, repeat)
        )
        if longest is not None and needed > longest:
            reasons.append(
                f"{name} has requests of {needed} tokens at --scale {options.scale:g}, and"
                f" --max-model-len is {longest}: raise it, or lower --scale"
            )
    return reasons


def _gpus_of_a_server(flags: Sequence[str]) -> int:
    count = 1
    for name in ("--tensor-parallel-size", "--pipeline-parallel-size"):
        text = flag_value(flags, name) or ""
        count *= int(text) if text.isdecimal() else 1
    return count


def visible_gpus() -> int:
    """GPUs that a server could use.

    Imported here: torch takes seconds, which a wrong command line should not cost.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    import torch

    return torch.cuda.device_count()
