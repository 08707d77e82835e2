"""`kvsieve eval`: what budgets cost in quality, against full KV in the same run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

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
        str,
        typer.Option(
            help="Tasks to ask, separated by commas; 'none' for --data alone. There are niah,"
            " niah_essay, niah_multikey, niah_multivalue, niah_multiquery, niah_uuid,"
            " variable_tracking, common_words, frequent_words, kv_retrieval, few_shot, multi_turn,"
            " second_question, instruction, fidelity, recall."
        ),
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
        str,
        typer.Option(
            help="Policies to compare, separated by commas; `kvsieve policies` lists them."
        ),
    ] = SieveConfig.model_fields["policy"].default,
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
    num_recent_tokens: options.NumRecentTokens = None,
    num_sink_tokens: options.NumSinkTokens = None,
    layer_budgets: options.LayerBudgets = None,
    max_tiers: options.MaxTiers = None,
    policy_options: options.PolicyOptions = None,
    protect_roles: options.ProtectRoles = None,
    prune: options.Prune = None,
    prune_options: options.PruneOptions = None,
    prune_calibration: options.PruneCalibration = None,
) -> None:
    """Judge what budgets cost in quality, against full KV over the same prompts.

    Starts a server per policy and asks every example with full KV and with every budget.
    Every option that is not listed here is passed on to `vllm serve`. The key of a running
    server is taken from OPENAI_API_KEY.
    """
    if compare is not None:
        _check_nothing_else(context)
        _compare(*compare, out)
        return
    if model is None:
        raise typer.BadParameter("give a MODEL, or two files to --compare")
    from kvsieve.evals.session import Endpoint, Session, evaluate
    from kvsieve.evals.settings import every_setting
    from kvsieve.evals.workload import Wanted, check_wanted

    sieve = options.given_settings(context)
    reasons: list[str] = []
    wanted = Wanted(
        tasks=() if tasks == "none" else tuple(_split(tasks)),
        data=tuple(data or ()),
        lengths=_whole_numbers(lengths, reasons),
        count=count,
        seed=seed,
        text=text,
        max_prompt_tokens=max_prompt_tokens,
        max_answer_tokens=max_answer_tokens,
    )
    reasons += check_wanted(wanted)
    settings = []
    for check in (
        lambda: options.check_model(model),
        lambda: options.check_settings(sieve),
        lambda: settings.extend(every_setting(_split(policies), _split(budgets))),
    ):
        try:
            check()
        except ConfigError as error:
            reasons.extend(error.reasons)
    if base_url is not None:
        if not base_url.startswith(("http://", "https://")):
            reasons.append(f"--base-url must begin with http:// or https:// (given: {base_url!r})")
        if len({setting.policy for setting in settings}) > 1:
            reasons.append("a running server has one policy: give its name alone to --policies")
        given = [f"--{name.replace('_', '-')}" for name in sieve] + _flags(context.args)
        if given:
            reasons.append(
                f"a running server has its settings already: leave out {', '.join(given)}"
            )
    else:
        reasons += _misdirected(context.args)
        if served_model_name is not None:
            reasons.append("--served-model-name is for a running server: give --base-url too")
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


_MISDIRECTED = {
    "--policy": "the policies to compare are given to --policies",
    "--budget": "the budgets to compare are given to --budgets",
    "--mode": "the servers of an evaluation sieve",
    "--tokenizer": "prompts and answers are in the tokens of MODEL's own",
    "--additional-config": "give the sieve's settings as options",
    **dict.fromkeys(
        ("--host", "--port", "--uds", "--api-key", "--model"),
        "an evaluation starts and addresses its servers itself; a running one is given to"
        " --base-url",
    ),
}
"""What `kvsieve serve` would take, and what is to be done instead."""


def _flags(arguments: list[str]) -> list[str]:
    """The names of the options among what is passed on; values without one as they are."""
    named = [part.split("=")[0] for part in arguments if part.startswith("-")]
    return named or arguments


def _misdirected(arguments: list[str]) -> list[str]:
    named = [flag.replace("_", "-") for flag in _flags(arguments)]
    return [f"{flag}: {_MISDIRECTED[flag]}" for flag in named if flag in _MISDIRECTED]


def _check_nothing_else(context: typer.Context) -> None:
    """A comparison runs nothing, so what says how to run would be ignored."""
    given = _flags(context.args) + [
        "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
        for name in context.params
        if name not in ("compare", "out")
        # By its name: Typer brings a click of its own, or uses the installed one.
        and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise ConfigError([f"--compare runs nothing: leave out {', '.join(given)}"])


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole_numbers(text: str, reasons: list[str]) -> tuple[int, ...]:
    parts = _split(text)
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        reasons.append(f"--lengths must be whole numbers above 0 (given: {text!r})")
        return (1,)
    return tuple(map(int, parts))


def _show(results: Any, out: Path) -> None:
    from kvsieve.evals.report import distribution_table, page, result_table, summary
    from kvsieve.reports.files import write_report
    from kvsieve.reports.terminal import output_console, print_table

    console = output_console()
    for table in (result_table(results.tasks), distribution_table(results.tasks)):
        if table.rows:
            print_table(console, table)
    for sentence in summary(results):
        _say(console, sentence)
    html, json_file = out / "report.html", out / "results.json"
    write_report(html, json_file, page=page(results), data=results.model_dump())
    _say(Console(stderr=True), f"{html}, {json_file}")


def _compare(before_path: Path, after_path: Path, out: Path) -> None:
    from kvsieve.evals.compare import (
        compare_results,
        comparison_page,
        comparison_table,
        load_results,
        verdict,
    )
    from kvsieve.reports.files import write_report
    from kvsieve.reports.terminal import output_console, print_table

    before, after = load_results(before_path), load_results(after_path)
    comparison = compare_results(before, after)
    console = output_console()
    print_table(console, comparison_table(comparison))
    for sentence in verdict(comparison):
        _say(console, sentence)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"cannot write in {out}: {error.strerror}"]) from None
    html, json_file = out / "comparison.html", out / "comparison.json"
    page = comparison_page(comparison, before, after)
    write_report(html, json_file, page=page, data=comparison.model_dump())
    _say(Console(stderr=True), f"{html}, {json_file}")


def _say(console: Console, sentence: str) -> None:
    """Print a sentence as it is: brackets in names are no markup."""
    console.print(sentence, highlight=False, markup=False, soft_wrap=True)
