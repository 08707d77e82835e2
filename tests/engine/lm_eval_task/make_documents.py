"""Writes `documents.jsonl`: questions about numbers in made-up logbooks of a harbour.

    python tests/engine/lm_eval_task/make_documents.py

A logbook has some fifty sentences, about 700 tokens of SmolLM2. Three of them say a number of
four digits that nothing else gives; each row asks for one of them and names another number of the
logbook as a wrong choice. Rows of one logbook stand together, so that a server with prefix caching
reads the logbook once.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FILE = Path(__file__).parent / "documents.jsonl"
SENTENCES = 46
FACTS = (
    "the password of the harbour master",
    "the telephone number of the bakery",
    "the combination of the iron safe",
    "the licence number of the old truck",
    "the weight of the bronze bell",
    "the room number of the doctor",
    "the serial number of the big engine",
    "the price of the white horse",
    "the radio channel of the rescue team",
    "the membership number of the painter",
    "the length of the new railway",
    "the code of the museum door",
)
PER_LOGBOOK = 3
WHO = ("The night watch", "A pilot boat", "The crane crew", "A customs clerk", "The ferry", "A tug")
DID = ("waited for the tide", "moved twelve crates", "came back late", "reported fog")
DID += ("took on fuel", "asked for a new rope", "left without cargo", "signed the tally sheet")
WHERE = ("at the north pier", "near the old lighthouse", "behind the warehouse", "at the fuel dock")
WHERE += ("by the lock gate", "off the eastern mole")
WHEN = ("before sunrise", "in the morning", "at noon", "in heavy rain", "after supper")
WHEN += ("at low water",)


def opening(fact: str) -> str:
    """How the sentence that says a fact begins."""
    return f"{fact.capitalize()} is"


def logbook(rng: random.Random, numbers: dict[str, str]) -> str:
    """The text of a logbook that says these facts."""
    lines = [
        f"{rng.choice(WHO)} {rng.choice(DID)} {rng.choice(WHERE)} {rng.choice(WHEN)}."
        for _ in range(SENTENCES)
    ]
    # One in each quarter but the last, whose end every budget keeps.
    step = SENTENCES // (len(numbers) + 1)
    for place, (fact, number) in enumerate(numbers.items()):
        lines.insert(place * step + rng.randrange(step), f"{opening(fact)} {number}.")
    return " ".join(lines)


def rows() -> list[dict[str, str]]:
    """The rows of the file."""
    rng = random.Random(0)
    made = []
    for start in range(0, len(FACTS), PER_LOGBOOK):
        facts = FACTS[start : start + PER_LOGBOOK]
        numbers = {fact: str(rng.randrange(1000, 10000)) for fact in facts}
        text = logbook(rng, numbers)
        made += [
            {
                "logbook": text,
                "question": f"What is {fact}?",
                "opening": opening(fact),
                "number": numbers[fact],
                "other": numbers[facts[(place + 1) % len(facts)]],
            }
            for place, fact in enumerate(facts)
        ]
    return made


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps(row) + "\n" for row in rows()))
