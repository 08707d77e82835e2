"""A whole evaluation: from what is wanted to results, over servers of its own or a running one."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvsieve.core.errors import ConfigError
from kvsieve.core.treatment import FULL
from kvsieve.evals.item import Item
from kvsieve.evals.journal import Journal
from kvsieve.evals.passages import read_text
from kvsieve.evals.prompts import PromptMaker
from kvsieve.evals.record import Record
from kvsieve.evals.results import EvalResults, summarise
from kvsieve.evals.run import Run
from kvsieve.evals.settings import Setting
from kvsieve.evals.workload import Wanted, make_items
from kvsieve.reports.provenance import provenance
from kvsieve.serving.client import Client, RequestError
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
    run = _run_facts(session, maker, items)
    journal = Journal(session.out, _identity(run, birth))
    policies = list(dict.fromkeys(setting.policy for setting in session.settings))
    for policy in policies:
        settings = [setting for setting in session.settings if setting.policy == policy]
        missing = [item for item in items if not _is_done(journal, item, policy, settings)]
        if not missing:
            console.print(f"{policy}: everything is in the journal already", highlight=False)
            continue
        with _server(session, policy, items, console) as endpoint:
            _ask_all(session, endpoint, maker, journal, policy, settings, missing, console)
    return summarise(
        _records(journal, items, session.settings),
        provenance=birth,
        run=run,
        tolerance=session.tolerance,
        seed=session.wanted.seed,
    )


def _run_facts(session: Session, maker: PromptMaker, items: Sequence[Item]) -> dict[str, Any]:
    wanted = session.wanted
    text = read_text(wanted.text)
    return {
        "model": session.model,
        "prompts": maker.provenance(),
        "stop": {item.task: list(item.example.stop) for item in items if item.example is not None},
        "tasks": list(wanted.tasks),
        "data": list(wanted.data),
        "lengths": list(wanted.lengths),
        "count": wanted.count,
        "seed": wanted.seed,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "settings": [setting.name for setting in session.settings],
        "sieve": dict(session.sieve),
        "flags": list(session.flags),
        "endpoint": session.endpoint and session.endpoint.base_url,
        "longest": max(item.length for item in items),
        "temperature": 0.0,
    }


def _identity(run: Mapping[str, Any], birth: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal for a journal to be gone on with."""
    same = ("model", "chat", "seed", "text_sha256", "sieve", "flags", "endpoint")
    facts = {name: run[name] for name in same if name in run}
    return {
        **facts,
        "template_sha256": run["prompts"]["template_sha256"],
        "versions": birth["versions"],
        "source_sha256": birth["source_sha256"],
    }


def _is_done(journal: Journal, item: Item, policy: str, settings: Sequence[Setting]) -> bool:
    wanted = [FULL, *(setting.kv_budget for setting in settings)]
    return all(journal.get(item.item_id, policy, kv_budget) for kv_budget in wanted)


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


def _ask_all(
    session: Session,
    endpoint: Endpoint,
    maker: PromptMaker,
    journal: Journal,
    policy: str,
    settings: Sequence[Setting],
    items: Sequence[Item],
    console: Console,
) -> None:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeRemainingColumn(),
        console=console,
    )

    async def ask() -> None:
        client = Client(endpoint.base_url, endpoint.model, api_key=endpoint.api_key)
        try:
            await _check(client, items, settings)
            run = Run(client, maker, journal, policy, settings, session.concurrency)
            await run.run(items, lambda count: progress.advance(bar, count))
        finally:
            await client.close()

    with progress:
        bar = progress.add_task(policy, total=len(items) * (1 + len(settings)))
        asyncio.run(ask())


async def _check(client: Client, items: Sequence[Item], settings: Sequence[Setting]) -> None:
    """Ask the shortest prompt once per setting, so that all that is refused is refused now.

    Raises:
        ConfigError: Every refusal.
    """
    shortest = min(items, key=lambda item: item.length)
    forced = [shortest.prompt_ids[-1]] if any(item.forced_ids for item in items) else []
    reasons = []
    for kv_budget in (FULL, *(setting.kv_budget for setting in settings)):
        try:
            await client.complete(
                shortest.prompt_ids, max_tokens=2, kv_budget=kv_budget, forced_tokens=forced
            )
        except RequestError as error:
            if error.status is None:
                raise
            reasons.append(f"kv_budget {kv_budget}: {error}")
    if reasons:
        raise ConfigError(list(dict.fromkeys(reasons)))


def _records(journal: Journal, items: Sequence[Item], settings: Sequence[Setting]) -> list[Record]:
    found = []
    for policy in dict.fromkeys(setting.policy for setting in settings):
        budgets = [s.kv_budget for s in settings if s.policy == policy]
        for kv_budget in (FULL, *budgets):
            for item in items:
                record = journal.get(item.item_id, policy, kv_budget)
                assert record is not None, "the run is complete"
                found.append(record)
    return found
