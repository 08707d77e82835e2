"""docs/pruning.md says what the methods are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from kvsieve.core.pruning import PruneReason
from kvsieve.pruning import PRUNE_METHODS, PruneOptions

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "pruning.md").read_text()


def rows(columns: int) -> dict[str, list[str]]:
    """The cells of every table row of so many columns, by its first, which is code."""
    found = {}
    for line in DOCS.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == columns:
            found[cells[0].strip("`")] = cells[1:]
    return found


def test_every_method_has_its_row_and_its_source() -> None:
    table = rows(6)

    assert list(table) == list(PRUNE_METHODS)
    for name, (_, layer, window, pool, passes) in table.items():
        method = PRUNE_METHODS[name]
        assert re.findall(r"\d+", layer) == [str(method.layer)], name
        assert ("per prompt" in layer) == method.is_adaptive, name
        assert int(window) == method.window, name
        assert pool == f"{method.pooling} {method.pool_size}", name
        assert int(passes) == method.num_passes, name
        assert re.search(rf"\* \*\*{name}\*\* \([^)]*{method.source}\)", DOCS), name


def test_every_reason_is_explained() -> None:
    assert list(rows(2)) == list(get_args(PruneReason))


def test_every_option_is_named() -> None:
    (sentence,) = re.findall(r"^`prune_options` replaces.*?\.\s", DOCS, re.MULTILINE | re.DOTALL)

    assert re.findall(r"`(\w+)`", sentence)[1:] == list(PruneOptions.model_fields)


def test_the_defaults_of_asl_are_its_numbers() -> None:
    method = PRUNE_METHODS["asl"]

    assert re.search(rf"`observed_layers`\s+\({method.observed_layers}\)", DOCS)
    assert re.search(rf"`threshold` \({method.threshold}\)", DOCS)
