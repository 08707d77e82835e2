"""What an inspection says: the sentences, the terminal's output and the page of `--html`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from kvsieve.core.notation import layer_list
from kvsieve.inspect import figures, tables
from kvsieve.inspect.recommend import as_shell, serve_command
from kvsieve.inspect.run import Inspection, PromptFindings
from kvsieve.inspect.tables import last_queries, percent
from kvsieve.policies import find_method
from kvsieve.reports.page import Section, render_page
from kvsieve.reports.terminal import print_table

PROXY = (
    "Attention mass lost is a proxy. It says how much of the last queries' attention went to"
    " tokens that would be dropped, not what that does to an answer: run `kvsieve eval` with the"
    " plan before you trust it."
)
CONCENTRATION = (
    "How many tokens hold 90, 95 and 99% of the attention, per head, of the prompt's last queries"
    " together, and of queries spread over the whole prompt together. Where few tokens hold it a"
    " small budget can lose little; all queries together always need more, because each looks at"
    " its own neighbourhood."
)
ACTIVATIONS = (
    "A few entries of the hidden state can be a thousand times larger than the rest. They sit on"
    " few tokens, often the first one and delimiters, and heads that have nothing to say put their"
    " attention there (attention sinks). Dropping such a token ruins the text"
)
STABILITY = (
    "ASL prunes a prompt at the first layer where the ranks of its best tokens have settled:"
    " where their variance over the last layers has fallen below tau times that at l_min. The"
    " ranks must first be at their most unsettled: an l_min before the peak measures the wrong"
    " fall, and l_min cannot be scaled from another model by depth. Take the peak that several"
    " prompts of your own show."
)


def headline(inspection: Inspection) -> list[str]:
    """The sentences that answer: which plan, what it loses and holds."""
    recommendation, bounds = inspection.recommendation, inspection.settings.bounds
    best = recommendation.best
    asked = f"a mean loss of {percent(bounds.mean, 2)} of the attention"
    if bounds.worst is not None:
        asked += f" and {percent(bounds.worst, 2)} in the worst layer"
    if best is None:
        shortest = inspection.budgets[0]
        return [
            "There is nothing to recommend: no plan would hold less than the full cache, because"
            f" the prompts are hardly longer than the smallest budget of {shortest} tokens. Give"
            " longer prompts."
        ]
    plan = (
        f"a budget of {best.budget:,} tokens with"
        f" {_layers_full(inspection)} loses {percent(best.mean_loss, 2)} of the attention (mean"
        f" over the sieved layers; worst layer {percent(best.worst_loss, 2)}) and holds"
        f" {percent(best.kv_share)} of the full KV memory once a prompt is read"
    )
    if recommendation.is_within:
        return [f"For {asked}: {plan}.", PROXY]
    return [f"No plan stays within {asked}. The one that loses least: {plan}.", PROXY]


def _layers_full(inspection: Inspection) -> str:
    best = inspection.recommendation.best
    assert best is not None
    full = best.plan.full
    if not full:
        return "no full layer"
    return f"layer{'s' if len(full) > 1 else ''} {layer_list(full)} full"


def command(inspection: Inspection) -> str | None:
    """The command that serves the plan; None if there is none."""
    best = inspection.recommendation.best
    if best is None:
        return None
    settings = inspection.settings
    return as_shell(serve_command(inspection.model, best, settings.config, settings.block_size))


def policy_words(inspection: Inspection) -> str:
    """What decides which tokens the plan keeps, in two sentences."""
    config = inspection.settings.config
    method = find_method(config.policy)
    queries = last_queries(config.observation_window)
    if method.sees_question:
        return (
            f"The plan is for the policy {method.name}. What it keeps is decided by the prompt's"
            f" {queries}, so inspect prompts that end as yours will, with the question."
        )
    return (
        f"The plan is for the policy {method.name}. What it keeps is not decided by the prompt's"
        f" {queries} alone. They measure what is lost, though, which favours policies that rank by"
        " them."
    )


def notes(inspection: Inspection) -> list[str]:
    """What a reader must know to read the figures rightly."""
    found = [policy_words(inspection)]
    if inspection.settings.config.layer_budgets != "uniform":
        found.append(
            "Plans with the same budget in every sieved layer are compared; layer_budgets, as"
            f" {inspection.settings.config.policy} is configured, would spread it unevenly."
        )
    if inspection.survey.untouched:
        found.append(
            f"Layers {layer_list(inspection.survey.untouched)} have a sliding window: they are not"
            " sieved and left out here; in the memory they count as if they kept everything."
        )
    if best := inspection.recommendation.best:
        short = [
            one.reading.prompt.name
            for one in inspection.prompts
            if one.reading.num_tokens <= best.budget
        ]
        if short:
            found.append(f"Prompts that fit the budget and lose nothing: {', '.join(short)}.")
    lengths = [one.reading.num_tokens for one in inspection.prompts]
    if max(lengths) > 1.5 * min(lengths):
        found.append(
            "The prompts differ in length, and one number of tokens has to serve the longest:"
            " shorter ones could do with less (`kv_budget` of a request)."
        )
    found.append(
        f"Read with {inspection.dtype} on {inspection.device}; beyond the model's own pass that"
        f" took at most {inspection.scratch_bytes / 2**20:,.0f} MiB for attention."
    )
    return found


def sink_words(inspection: Inspection) -> str:
    """What the policy does about attention sinks: the rest of `ACTIVATIONS`'s last sentence."""
    sinks = inspection.settings.config.num_sink_tokens
    if not sinks:
        return "; no first token is forced to stay here (num_sink_tokens is 0)."
    which = "token is" if sinks == 1 else f"{sinks} tokens are"
    return f", which is why the first {which} always kept (num_sink_tokens)."


def activation_words(findings: PromptFindings) -> str:
    """What the massive activations are, in a sentence."""
    massive = [one for one in findings.reading.activations if one.num_massive]
    if not massive:
        return "No activation of this prompt is massive by the definition; the largest are shown."
    positions = sorted({p for one in massive for p in one.massive_positions})
    dimensions = sorted(
        {entry.dimension for one in massive for entry in one.top[: one.num_massive]}
    )
    layers = [one.layer for one in massive]
    where = "the first token" if positions == [0] else f"{len(positions)} tokens"
    return (
        f"Massive activations sit on {where}, in {len(dimensions)} dimension"
        f"{'' if len(dimensions) == 1 else 's'} ({', '.join(map(str, dimensions[:8]))}), after"
        f" layers {layer_list(layers)}."
    )


def stability_words(inspection: Inspection, findings: PromptFindings) -> str:
    """Which layer ASL would pick, in a sentence or three."""
    one = findings.stability

    def layer(number: int | None) -> str:
        return "no layer" if number is None else f"layer {number}"

    words = (
        f"The variance peaks at layer {one.peak}; with l_min there ASL picks"
        f" {layer(one.picked_from_peak)}. With l_min {one.l_min} it picks {layer(one.picked)}."
    )
    if one.l_min < one.peak:
        words += (
            f" Beware: l_min {one.l_min} lies before the peak, so that pick is an artefact; use"
            f" --l-min {inspection.calibrated_l_min}."
        )
    if one.num_ranked > 0.1 * findings.reading.num_tokens:
        words += " tau says little for so large a share of selected tokens."
    return words


def print_inspection(console: Console, inspection: Inspection) -> None:
    """Everything, for a terminal."""
    for one in inspection.prompts:
        name = one.reading.prompt.name
        console.rule(f"{name}: {one.reading.num_tokens:,} tokens")
        print_table(console, tables.concentration_table(inspection, one))
        print_table(console, tables.activations_table(one))
        console.print(activation_words(one), highlight=False)
        print_table(console, tables.kinds_table(one))
        print_table(console, tables.stability_table(one))
        console.print(stability_words(inspection, one), highlight=False)
    console.rule("Recommended plan")
    for table in (tables.plan_table(inspection), tables.losses_table(inspection)):
        if table is not None:
            print_table(console, table)
    for note in notes(inspection):
        console.print(f"[yellow]note:[/yellow] {note}", highlight=False)
    for sentence in headline(inspection):
        console.print(sentence, highlight=False)
    if line := command(inspection):
        console.print(Text(line, style="bold"), soft_wrap=True)


def inspection_page(inspection: Inspection, provenance: Mapping[str, Any]) -> str:
    """The page, as HTML.

    Args:
        inspection: What was found.
        provenance: Where it comes from.

    Raises:
        KvsieveError: matplotlib is not installed.
    """
    summary = headline(inspection)
    if line := command(inspection):
        summary.insert(1, line)
    plan_figures = [figures.loss_figure(inspection), figures.layer_loss_figure(inspection)]
    plan_tables = [tables.plan_table(inspection), tables.losses_table(inspection)]
    sections = [
        Section(
            "Recommended plan",
            text="\n\n".join(notes(inspection)),
            figures=tuple(figure for figure in plan_figures if figure is not None),
            tables=tuple(table for table in plan_tables if table is not None),
        )
    ]
    for one in inspection.prompts:
        sections += _prompt_sections(inspection, one)
    return render_page(
        f"What {inspection.model.rstrip('/').rsplit('/', 1)[-1]} attends to",
        summary=summary,
        sections=sections,
        provenance=provenance,
    )


def _prompt_sections(inspection: Inspection, findings: PromptFindings) -> list[Section]:
    suffix = ""
    if len(inspection.prompts) > 1:
        suffix = f": {findings.reading.prompt.name}"
    return [
        Section(
            f"Attention concentration{suffix}",
            CONCENTRATION,
            (figures.concentration_figure(inspection, findings),),
            (tables.concentration_table(inspection, findings),),
        ),
        Section(
            f"Massive activations{suffix}",
            f"{ACTIVATIONS}{sink_words(inspection)}\n\n{activation_words(findings)}",
            (figures.activations_figure(findings),),
            (tables.activations_table(findings), tables.kinds_table(findings)),
        ),
        Section(
            f"Rank stability across layers{suffix}",
            f"{STABILITY}\n\n{stability_words(inspection, findings)}",
            (figures.stability_figure(findings),),
            (tables.stability_table(findings),),
        ),
    ]
