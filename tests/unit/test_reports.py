"""Reports: figures, pages and files. `test_reports_browser` looks at them."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.core.errors import KvsieveError
from kvsieve.reports.figures import (
    Bars,
    Series,
    bar_figure,
    heat_figure,
    line_figure,
    scatter_figure,
    trade_off_figure,
)
from kvsieve.reports.heat import COLOURS, readable_on
from kvsieve.reports.page import Section, Table, render_page, write_report
from kvsieve.reports.svg import with_id_prefix
from kvsieve.reports.table import NOTHING
from tests.report_samples import FIGURES, bars, heat, lines, page_of, trade_off

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"
NASTY = "</svg><script>alert('x')</script> & \"q\" $\\frac{1}{2}$ <!-- --> ]]>"


class Reader(HTMLParser):
    """What an HTML parser sees: tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.pieces: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def of(self, *names: str) -> list[str]:
        return [value for name, value in self.attributes if name in names]


def outside_references(markup: str) -> list[str]:
    """Whatever makes a browser fetch something, or run something."""
    reader = Reader(markup)
    links = reader.of("src", "href", "xlink:href", "srcset", "data", "action", "poster")
    found = [link for link in links if not link.startswith(("#", "data:"))]
    found += re.findall(r"url\((?!#)[^)]*\)|@import[^;]*", markup)
    found += [name for name, _ in reader.attributes if name.startswith("on")]
    return found + [tag for tag in ("script", "iframe", "object", "embed") if reader.tags[tag]]


def repeated_ids(markup: str) -> list[str]:
    return [one for one, count in Counter(Reader(markup).of("id")).items() if count > 1]


def broken_references(markup: str) -> set[str]:
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', markup))
    return used - set(Reader(markup).of("id"))


@pytest.mark.parametrize("kind", FIGURES)
def test_a_figure_is_one_valid_element_that_refers_to_nothing_outside(kind: str) -> None:
    figure = FIGURES[kind]()

    root = ElementTree.fromstring(figure.svg)
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img" and root.get("aria-label") == figure.alt
    assert outside_references(figure.svg) == []
    assert repeated_ids(figure.svg) == [] and broken_references(figure.svg) == set()
    # Text is drawn as shapes, and no bitmap is inside.
    assert not {"text", "image", "style"} & set(Reader(figure.svg).tags)


def test_the_checks_above_find_what_they_look_for() -> None:
    planted = '<a href="http://x/"></a><b onclick="f()" style="fill:url(http://y/)"></b><script>'

    assert outside_references(planted) == ["http://x/", "url(http://y/)", "onclick", "script"]
    assert repeated_ids('<a id="1"></a><a id="2"></a><a id="1"></a>') == ["1"]
    assert broken_references('<a id="1"></a><a href="#1"></a><a href="#2"></a>') == {"2"}


finite = st.floats(-1e6, 1e6, allow_subnormal=False)


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.tuples(finite, finite | st.just(math.nan)), min_size=1, max_size=5),
    st.text(max_size=20),
    st.booleans(),
)
def test_any_points_and_any_text_make_a_valid_figure(
    points: list[tuple[float, float]], text: str, connect: bool
) -> None:
    x, y = [one[0] for one in points], [one[1] for one in points]
    one = Series(text + NASTY, x, y, y, y, [text or "-"] * len(points))

    figure = scatter_figure(
        [one, one], x_label=text, y_label=NASTY, title=text + NASTY, connect=connect
    )

    ElementTree.fromstring(figure.svg)
    assert outside_references(figure.svg) == []


def test_the_same_data_make_the_same_figure_whatever_the_user_has_set(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("font.size: 20\nsvg.fonttype: none\naxes.grid: False\n")
    code = (
        "import sys, matplotlib\n"
        # Reading the back-end makes matplotlib choose one, and import pyplot.
        "rc = matplotlib.rcParams\n"
        "def now(): return {name: rc[name] for name in rc if name != 'backend'}\n"
        "before = now()\n"
        "from tests.report_samples import trade_off, bars, heat\n"
        "print(trade_off().svg, bars().svg, heat().svg, sep='')\n"
        "assert now() == before, 'settings have changed'\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    environment = {
        **os.environ,
        "MATPLOTLIBRC": str(tmp_path),
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": str(ROOT),
    }

    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "".join(figure.svg for figure in (trade_off(), bars(), heat())) + "\n"


def without_colour(part: ElementTree.Element) -> tuple[str, ...]:
    """How a series is drawn, colours and places aside: its dashes and the shape of its marker."""
    line = next(path for path in part.iter(f"{SVG}path") if path.get("clip-path"))
    marker = next(path for path in part.iter(f"{SVG}path") if path.get("id"))
    dashes = re.findall(r"stroke-dasharray: ([^;]+)", line.get("style", ""))
    return (*(dashes or ["solid"]), marker.get("d", ""))


def test_seven_series_differ_in_marker_and_in_dashes() -> None:
    root = ElementTree.fromstring(lines(7).svg)
    parts = [
        next(group for group in root.iter() if group.get("class") == f"part-series-{number}")
        for number in range(7)
    ]

    looks = [without_colour(part) for part in parts]
    dashes, markers = zip(*looks, strict=True)
    assert len(set(dashes)) == 7 and len(set(markers)) == 7


def test_a_curve_of_many_samples_bears_few_markers() -> None:
    x = range(2000)
    svg = line_figure([Series("a", x, [math.sin(i / 99) for i in x])], x_label="", y_label="").svg

    (part,) = [
        group
        for group in ElementTree.fromstring(svg).iter()
        if group.get("class") == "part-series-0"
    ]
    assert 15 <= len(list(part.iter(f"{SVG}use"))) <= 25


def test_bars_differ_in_hatch() -> None:
    root = ElementTree.fromstring(bars().svg)
    fills = {
        group.get("class"): path.get("style", "")
        for group in root.iter(f"{SVG}g")
        if (group.get("class") or "").startswith("part-series-")
        for path in group.iter(f"{SVG}path")
    }

    assert "url(#" not in fills["part-series-0"] and "url(#" in fills["part-series-1"]


def test_numbers_in_cells_can_be_read_on_every_colour() -> None:
    import matplotlib

    def luminance(colour: tuple[float, ...]) -> float:
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    colours = matplotlib.colormaps[COLOURS]
    for step in range(101):
        back = luminance(colours(step / 100)) + 0.05
        text = 0.05 if readable_on(colours, step / 100) == "#000000" else 1.05
        assert max(back, text) / min(back, text) >= 4.5


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Series("a", [1, 2], [1]), "a: 1 y for 2 places"),
        (lambda: Series("a", [1], [1], low=[0]), "a: 1 lower and 0 upper ends"),
        (lambda: Series("a", [1], [1], labels=["p", "q"]), "a: 2 labels for 1 places"),
        (lambda: Bars("a", [1], [0, 0], [2, 2]), "a: 2 low for 1 places"),
        (lambda: lines(0), "at least one point"),
        (lambda: trade_off_figure([Series("a", [0], [1])]), "an x of 0 or less"),
        (lambda: bar_figure(["p"], [Bars("a", [1, 2])], value_label=""), "2 values, 1 categories"),
        (lambda: bar_figure([], [], value_label=""), "at least one category"),
        (
            lambda: heat_figure(
                [[1]], row_labels=["p"], column_labels=[], row_label="", column_label=""
            ),
            r"shape \(1, 0\)",
        ),
        (lambda: Table(("a",), ((1, 2),)), "2 cells for 1 columns"),
    ],
)
def test_data_that_do_not_fit_together_are_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()


def test_without_matplotlib_a_sentence_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from kvsieve.core.errors import KvsieveError\n"
        "from kvsieve.reports.figures import Series, line_figure\n"
        "try: line_figure([Series('a', [1], [1])], x_label='', y_label='')\n"
        "except KvsieveError as error: print(error)\n"
    )

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert "pip install 'kvsieve[eval]'" in ran.stdout, ran.stderr


@settings(max_examples=12, deadline=None)
@given(st.text(max_size=40).map(lambda text: text + NASTY))
def test_every_text_of_a_page_is_shown_as_it_is(text: str) -> None:
    tags = Reader(page_of(text="plain")).tags

    page = page_of(text=text)

    reader = Reader(page)
    assert reader.tags == tags
    shown = " ".join(reader.text.split())
    # Title, heading, summary, text, heading of a section, first cell, provenance.
    assert shown.count(" ".join(NASTY.split())) == 7
    assert outside_references(page) == []


def test_a_page_holds_everything_it_shows() -> None:
    one = trade_off()
    page = page_of(one, one, bars(), heat(), bars("another"))

    assert outside_references(page) == []
    assert repeated_ids(page) == [] and broken_references(page) == set()
    assert "http" not in re.sub(r'xmlns="http://www.w3.org/2000/svg"|http-equiv', "", page)
    reader = Reader(page)
    assert reader.of("lang") == ["en"]
    assert reader.tags["h1"] == 1 and reader.tags["h3"] == 0
    assert reader.tags["figcaption"] == 2  # Of the figure that is there twice.


def test_ids_are_renamed_with_what_refers_to_them() -> None:
    svg = '<svg><a id="x"/><b href="#x" clip-path="url(#x)"/></svg>'

    assert with_id_prefix(svg, "f-") == (
        '<svg><a id="f-0"/><b href="#f-0" clip-path="url(#f-0)"/></svg>'
    )


def cells(table: Table) -> list[list[str]]:
    page = render_page("t", summary=[], sections=[Section("s", tables=(table,))], provenance={})
    body = page[page.index("<tbody>") : page.index("</tbody>")]
    return [
        re.findall(r"<t[hd]([^>]*>[^<]*)<", row) for row in re.findall(r"<tr>.*?</tr>", body, re.S)
    ]


def test_columns_of_numbers_are_aligned_and_have_the_same_decimals() -> None:
    table = Table(
        ("name", "float", "int", "large", "text"),
        (
            ("a", 0.5, 1234, 12345.6, "25%"),
            ("b", math.nan, None, 7.0, "0.33 (0.31 .. 0.35)"),
            ("1", 3.14159, 7, 0.25, "1,024 MiB"),
        ),
    )
    number = ' class="number">'

    assert cells(table) == [
        [
            ' scope="row">a',
            f"{number}0.500",
            f"{number}1,234",
            f"{number}12,346",
            f"{number}25%",
        ],
        [
            ' scope="row">b',
            f"{number}{NOTHING}",
            f"{number}{NOTHING}",
            f"{number}7",
            f"{number}0.33 (0.31 .. 0.35)",
        ],
        [' scope="row">1', f"{number}3.142", f"{number}7", f"{number}0", f"{number}1,024 MiB"],
    ]


def test_a_report_is_written_and_replaced(tmp_path: Path) -> None:
    page, link, data = tmp_path / "page.html", tmp_path / "link.html", tmp_path / "data.json"
    page.write_text("old")
    link.symlink_to(page)

    write_report(link, data, page="new \ud800", data={"a": [math.nan, 1.5], "b": {1: math.inf}})

    assert link.is_symlink() and page.read_text() == "new \\ud800"
    assert json.loads(data.read_text()) == {"a": [None, 1.5], "b": {"1": None}}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "data.json",
        "link.html",
        "page.html",
    ]


def test_a_report_goes_through_a_pipe() -> None:
    code = (
        "from pathlib import Path; from kvsieve.reports.page import write_report\n"
        "write_report(None, Path('/dev/stdout'), page='', data={'a': 1})"
    )

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert json.loads(ran.stdout) == {"a": 1}, ran.stderr


def test_where_a_report_cannot_go_all_reasons_are_said_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    nowhere = tmp_path / "missing" / "page.html"

    with pytest.raises(KvsieveError, match=r"missing of page\.html does not exist.*is a folder"):
        write_report(nowhere, tmp_path, page="", data={})
    with pytest.raises(KvsieveError, match="name two files"):
        write_report(tmp_path / "a", tmp_path / "a", page="", data={})

    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from kvsieve.core.errors import KvsieveError\n"
        "from kvsieve.reports.page import write_report\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: write_report(Path(sys.argv[1]), None, page='x' * 10000, data={})\n"
        "except KvsieveError as error: print(error)\n"
    )

    ran = subprocess.run([sys.executable, "-c", code, page], capture_output=True, text=True)

    assert f"could not write {page}: File too large" in ran.stdout, ran.stderr
    assert page.read_text() == "old" and list(tmp_path.iterdir()) == [page]
