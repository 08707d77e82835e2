"""The figures of an inspection."""

from __future__ import annotations

import math

from kvsieve.inspect.activations import TINY
from kvsieve.inspect.concentration import MASS_SHARES
from kvsieve.inspect.prompt import printable
from kvsieve.inspect.run import Inspection, PromptFindings
from kvsieve.reports.figures import Figure, Mark, Reference, Series, heat_figure, line_figure

HEAT_TOKENS = 8


def concentration_figure(inspection: Inspection, findings: PromptFindings) -> Figure:
    """Share of the prompt that holds the attention, per layer."""
    reading = findings.reading
    tokens = reading.num_tokens
    layers = inspection.survey.layers
    series = []
    for share in MASS_SHARES:
        spreads = [window[share] for window in reading.window]
        series.append(
            Series(
                f"last queries, {share:.0%} of mass",
                layers,
                [100 * spread.mean / tokens for spread in spreads],
                low=[100 * max(0.0, spread.mean - spread.std) / tokens for spread in spreads],
                high=[100 * min(tokens, spread.mean + spread.std) / tokens for spread in spreads],
            )
        )
    middle = MASS_SHARES[1]
    series.append(
        Series(
            f"all queries, {middle:.0%} of mass",
            layers,
            [100 * sampled[middle].mean / tokens for sampled in reading.sampled],
        )
    )
    return line_figure(
        series,
        x_label="layer",
        y_label="tokens needed, % of prompt",
        title="How few tokens hold the attention",
        y_range=(0, 100),
        caption="Lines: mean over heads; bands: one standard deviation over heads.",
    )


def activations_figure(findings: PromptFindings) -> Figure:
    """Largest activation of the outstanding tokens after each layer."""
    reading = findings.reading
    tokens = sorted(findings.tokens[:HEAT_TOKENS], key=lambda token: token.position)
    values = [
        [
            math.log10(max(float(one.peaks[token.position]) / max(one.median, TINY), 1.0))
            for token in tokens
        ]
        for one in reading.activations
    ]
    return heat_figure(
        values,
        row_labels=[str(one.layer) for one in reading.activations],
        column_labels=[
            f"{token.position} {printable(reading.prompt.texts[token.position])[:12]}"
            for token in tokens
        ],
        row_label="layer",
        column_label="position and token",
        title="Massive activations",
        low=0,
        high=max(4.0, max(max(row) for row in values)),
        value_label="largest |value| / median, powers of ten",
        decimals=1,
        caption="A 3 stands for a thousand times the median magnitude of the layer's hidden"
        " state, where the definition of massive begins.",
    )


def stability_figure(findings: PromptFindings) -> Figure:
    """The rank variance curve with the layer that ASL picks."""
    one = findings.stability
    largest = max((value for value in one.variance if value is not None), default=0.0) or 1.0
    curve = {
        layer: value / largest
        for layer, value in zip(one.layers, one.variance, strict=True)
        if value is not None
    }
    series = [
        Series("rank variance, of its peak", list(curve), list(curve.values())),
        Series("best tokens shared with the next layer", one.layers[:-1], one.overlap, (), ()),
    ]
    picked = one.picked_from_peak
    mark = None
    if picked is not None:
        mark = Mark(f"picked: layer {picked}", picked, curve[picked])
    with_l_min = "none" if one.picked is None else f"layer {one.picked}"
    return line_figure(
        series,
        x_label="layer",
        y_label="share",
        title="How much the ranks of tokens still move",
        y_range=(0, 1),
        reference=Reference(f"tau = {one.tau:g}, from the peak", one.tau),
        mark=mark,
        caption=f"With l_min at the peak (layer {one.peak}) ASL picks"
        f" {'no layer' if picked is None else f'layer {picked}'};"
        f" with l_min {one.l_min} it picks {with_l_min}.",
    )


def loss_figure(inspection: Inspection) -> Figure:
    """Loss against budget, with the recommended budget."""
    best = inspection.recommendation.best
    names = {
        "no full layer": "no full layer",
        "recommended": "recommended full layers",
    }
    series = [
        Series(names[name], inspection.budgets, [100 * value for value in losses])
        for name, losses in inspection.curves.items()
    ]
    mark = None
    if best is not None:
        mark = Mark(f"recommended: {best.budget:,} tokens", best.budget, 100 * best.mean_loss)
    return line_figure(
        series,
        x_label="budget of the sieved layers, tokens",
        y_label="attention mass lost, %",
        title="Loss against budget",
        x_log=True,
        reference=Reference("accepted loss", 100 * inspection.settings.bounds.mean),
        mark=mark,
        caption="Mean over the sieved layers, of the prompt that loses most.",
    )


def layer_loss_figure(inspection: Inspection) -> Figure | None:
    """Loss of each layer under the recommended budget; None without a plan."""
    best = inspection.recommendation.best
    if best is None:
        return None
    index = inspection.budgets.index(best.budget)
    layers = inspection.survey.layers
    worst = [
        100 * max(one.reading.lost[row][index] for one in inspection.prompts)
        for row in range(len(layers))
    ]
    full = set(best.plan.full)
    series = [
        Series(
            "sieved",
            layers,
            [math.nan if layer in full else v for layer, v in zip(layers, worst, strict=True)],
        )
    ]
    if full:
        series.append(
            Series(
                "kept full (it would lose)",
                layers,
                [v if layer in full else math.nan for layer, v in zip(layers, worst, strict=True)],
            )
        )
    return line_figure(
        series,
        x_label="layer",
        y_label="attention mass lost, %",
        title=f"Loss of each layer at a budget of {best.budget:,} tokens",
        caption="Of the prompt that loses most in the layer.",
    )
