"""The page of a report: one HTML file that needs no network and no JavaScript."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from kvsieve import __version__
from kvsieve.reports.files import check_report_files, write_report
from kvsieve.reports.svg import Figure, with_id_prefix
from kvsieve.reports.table import NOTHING, Table, shown

WIDE = 640
"""Figures of more CSS pixels get a row of their own."""

__all__ = ["Figure", "Section", "Table", "check_report_files", "render_page", "write_report"]


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: Heading.
        text: Plain text; an empty line starts a new paragraph.
        figures: Pictures, below the text.
        tables: Tables, below the pictures.
    """

    title: str
    text: str = ""
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()


def render_page(
    title: str,
    *,
    summary: Sequence[str],
    sections: Sequence[Section],
    provenance: Mapping[str, Any],
) -> str:
    """Render a report.

    Args:
        title: Heading of the page.
        summary: Sentences that answer the reader's question, each a paragraph in the box on top.
        sections: The parts of the page, in order.
        provenance: What `provenance` returns, perhaps with more; shown at the foot.

    Returns:
        The text of an HTML file that holds everything it shows. All text is escaped; only the
        figures' SVG is taken as it is.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("kvsieve.reports", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers = iter(range(1, 1 + sum(len(section.figures) for section in sections)))
    return environment.get_template("page.html.jinja").render(
        title=title,
        style=Markup(files("kvsieve.reports").joinpath("style.css").read_text("utf-8")),
        made=_made(provenance),
        summary=list(summary),
        sections=[
            {
                "id": f"section-{position}",
                "title": section.title,
                "paragraphs": [text for text in re.split(r"\n\s*\n", section.text.strip()) if text],
                "figures": [
                    {
                        "svg": Markup(with_id_prefix(figure.svg, f"figure-{next(numbers)}-")),
                        "caption": figure.caption,
                        "is_wide": figure.width > WIDE,
                    }
                    for figure in section.figures
                ],
                "tables": [shown(table, section.title) for table in section.tables],
            }
            for position, section in enumerate(sections, 1)
        ],
        provenance=shown(
            Table(("what", "value"), tuple(_flat(provenance))), "Where these results come from"
        ),
    )


def _made(provenance: Mapping[str, Any]) -> str:
    """The line below the title: who made the page, when and where."""
    parts = [f"kvsieve {__version__}"]
    if provenance.get("date"):
        parts.append(str(provenance["date"]).replace("T", " ").replace("+00:00", " UTC"))
    machine = provenance.get("machine")
    if isinstance(machine, Mapping):
        gpus = machine.get("gpus") or []
        names = sorted({str(gpu).split(",")[0] for gpu in gpus})
        if names:
            parts.append(f"{len(gpus)} GPU: {', '.join(names)}")
        if machine.get("cpu"):
            parts.append(f"{machine['cpu']}, {machine.get('cores', '?')} cores")
    return " \N{MIDDLE DOT} ".join(parts)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every leaf of a mapping of mappings, with its path as name."""
    for key, value in values.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key} / ")
        elif key == "argv" and not isinstance(value, str):
            yield "command", shlex.join(str(word) for word in value)
        elif isinstance(value, list | tuple):
            lines = any(isinstance(one, str) for one in value)
            yield name, ("\n" if lines else ", ").join(_leaf(one) for one in value) or NOTHING
        else:
            yield name, _leaf(value)


def _leaf(value: object) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)
