"""The tables of a calibration, from the content of its file."""

from __future__ import annotations

from kvsieve.calibrate.choose import MIN_SAVING, SLACK
from kvsieve.calibrate.measure import FIXED
from kvsieve.pruning.calibration import Calibration
from kvsieve.reports.table import Table

BECAUSE = {
    "close": "there fastkv is close to its best",
    "saving": f"beyond, less than {MIN_SAVING:.0%} is saved",
    "peak": "right after the peak: no later layer is worth its cost",
}


def methods_table(calibration: Calibration) -> Table:
    """Where each method selects, and what that costs."""
    rows = []
    for name, one in calibration.methods.items():
        facts = calibration.measured["methods"][name]
        distance = calibration.measured["distance"].get(name, {}).get(str(one.layer))
        rows.append(
            (
                name,
                one.layer,
                None if one.threshold is None else f"{one.threshold:.2f}",
                one.max_layer,
                f"{facts['computed_share']:.0%}",
                distance,
                BECAUSE.get(facts.get("max_layer_because", ""), ""),
            )
        )
    return Table(
        columns=(
            "method",
            "layer",
            "threshold",
            "at the latest",
            "token-layers computed",
            "distance",
            "why at the latest",
        ),
        rows=tuple(rows),
        caption=f"Where the methods select in {_short(calibration)} ({calibration.num_layers}"
        f" layers), {calibration.kept_share:.4g} of a prompt kept",
    )


def curves_table(calibration: Calibration) -> Table:
    """Rank variance and distances by layer."""
    found = calibration.measured
    methods = calibration.methods

    def note(layer: int) -> str:
        notes: list[str] = [name for name in FIXED if methods[name].layer == layer]
        notes += [
            f"{n} from here on" for n in methods if n not in FIXED and methods[n].layer == layer
        ]
        notes += [f"{n} at the latest" for n in methods if methods[n].max_layer == layer]
        return "; ".join(notes)

    return Table(
        columns=("layer", "rank variance", *(f"distance, {name}" for name in FIXED), "selects"),
        rows=tuple(
            (
                layer,
                found["rank_variance"].get(str(layer)),
                *(found["distance"][name].get(str(layer)) for name in FIXED),
                note(layer),
            )
            for layer in range(calibration.num_layers)
        ),
        caption="Rank variance, as a share of each prompt's largest; and squared distance of the"
        " last token's final hidden state to that with the full prompt, as a share of its squared"
        f" length. Mean over {len(found['prompts'])} prompts. The earliest layer within"
        f" {SLACK:.0%} of the best distance is taken.",
    )


def prompts_table(calibration: Calibration) -> Table:
    """Where the adaptive methods prune each calibration prompt."""
    adaptive = [name for name in calibration.methods if name not in FIXED]
    methods = calibration.measured["methods"]
    return Table(
        columns=(
            "prompt",
            "tokens",
            "kept",
            *(column for name in adaptive for column in (f"{name} at", "lowest variance before")),
        ),
        rows=tuple(
            (
                one["name"],
                one["tokens"],
                one["kept_tokens"],
                *(
                    cell
                    for name in adaptive
                    for cell in (
                        f"{one['pruned_at'][name]['layer']} ({one['pruned_at'][name]['reason']})",
                        methods[name]["lowest_relative_variance"][index],
                    )
                ),
            )
            for index, one in enumerate(calibration.measured["prompts"])
        ),
        caption="Where these prompts are pruned, and how far their rank variance falls before the"
        " latest layer, as a share of that at the first judged one",
    )


def _short(calibration: Calibration) -> str:
    return calibration.model.rstrip("/").rsplit("/", 1)[-1]
