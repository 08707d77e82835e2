"""A report in a real browser: on a desk, on a phone and on paper."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from kvsieve.reports.page import write_report
from tests.browser import Browser, browser
from tests.report_samples import FIGURES, page_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as page:
        yield page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "page.html"
    page = page_of(*(make() for make in FIGURES.values()), text="A rather long name of a model")
    write_report(path, None, page=page, data={})
    return path


# What sticks out sideways and is not inside something that scrolls.
STICKING_OUT = """
[...document.querySelectorAll("body *")]
  .filter(element => !element.closest(".scroll :scope, .scroll *"))
  .filter(element => element.getBoundingClientRect().right > WIDTH + 0.5)
  .map(element => element.outerHTML.slice(0, 80))
"""
PICTURES = """
[...document.querySelectorAll("h1, svg")].map(element => {
  const box = (element.closest(".scroll") || element).getBoundingClientRect();
  return [box.left, box.top + scrollY, box.right, box.bottom + scrollY].map(Math.round);
})
"""


def too_wide(page: Browser, width: int) -> list[str]:
    """What does not fit into a window. Given the width: a phone makes the window wider to fit."""
    found: list[str] = page.evaluate(STICKING_OUT.replace("WIDTH", str(width)))
    if page.evaluate("document.documentElement.scrollWidth") > width:
        found.append("the page scrolls sideways")
    return found


def is_blank(picture: Image.Image) -> bool:
    """Whether nearly all of a picture has one colour."""
    colours = picture.convert("RGB").getcolors(maxcolors=picture.width * picture.height)
    assert colours is not None
    return max(count for count, _ in colours) > 0.995 * picture.width * picture.height


@pytest.mark.parametrize(("width", "phone"), [(1400, False), (400, True)])
def test_a_page_is_seen_in_a_browser(
    chromium: Browser, report: Path, tmp_path: Path, width: int, phone: bool
) -> None:
    chromium.open(report, width=width, phone=phone)

    assert chromium.evaluate("innerWidth") == width
    assert chromium.requested == [report.as_uri()] and chromium.complaints == []
    assert too_wide(chromium, width) == []
    whole = Image.open(chromium.screenshot(tmp_path / f"{width}.png"))
    boxes = chromium.evaluate(PICTURES)
    assert len(boxes) == 1 + len(FIGURES)
    for box in boxes:
        assert box[2] - box[0] >= min(300, width - 40) and box[3] > box[1]
        assert not is_blank(whole.crop(tuple(box)))
    # The text of a figure does not get smaller than 8 CSS pixels.
    scales = "[...document.querySelectorAll('svg')].map(s => s.getScreenCTM().a)"
    assert all(9.5 * scale > 8 for scale in chromium.evaluate(scales))
    assert chromium.evaluate("getComputedStyle(document.querySelector('.provenance')).display") == (
        "none"
    )


def test_a_page_is_printed_whole(chromium: Browser, report: Path, tmp_path: Path) -> None:
    chromium.open(report, width=688)
    chromium.emulate_print(True)
    try:
        assert chromium.evaluate("document.querySelector('.provenance').innerText.length") > 500
        # Nothing scrolls on paper.
        assert too_wide(chromium, 688) == []
        figures = "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().right)"
        assert max(chromium.evaluate(figures)) <= 688
        printed = chromium.pdf(tmp_path / "page.pdf").read_bytes()
    finally:
        chromium.emulate_print(False)

    assert printed.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 12


def test_labels_beside_points_do_not_cover_one_another(chromium: Browser, report: Path) -> None:
    chromium.open(report, width=1400)

    boxes = chromium.evaluate(
        "[...document.querySelector('svg').querySelectorAll('.part-label')].map(label => {"
        " const box = label.getBoundingClientRect();"
        " return [box.left, box.top, box.right, box.bottom] })"
    )

    assert len(boxes) >= 10
    for one, other in itertools.combinations(boxes, 2):
        is_apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1]
        assert is_apart or other[3] <= one[1]


def test_the_browser_finds_what_a_page_must_not_do(chromium: Browser, tmp_path: Path) -> None:
    planted = tmp_path / "planted.html"
    planted.write_text(
        '<meta name="viewport" content="width=device-width"><h1>&nbsp;</h1>'
        '<img src="http://example.invalid/x.png"><p style="width: 900px">wide</p>'
    )

    chromium.open(planted, width=400, phone=True)

    assert "http://example.invalid/x.png" in chromium.requested
    assert any("wide" in found for found in too_wide(chromium, 400))
    (box,) = chromium.evaluate(PICTURES)
    assert is_blank(Image.open(chromium.screenshot(tmp_path / "a.png")).crop(tuple(box)))


def test_a_page_of_ours_may_not_fetch_or_run_anything(
    chromium: Browser, report: Path, tmp_path: Path
) -> None:
    planted = tmp_path / "planted.html"
    smuggled = '<img src="http://example.invalid/x.png"><script>document.title = "run"</script>'
    planted.write_text(report.read_text().replace("<main>", f"<main>{smuggled}"))

    chromium.open(planted, width=1400)

    assert chromium.evaluate("document.title") != "run"
    assert len(chromium.complaints) == 2, chromium.complaints


def test_without_a_browser_a_sentence_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Ubuntu's command is there and does nothing but tell of a snap.
    stub = tmp_path / "chromium-browser"
    stub.write_text("#!/bin/sh\nexit 1\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")

    with pytest.raises(RuntimeError, match="apt-get install chromium"), browser():
        pass
    script = subprocess.run(
        [sys.executable, ROOT / "scripts" / "browser.py"], capture_output=True, text=True
    )
    assert script.returncode == 1 and "apt-get install chromium" in script.stderr
