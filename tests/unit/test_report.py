from __future__ import annotations

import json
import math

from kvsieve.core.report import MassLost, SieveReport, SieveTotals


def report(**changes: object) -> SieveReport:
    whole = {
        "policy": "snapkv",
        "mode": "sieve",
        "budget": 256,
        "sieved": True,
        "prompt_tokens": 1000,
        "stored_tokens": {"full": 1000, "sieved": 300},
        "layers": {"full": 1, "sieved": 2},
        "attention_mass_lost": MassLost.of((1, 2), (0.1, 0.3)),
    }
    return SieveReport(**{**whole, **changes})


def test_a_report_is_plain_json() -> None:
    plain = report().as_dict()

    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["attention_mass_lost"] == {"mean": 0.2, "max": 0.3, "layers": {"1": 0.1, "2": 0.3}}


def test_attention_that_is_not_a_number_is_not_reported() -> None:
    assert MassLost.of((1, 2), (0.1, math.nan)) is None
    assert MassLost.of((1, 2), (math.inf, 0.1)) is None


def test_the_log_keeps_sieved_and_shadow_requests_apart() -> None:
    totals = SieveTotals()
    totals.add(report(blocks_freed=7), seconds=0.25)
    totals.add(
        report(
            mode="shadow",
            sieved=False,
            would_drop_tokens=1400,
            attention_mass_lost=MassLost.of((1, 2), (0.5, 0.5)),
        )
    )
    totals.add(report(sieved=False, attention_mass_lost=None))

    assert str(totals) == (
        "3 requests finished; 1 sieved: 1000 prompt tokens, 300 kept in each sieved layer,"
        " 7 blocks freed, 20.00% of attention lost; 1 in shadow: 50.00% of attention would be"
        " lost; 0.25 s of scoring and compaction"
    )


def test_the_log_says_when_nothing_was_sieved() -> None:
    totals = SieveTotals()
    totals.add(report(sieved=False, attention_mass_lost=None))

    assert str(totals) == "1 request finished, none of them longer than its budget"
