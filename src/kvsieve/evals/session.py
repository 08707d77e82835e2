"""A whole evaluation: from what is wanted to results, over servers of its own or a running one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvsieve.core.errors import ConfigError, KvsieveError
from kvsieve.core.treatment import FULL
from kvsieve.evals.identity import identity, run_facts
from kvsieve.evals.item import Item
from kvsieve.evals.journal import Journal
from kvsieve.evals.precheck import check_server
from kvsieve.evals.prompts import PromptMaker
from kvsieve.evals.record import Record
from kvsieve.evals.results import EvalResults, summarise
from kvsieve.evals.run import Run
from kvsieve.evals.settings import Setting
from kvsieve.evals.workload import Wanted, floors, make_items
from kvsieve.reports.provenance import provenance, without_secrets
from kvsieve.serving.client import Client
from kvsieve.serving.server import ServerSpec, running


@dataclass(frozen=True)
class Endpoint:
    """A server that runs already.

    Attributes:
        base_url: Root of its API.
        model: Name under which it serves the model.
        api_key: Its key, if it wants one.
    """

    base_url: str
    model: str
    api_key: str | None = None


@dataclass(frozen=True)
class Session:
    """What an evaluation needs to know.

    Attributes:
        model: Model folder or name; its tokenizer makes the prompts.
        wanted: What is asked.
        settings: Policies and budgets; of a running server its own policy only.
        chat: Whether prompts are wrapped in the chat template.
        sieve: Further settings of the sieve for servers of our own, by field.
        flags: Further flags of `vllm serve` for servers of our own.
        endpoint: The running server; None to start servers.
        concurrency: Items under way at once.
        tolerance: Loss of score that the user can live with.
        out: Folder of the journal.
    """

    model: str
    wanted: Wanted
    settings: Sequence[Setting]
    chat: bool
    out: Path
    sieve: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    endpoint: Endpoint | None = None
    concurrency: int = 8
    tolerance: float = 0.05


def evaluate(session: Session, console: Console) -> EvalResults:
    """Run an evaluation, or the rest of one that broke off.

    Args:
        session: What to do.
        console: Where progress is shown; a console on stderr.

    Raises:
        ConfigError: Something that was asked for cannot be.
        ServerError: A server did not start, or ended.
        RequestError: A server refused a request.
        ProofError: A server did not show that it did what was asked.
    """
    birth = provenance(seed=session.wanted.seed)
    maker = PromptMaker(session.model, session.chat)
    with console.status("Making the prompts"):
        items = make_items(session.wanted, maker)
    _check_budgets(session.settings, items)
    run = _run_facts(session, maker, items)
    with Journal(session.out, identity(run, birth)) as journal:
        try:
            for policy in dict.fromkeys(setting.policy for setting in session.settings):
                _judge_policy(session, policy, maker, journal, items, console)
        except (KeyboardInterrupt, SystemExit, KvsieveError):
            if len(journal):
                console.print(
                    f"{len(journal)} answers are in {journal.path}: the same command goes on from"
                    " there.",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )
            raise
        records = _records(journal, items, session.settings)
    return summarise(
        records,
        provenance=birth,
        run=run,
        tolerance=session.tolerance,
        floors=floors(items),
        seed=session.wanted.seed,
    )


def _check_budgets(settings: Sequence[Setting], items: Sequence[Item]) -> None:
    """Refuse budgets that every prompt fits: they would be judged as if they cost nothing.

    Raises:
        ConfigError: Every such budget.
    """
    longest = max(len(item.prompt_ids) for item in items)
    idle = [one.kv_budget for one in settings if _as_tokens(one.kv_budget) >= longest]
    if idle:
        named = ", ".join(map(str, dict.fromkeys(idle)))
        reason = f"nothing would be sieved to {named} tokens: the longest prompt has {longest}"
        raise ConfigError([f"{reason}; give smaller budgets or longer prompts (--lengths)"])


def _as_tokens(kv_budget: int | str) -> int:
    """A budget in tokens; 0 for a share, which every prompt is longer than."""
    return kv_budget if isinstance(kv_budget, int) else 0


def _judge_policy(
    session: Session,
    policy: str,
    maker: PromptMaker,
    journal: Journal,
    items: Sequence[Item],
    console: Console,
) -> None:
    settings = [setting for setting in session.settings if setting.policy == policy]
    missing = [item for item in items if not _is_done(journal, item, policy, settings)]
    if not missing:
        console.print(
            f"{policy}: every answer is in {journal.path} already, and nothing is asked.",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return
    with _server(session, policy, items, console) as endpoint:
        client = Client(endpoint.base_url, endpoint.model, api_key=endpoint.api_key)
        run = Run(client, maker, journal, policy, settings, session.concurrency)
        _ask_all(run, items, missing, console)


def _run_facts(session: Session, maker: PromptMaker, items: Sequence[Item]) -> dict[str, Any]:
    # These are published: a flag may hold a key, and a URL a password.
    endpoint = without_secrets([session.endpoint.base_url])[0] if session.endpoint else None
    return {
        **run_facts(session.model, session.wanted, session.settings, maker, items),
        "sieve": dict(session.sieve),
        "flags": without_secrets(session.flags),
        "endpoint": endpoint,
    }


def _is_done(journal: Journal, item: Item, policy: str, settings: Sequence[Setting]) -> bool:
    wanted = [FULL, *(setting.kv_budget for setting in settings)]
    return all(journal.get(item, policy, kv_budget) for kv_budget in wanted)


@contextmanager
def _server(
    session: Session, policy: str, items: Sequence[Item], console: Console
) -> Iterator[Endpoint]:
    """The running server, or one of our own with this policy."""
    if session.endpoint is not None:
        yield session.endpoint
        return
    flags = list(session.flags)
    if not any(flag.split("=")[0] in ("--max-model-len", "--max_model_len") for flag in flags):
        flags += ["--max-model-len", str(max(item.length for item in items))]
    flags += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    spec = ServerSpec(
        name=policy.replace("_", "-"),
        model=session.model,
        settings={**session.sieve, "policy": policy, "forced_tokens": True},
        flags=tuple(flags),
    )
    with running(spec, console=console) as server:
        yield Endpoint(server.url, server.served_name)


def _ask_all(run: Run, items: Sequence[Item], missing: Sequence[Item], console: Console) -> None:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeRemainingColumn(),
        console=console,
    )

    async def ask() -> None:
        try:
            await check_server(run, items, missing)
            await run.run(missing, lambda count: progress.advance(bar, count))
        finally:
            await run.client.close()

    with progress:
        bar = progress.add_task(run.policy, total=len(missing) * (1 + len(run.settings)))
        asyncio.run(ask())


def _records(journal: Journal, items: Sequence[Item], settings: Sequence[Setting]) -> list[Record]:
    found = []
    for policy in dict.fromkeys(setting.policy for setting in settings):
        budgets = [s.kv_budget for s in settings if s.policy == policy]
        for kv_budget in (FULL, *budgets):
            for item in items:
                record = journal.get(item, policy, kv_budget)
                assert record is not None, "the run is complete"
                found.append(record)
    return found
