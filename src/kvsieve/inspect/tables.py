"""The tables of an inspection, for the terminal and for the page alike."""

from __future__ import annotations

from kvsieve.core.notation import layer_list
from kvsieve.inspect.concentration import MASS_SHARES, HeadSpread
from kvsieve.inspect.facts import attention_of, kind_shares, predicted_loss
from kvsieve.inspect.prompt import printable
from kvsieve.inspect.run import Inspection, PromptFindings
from kvsieve.reports.page import Table

KIND_NAMES = {
    "first": "first token",
    "special": "special token",
    "newline": "newline",
    "delimiter": "delimiter",
    "digit": "digits",
    "space": "blank",
    "word": "word",
}


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage."""
    return f"{100 * share:.{digits}f}%"


def last_queries(count: int) -> str:
    """So many queries at the end of a prompt, in words."""
    return "last query" if count == 1 else f"last {count} queries"


def concentration_table(inspection: Inspection, findings: PromptFindings) -> Table:
    """Tokens that hold most of the attention, per layer."""
    reading = findings.reading
    tokens = reading.num_tokens

    def cell(spread: HeadSpread) -> str:
        return f"{spread.mean:,.0f} \u00b1 {spread.std:,.0f}"

    last = MASS_SHARES[-1]
    return Table(
        columns=(
            "layer",
            *(f"{share:.0%} of mass" for share in MASS_SHARES),
            f"{last:.0%}, of prompt",
            f"{last:.0%}, heads",
            *(f"all queries, {share:.0%}" for share in MASS_SHARES[:2]),
        ),
        rows=tuple(
            (
                layer,
                *(cell(window[share]) for share in MASS_SHARES),
                percent(window[last].mean / tokens, 0),
                f"{window[last].min:,} to {window[last].max:,}",
                *(cell(sampled[share]) for share in MASS_SHARES[:2]),
            )
            for layer, window, sampled in zip(
                inspection.survey.layers, reading.window, reading.sampled, strict=True
            )
        ),
        caption="Tokens that hold the attention mass of the"
        f" {last_queries(inspection.settings.config.observation_window)}, of {tokens:,}"
        " (mean \u00b1 standard deviation over the heads)",
    )


def activations_table(findings: PromptFindings) -> Table:
    """Tokens with the largest activations."""
    reading = findings.reading
    rows = []
    for token in findings.tokens:
        mean, largest = attention_of(reading, token.position)
        layers = layer_list(token.massive_layers) if token.is_massive else "not massive"
        rows.append(
            (
                token.position,
                printable(reading.prompt.texts[token.position]),
                KIND_NAMES[reading.prompt.kinds[token.position]],
                layers,
                f"{token.peak:,.0f}",
                f"{token.peak_ratio:,.0f}",
                token.peak_layer,
                percent(mean, 2),
                percent(largest, 2),
            )
        )
    return Table(
        columns=(
            "position",
            "token",
            "kind",
            "massive after layers",
            "largest |value|",
            "x median",
            "at layer",
            "attention, mean",
            "attention, most",
        ),
        rows=tuple(rows),
        caption="Tokens with the largest activations, and the share of the last queries'"
        " attention that each gets (mean over layers, and in the layer that gives most)",
    )


def kinds_table(findings: PromptFindings) -> Table:
    """Attention by kind of token."""
    total = findings.reading.num_tokens
    return Table(
        columns=("kind", "tokens", "share of prompt", "with massive activations", "attention"),
        rows=tuple(
            (
                KIND_NAMES[one.kind],
                one.tokens,
                percent(one.tokens / total),
                one.massive,
                percent(one.attention),
            )
            for one in kind_shares(findings)
        ),
        caption="Attention of the last queries by kind of token, mean over layers",
    )


def stability_table(findings: PromptFindings) -> Table:
    """Rank variance and overlap per layer."""
    one = findings.stability
    overlap = [*one.overlap, None]

    def note(layer: int) -> str:
        notes = []
        if layer == one.l_min:
            notes.append("l_min")
        if layer == one.peak:
            notes.append("peak: l_min belongs here")
        if layer == one.picked:
            notes.append("picked with l_min")
        if layer == one.picked_from_peak:
            notes.append("picked with l_min at the peak")
        return "; ".join(notes)

    return Table(
        columns=(
            "layer",
            "rank variance",
            "of that at l_min",
            "best shared with next",
            "note",
        ),
        rows=tuple(
            (
                layer,
                None if variance is None else f"{variance:,.0f}",
                None if relative is None else f"{relative:.2f}",
                None if shared is None else percent(shared, 0),
                note(layer),
            )
            for layer, variance, relative, shared in zip(
                one.layers, one.variance, one.relative, overlap, strict=True
            )
        ),
        caption=f"Ranks of tokens over {one.l_obs} layers, for the {one.num_ranked:,} best of each",
    )


def plan_table(inspection: Inspection) -> Table | None:
    """The recommended plan; None if there is none."""
    best = inspection.recommendation.best
    if best is None:
        return None
    rows: list[tuple[str, str]] = [
        ("policy", inspection.settings.config.policy),
        ("budget", f"{best.budget:,} tokens"),
        ("full layers", layer_list(best.plan.full)),
        ("sieved layers", layer_list(best.plan.sieved)),
    ]
    if best.plan.untouched:
        rows.append(("sliding-window layers, untouched", layer_list(best.plan.untouched)))
    rows += [
        ("attention mass lost, mean over sieved layers", percent(best.mean_loss, 2)),
        ("attention mass lost, worst layer", percent(best.worst_loss, 2)),
        ("KV memory after the prompts are read", f"{percent(best.kv_share)} of full"),
        ("cache groups", f"{best.num_groups}, {percent(best.padding_share)} padding"),
    ]
    return Table(("what", "value"), tuple(rows), caption="The plan")


def losses_table(inspection: Inspection) -> Table | None:
    """Predicted loss of every prompt; None if there is no plan."""
    best = inspection.recommendation.best
    if best is None:
        return None
    rows = []
    for one in inspection.prompts:
        lost = predicted_loss(inspection, one.reading)
        values = ("fits the budget", None) if lost is None else (lost.mean, lost.max)
        rows.append(
            (
                one.reading.prompt.name,
                one.reading.num_tokens,
                *(percent(v, 2) if isinstance(v, float) else v for v in values),
            )
        )
    return Table(
        ("prompt", "tokens", "mass lost, mean", "worst layer"),
        tuple(rows),
        caption="Predicted loss of each prompt under the plan, as the engine will report it",
    )
