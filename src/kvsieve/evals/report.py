"""The page of an evaluation: which budget to take, and what says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvsieve.evals.passages import PASSAGE_TASKS
from kvsieve.evals.record import Record
from kvsieve.evals.results import EvalResults, Interval, TaskResult, quality
from kvsieve.evals.tasks import TASKS
from kvsieve.reports.figures import (
    Bars,
    Figure,
    Mark,
    Reference,
    Series,
    bar_figure,
    heat_figure,
    trade_off_figure,
)
from kvsieve.reports.page import Section, render_page
from kvsieve.reports.table import Table


def summary(results: EvalResults) -> list[str]:
    """The answer in a few sentences."""
    points = f"{100 * results.tolerance:g} points"
    overall = [result for result in results.of("all") if result.setting != "full"]
    sentences = []
    if results.recommended:
        taken = next(result for result in overall if result.setting == results.recommended)
        sentences.append(
            f"Take {taken.setting}: it is shown to stay within {points} of full KV"
            f" ({_signed(taken.difference)}) and holds {100 * taken.kv_share:.0f}% of its KV"
            f" memory after the prompt ({taken.prompt_tokens:.0f} tokens on average)."
        )
        sentences += _reservations(results, taken)
    elif active := [result for result in overall if result.sieved_share > 0]:
        best = max(active, key=lambda result: result.difference.low if result.difference else -1)
        sentences.append(
            f"No setting is shown to stay within {points} of full KV; the nearest is"
            f" {best.setting} ({_signed(best.difference)}). Larger budgets lose less, and more"
            " examples narrow the intervals (--count)."
        )
    if results.beyond_the_model:
        sentences.append(
            "Full KV is not clearly above the floor on "
            + ", ".join(results.beyond_the_model)
            + ": the model cannot do them, or the examples are too few (--count). They are left"
            " out of what is said of all tasks."
        )
    if not overall:
        sentences.append("No task is left to judge a setting by.")
    idle = list(dict.fromkeys(r.setting for r in overall if r.sieved_share == 0))
    if idle:
        sentences.append(
            f"{', '.join(idle)} sieved nothing: every prompt fits the budget. Take longer prompts"
            " (--lengths) or smaller budgets."
        )
    if cut := sum(r.setting.is_full and "truncated" in r.tags for r in results.records):
        policies = len({record.policy for record in results.records})
        sentences.append(
            f"{cut // policies} prompts from files lost the middle of their context, because they"
            " were longer than --max-prompt-tokens."
        )
    if results.full_answers:
        sentences.append(
            f"Each policy had a server of its own; {results.full_answers - results.disagreeing} of"
            f" {results.full_answers} answers with full KV were the same on all of them."
        )
    return sentences


def _reservations(results: EvalResults, taken: TaskResult) -> list[str]:
    """What the mean over all tasks hides of a setting."""
    sentences = []
    own = [
        (result.difference.value, result)
        for result in results.tasks
        if result.setting == taken.setting
        and result.difference is not None
        and result.task not in ("all", *results.beyond_the_model)
    ]
    worst, result = min(own, key=lambda pair: pair[0])
    if worst < 0 and len(own) > 1:
        sentences.append(
            f"That is the mean over {len(own)} tasks; its largest loss is on {result.task}:"
            f" {_signed(result.difference)}."
        )
    if taken.sieved_share < 1:
        sentences.append(
            f"{1 - taken.sieved_share:.0%} of its requests fit the budget and were not sieved;"
            " prompts that are all longer than it may lose more."
        )
    return sentences


def _signed(interval: Interval | None) -> str:
    assert interval is not None
    value, low, high = (100 * part for part in (interval.value, interval.low, interval.high))
    return f"{value:+.1f} points, 95% interval {low:+.1f} to {high:+.1f}"


def result_table(results: Sequence[TaskResult]) -> Table:
    """Every task under every setting."""
    rows = []
    for result in results:
        difference = result.difference
        rows.append(
            (
                result.task,
                result.setting,
                _per_cent(result.score),
                _per_cent(difference, signed=True) if difference else None,
                f"{100 * result.kv_share:.0f}%",
                f"{100 * result.mass_lost:.1f}%" if result.mass_lost is not None else None,
                f"{result.sieved_share:.0%}",
                result.score.count,
            )
        )
    return Table(
        columns=(
            *("task", "setting", "score, %", "against full KV, points", "KV held"),
            *("attention lost", "requests sieved", "examples"),
        ),
        rows=tuple(rows),
        caption="Scores with 95% intervals; differences are of the same examples. KV held counts"
        " full layers and whole blocks, so it is more than the budget's share.",
    )


def _per_cent(interval: Interval, signed: bool = False) -> str:
    form = "+.1f" if signed else ".1f"
    value, low, high = (100 * part for part in (interval.value, interval.low, interval.high))
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def distribution_table(results: Sequence[TaskResult]) -> Table:
    """Perplexity and divergence of the tasks over real text."""
    rows = tuple(
        (
            result.task,
            result.setting,
            f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
            f"{kl.value:.4f} ({kl.low:.4f} to {kl.high:.4f})",
        )
        for result in results
        if (ratio := result.perplexity_ratio) and (kl := result.kl)
    )
    return Table(
        columns=("task", "setting", "perplexity, times full KV's", "KL from full KV, nats"),
        rows=rows,
        caption="The divergence is a lower bound, from the 20 most probable tokens. Perplexity"
        " alone misleads: keeping only the last tokens looks good by it.",
    )


_SHARES = (2.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 70.0, 100.0)
"""Per cents of KV memory that the axis may name."""


def trade_off(results: EvalResults) -> Figure | None:
    """Quality against memory, for all tasks that the model can do."""
    overall = results.of("all")
    if not overall:
        return None
    shown = [result for result in overall if result.difference is not None]
    series = []
    for policy in dict.fromkeys(result.policy for result in shown):
        points = sorted(
            (result for result in shown if result.policy == policy),
            key=lambda result: result.kv_share,
        )
        changes = [point.difference for point in points if point.difference]
        series.append(
            Series(
                name=policy,
                x=[100 * point.kv_share for point in points],
                y=[100 * change.value for change in changes],
                low=[100 * change.low for change in changes],
                high=[100 * change.high for change in changes],
                labels=[str(point.kv_budget) for point in points],
            )
        )
    within = f"{100 * results.tolerance:g} points"
    taken = next((result for result in shown if result.setting == results.recommended), None)
    return trade_off_figure(
        [*series, Series(name="full KV", x=[100.0], y=[0.0])],
        y_label="score against full KV, points",
        y_range=None,
        x_ticks={
            share: f"{share:g}" for share in _SHARES if share >= 80 * min(r.kv_share for r in shown)
        },
        full=Reference(f"grey band: within {within} of it", 0.0, -100 * results.tolerance, 0.0),
        recommended=Mark(
            f"take {taken.setting}",
            100 * taken.kv_share,
            100 * (taken.difference.value if taken.difference else 0.0),
        )
        if taken
        else None,
        caption=f"A setting is shown to stay within {within} where its whole whisker (the 95%"
        " interval of the paired difference) ends inside the grey band or above it. All tasks that"
        " the model can do, examples counted equally; labels are budgets. Memory is what a request"
        " holds once its prompt is read, full layers and whole blocks included.",
    )


def task_bars(results: EvalResults) -> Figure:
    """Every task under every setting, side by side."""
    tasks = [task for task in dict.fromkeys(r.task for r in results.tasks) if task != "all"]
    settings = list(dict.fromkeys(result.setting for result in results.tasks))
    found = {(result.task, result.setting): result.score for result in results.tasks}
    bars = []
    for setting in settings:
        scores = [found[task, setting] for task in tasks]
        bars.append(
            Bars(
                name=setting,
                values=[100 * score.value for score in scores],
                low=[100 * score.low for score in scores],
                high=[100 * score.high for score in scores],
            )
        )
    return bar_figure(tasks, bars, value_label="score, %", value_range=(0.0, 100.0))


def heat_maps(records: Sequence[Record]) -> Iterator[Figure]:
    """Maps of where in the prompt answers are lost, for every task with needles at depths.

    With several lengths, depth against length for each setting; with one, depth against
    setting.
    """
    deep = [record for record in records if "depth" in record.tags]
    for task in dict.fromkeys(record.task for record in deep):
        of_task = [record for record in deep if record.task == task]
        if len({_length(record) for record in of_task}) == 1:
            maps = [(task, of_task, "setting", _setting_name)]
        else:
            names = dict.fromkeys(map(_setting_name, of_task))
            maps = [
                (
                    f"{task}, {name}",
                    [record for record in of_task if _setting_name(record) == name],
                    "length of the prompt, tokens",
                    _length,
                )
                for name in names
            ]
        for title, shown, column_label, column_of in maps:
            figure = _heat_map(title, shown, column_label, column_of)
            if figure:
                yield figure


def _setting_name(record: Record) -> str:
    return record.setting.name


def _length(record: Record) -> str:
    return f"{int(record.tags.get('length', record.prompt_tokens)):,}"


def _heat_map(
    title: str, records: Sequence[Record], column_label: str, column_of: Callable[[Record], str]
) -> Figure | None:
    cells: dict[tuple[float, str], list[float]] = {}
    for record in records:
        # Depths fall on a grid of tenths, so that columns share rows.
        depth = round(10 * float(record.tags["depth"])) / 10
        cells.setdefault((depth, column_of(record)), []).append(quality(record))
    depths = sorted({depth for depth, _ in cells})
    columns = list(dict.fromkeys(column for _, column in cells))
    if len(depths) < 2:
        return None
    values = [
        [
            sum(found) / len(found) if (found := cells.get((depth, column))) else None
            for column in columns
        ]
        for depth in depths
    ]
    return heat_figure(
        values,
        row_labels=[f"{depth:.0%}" for depth in depths],
        column_labels=columns,
        row_label="depth of the needle",
        column_label=column_label,
        title=title,
        value_label="score",
    )


def task_table(results: EvalResults) -> Table:
    """What the tasks ask."""
    rows = []
    for name in dict.fromkeys(result.task for result in results.tasks if result.task != "all"):
        task = TASKS.get(name) or PASSAGE_TASKS.get(name)
        title = task.title if task else "from a file"
        can = "no" if name in results.beyond_the_model else "yes"
        floor = results.floors.get(name)
        # Continuations are judged by agreement, which full KV has by definition.
        shown = None if floor is None else f"{100 * floor:.0f}%"
        rows.append((name, title, shown, can))
    return Table(
        columns=("task", "what it asks of the cache", "floor", "full KV is clearly above it"),
        rows=tuple(rows),
        caption="The floor is what an answer scores that has not read the context: by chance, or"
        " on a text's next token as full KV guesses it where it has not read the text before.",
    )


def page(results: EvalResults) -> str:
    """The whole page, one HTML file."""
    overview = trade_off(results)
    run = results.run
    template = "the model's chat template" if run["prompts"]["chat"] else "no chat template"
    sections = [
        Section(
            "Which budget?",
            f"{run['model']}, {template}, greedy. Every example was asked with full KV and under"
            " every setting of a policy by one server, over the same API.",
            figures=(overview,) if overview else (),
            tables=(result_table(results.of("all")),) if overview else (),
        ),
        Section(
            "Task by task",
            figures=(task_bars(results),),
            tables=(
                result_table([result for result in results.tasks if result.task != "all"]),
                task_table(results),
            ),
        ),
    ]
    distributions = distribution_table(results.tasks)
    if distributions.rows:
        sections.append(Section("The distribution itself", tables=(distributions,)))
    maps = tuple(heat_maps(results.records))
    if maps:
        sections.append(Section("Where in the prompt", figures=maps))
    provenance = {**results.provenance, "run": run}
    return render_page(
        f"Evaluation of {Path(run['model']).name}",
        summary=summary(results),
        sections=sections,
        provenance=provenance,
    )
