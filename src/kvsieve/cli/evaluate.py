"""`kvsieve eval`: what budgets cost in quality, against full KV in the same run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as ConsoleTable

from kvsieve.cli import options
from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError

_TASKS = "niah,niah_essay,second_question,instruction,fidelity,recall"


def evaluate(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Model folder or name.", show_default=False)
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Tasks to ask, separated by commas; 'none' for --data alone.")
    ] = _TASKS,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A file or folder on disk, as FORMAT:PATH with a format of longbench,"
            " infinitebench, mmlu, ruler. May be repeated.",
            show_default=False,
        ),
    ] = None,
    policies: Annotated[
        str, typer.Option(help="Policies to compare, separated by commas.")
    ] = "snapkv",
    budgets: Annotated[
        str, typer.Option(help="Budgets to compare: tokens, or shares such as '25%'.")
    ] = "50%,25%",
    lengths: Annotated[
        str, typer.Option(help="Lengths of generated prompts, in tokens.")
    ] = "1024,2048",
    count: Annotated[
        int, typer.Option(help="Examples per task and length, or per file.", min=1)
    ] = 8,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text for 'fidelity' and 'recall'. Default: a report that comes with kvsieve.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[bool, typer.Option(help="Wrap prompts in the model's chat template.")] = False,
    tolerance: Annotated[
        float, typer.Option(help="Loss of score that you can live with.", min=0.0, max=1.0)
    ] = 0.05,
    base_url: Annotated[
        str | None,
        typer.Option(
            help="A running server of kvsieve to ask, instead of starting some. It needs the"
            " setting forced_tokens for some tasks.",
            show_default=False,
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="Its name for the model. Default: MODEL.", show_default=False),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Prompts from files that are longer lose the middle of their context.",
            min=16,
            show_default=False,
        ),
    ] = None,
    max_answer_tokens: Annotated[
        int | None,
        typer.Option(help="Answers to files are cut at so many tokens.", min=1, show_default=False),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Examples under way at once.", min=1)] = 8,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for journal.jsonl, results.json and report.html. A run that"
            " broke off goes on from its journal."
        ),
    ] = Path("kvsieve-eval"),
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            help="Compare two results.json instead of running anything.", show_default=False
        ),
    ] = None,
    full_layers: options.FullLayers = None,
    observation_window: options.ObservationWindow = None,
    pool_size: options.PoolSize = None,
    pooling: options.Pooling = None,
    num_sink_tokens: options.NumSinkTokens = None,
) -> None:
    """Judge what budgets cost in quality, against full KV over the same prompts.

    Starts a server per policy and asks every example with full KV and with every budget.
    Every option that is not listed here is passed on to `vllm serve`. The key of a running
    server is taken from OPENAI_API_KEY.
    """
    if compare is not None:
        _compare(*compare, out)
        return
    if model is None:
        raise typer.BadParameter("give a MODEL, or two files to --compare")
    options.check_model(model)
    from kvsieve.evals.session import Endpoint, Session, evaluate
    from kvsieve.evals.settings import parse_settings
    from kvsieve.evals.workload import Wanted, check_wanted

    sieve = options.given_settings(context)
    wanted = Wanted(
        tasks=() if tasks == "none" else tuple(_split(tasks)),
        data=tuple(data or ()),
        lengths=_whole_numbers(lengths),
        count=count,
        seed=seed,
        text=text,
        max_prompt_tokens=max_prompt_tokens,
        max_answer_tokens=max_answer_tokens,
    )
    reasons = check_wanted(wanted)
    settings = []
    for check in (
        lambda: SieveConfig.parse(sieve),
        lambda: settings.extend(parse_settings(_split(policies), _split(budgets))),
    ):
        try:
            check()
        except ConfigError as error:
            reasons.extend(error.reasons)
    if base_url is not None:
        if len({setting.policy for setting in settings}) > 1:
            reasons.append("a running server has one policy: give its name alone to --policies")
        if sieve or context.args:
            given = [*sieve, *context.args]
            reasons.append(f"a running server has its settings already: leave out {given[0]}")
    if reasons:
        raise ConfigError(reasons)
    session = Session(
        model=model,
        wanted=wanted,
        settings=settings,
        chat=chat,
        out=out,
        sieve=sieve,
        flags=tuple(context.args),
        endpoint=(
            base_url
            and Endpoint(base_url, served_model_name or model, os.environ.get("OPENAI_API_KEY"))
        )
        or None,
        concurrency=concurrency,
        tolerance=tolerance,
    )
    results = evaluate(session, Console(stderr=True))
    _show(results, out)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole_numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in _split(text))
    except ValueError:
        numbers = (0,)
    if any(number < 1 for number in numbers):
        raise typer.BadParameter(f"--lengths must be whole numbers above 0 (given: {text!r})")
    return numbers


def _show(results: Any, out: Path) -> None:
    from kvsieve.evals.report import distribution_table, page, result_table, summary
    from kvsieve.reports.files import write_report

    console = _console()
    for table in (result_table(results.tasks), distribution_table(results.tasks)):
        if table.rows:
            _print(console, table)
    for sentence in summary(results):
        console.print(sentence, highlight=False, soft_wrap=True)
    html, json_file = out / "report.html", out / "results.json"
    write_report(html, json_file, page=page(results), data=results.model_dump())
    Console(stderr=True).print(f"{html}, {json_file}", highlight=False, soft_wrap=True)


def _compare(before_path: Path, after_path: Path, out: Path) -> None:
    from kvsieve.evals.compare import (
        compare_results,
        comparison_page,
        comparison_table,
        load_results,
        verdict,
    )
    from kvsieve.reports.files import write_report

    before, after = load_results(before_path), load_results(after_path)
    comparison = compare_results(before, after)
    console = _console()
    _print(console, comparison_table(comparison))
    for sentence in verdict(comparison):
        console.print(sentence, highlight=False, soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    html, json_file = out / "comparison.html", out / "comparison.json"
    page = comparison_page(comparison, before, after)
    write_report(html, json_file, page=page, data=comparison.model_dump())
    Console(stderr=True).print(f"{html}, {json_file}", highlight=False, soft_wrap=True)


def _console() -> Console:
    """Stdout, wide enough for the tables where nobody looks at a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def _print(console: Console, table: Any) -> None:
    shown = ConsoleTable(*table.columns, title=table.caption, title_justify="left")
    for row in table.rows:
        shown.add_row(*("" if cell is None else str(cell) for cell in row))
    console.print(shown)
