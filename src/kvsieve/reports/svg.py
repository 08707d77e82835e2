"""A figure as SVG markup that can stand in an HTML page beside others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape

_ID = re.compile(r' id="([^"]*)"')
_REFERENCE = re.compile(r'(href="#|url\(#)([^")]*)')
_ROOT = re.compile(r'<svg\b[^>]*?viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>', re.DOTALL)
_NOISE = re.compile(
    r"<!--.*?-->|<metadata>.*?</metadata>|<style\b.*?</style>|^\s+|\n(?=/?>)",
    re.DOTALL | re.MULTILINE,
)
# A thousandth of a point is seen by nobody, and a map of many cells is a third smaller.
_LONG_NUMBER = re.compile(r"(\d\.\d{3})\d+")
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

PART = "part-"
"""Start of the ids that name a part of a picture; they become classes, which may repeat."""


@dataclass(frozen=True)
class Figure:
    """A picture of a report.

    Attributes:
        svg: One `<svg>` element: valid XML, nothing outside itself is referred to, text is drawn
            as shapes. Ids are unique within it; in a page with several use `with_id_prefix`.
        alt: What the picture shows, in words, for those who cannot see it.
        caption: Line below the picture; may be empty.
    """

    svg: str
    alt: str
    caption: str = ""

    @property
    def width(self) -> float:
        """Natural width in CSS pixels."""
        match = _ROOT.match(self.svg)
        assert match is not None
        return float(match.group(1)) * 96 / 72


def inline_svg(drawn: str, alt: str) -> str:
    """Make an SVG file of matplotlib's an element of an HTML page.

    Args:
        drawn: The file's text, with a `viewBox` in points that starts at 0 0.
        alt: Text for `aria-label`.

    Returns:
        The `<svg>` element, without comments, metadata, global style and ids that nobody refers
        to. It fills its container between 7/10 and 5/4 of its natural size, so that its text stays
        readable; a narrower container must scroll.
    """
    text = drawn[drawn.index("<svg") :].replace("xlink:href=", "href=")
    match = _ROOT.match(text)
    if match is None:
        raise ValueError("expected an svg element with a viewBox that starts at 0 0")
    width, height = (float(size) for size in match.groups())
    natural = width * 96 / 72
    root = (
        '<svg xmlns="http://www.w3.org/2000/svg" role="img"'
        f' aria-label="{escape(_NOT_XML.sub(" ", alt))}"'
        f' viewBox="0 0 {width:g} {height:g}" stroke-linejoin="round" stroke-linecap="butt"'
        f' style="width:100%;height:auto;min-width:{natural * 0.7:.0f}px;'
        f'max-width:{natural * 1.25:.0f}px">'
    )
    body = _LONG_NUMBER.sub(r"\1", _NOISE.sub("", text[match.end() :]))
    referenced = {name for _, name in _REFERENCE.findall(body)}

    def keep(found: re.Match[str]) -> str:
        name = found.group(1)
        if name.startswith(PART):
            return f' class="{name}"'
        return found.group(0) if name in referenced else ""

    return root + _ID.sub(keep, body).strip()


def with_id_prefix(svg: str, prefix: str) -> str:
    """The same picture with ids `PREFIX0`, `PREFIX1`, ... that no other element has.

    Args:
        svg: An element as `inline_svg` returns it.
        prefix: Unique in the page; letters, digits and hyphens.
    """
    names = {name: f"{prefix}{number}" for number, name in enumerate(_ID.findall(svg))}
    svg = _ID.sub(lambda found: f' id="{names[found.group(1)]}"', svg)
    return _REFERENCE.sub(lambda found: found.group(1) + names[found.group(2)], svg)
