"""The demonstration's document, and the one question about it.

`document.txt` is an excerpt of the proceedings of the Workshop on Electronic Texts
(edited by James Daly, Library of Congress, Washington, D.C., 9-10 June 1992, session
IV), a report of the United States' Library of Congress that is in the public domain.
It was taken from `testdata/lcet10.txt` in Debian's source package snappy 1.1.9, whose
debian/copyright says "License: public-domain" of that file (it is Project Gutenberg's
text 53; neither its name nor its header is kept). Edited: paragraphs are one line each,
speakers' names are no longer in capitals, dashes are spaced, and the headings between
the talks are left out.
"""

from __future__ import annotations

from importlib.resources import files

QUESTION = "Which two vendors were selected as finalists in October 1991?"
EXPECTED = ("DEC", "Xerox")
"""The answer stands once, 1,518 tokens into the 2,923 of the document: a cache that
kept the last 512 tokens would have lost it."""


def demo_document() -> str:
    """The document: paragraphs of one line, separated by blank lines, ASCII."""
    return files("kvsieve.demo").joinpath("document.txt").read_text(encoding="utf-8").strip()


def demo_prompt() -> str:
    """The user's message: the document, a blank line, the question."""
    return f"{demo_document()}\n\n{QUESTION}"


def is_correct(answer: str) -> bool:
    """Whether `answer` contains every word of `EXPECTED`, whatever the case."""
    return all(word.casefold() in answer.casefold() for word in EXPECTED)
