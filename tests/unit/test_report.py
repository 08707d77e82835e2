from __future__ import annotations

import json
import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from kvsieve.core.pruning import PrunedPrompt
from kvsieve.core.report import (
    LayersStored,
    MassLost,
    SieveReport,
    SieveTotals,
    TierStored,
    pruning_sentence,
)


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


def test_a_report_lists_tiers_only_where_budgets_differ() -> None:
    assert report().as_dict()["tiers"] is None
    tiers = [TierStored("1", 512), TierStored("2", 88)]

    assert report(tiers=tiers).as_dict()["tiers"] == [
        {"layers": "1", "stored_tokens": 512},
        {"layers": "2", "stored_tokens": 88},
    ]


@given(
    st.integers(1, 5000), st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=40), st.data()
)
def test_the_mean_over_layers_counts_those_that_hold_everything(
    prompt: int, shares: list[float | None], data: st.DataObject
) -> None:
    held = {
        layer: prompt if share is None else int(share * prompt)
        for layer, share in enumerate(shares)
    }
    counted = {layer: held[layer] for layer, share in enumerate(shares) if share is not None}
    stored = LayersStored(prompt, counted)
    cut = data.draw(st.integers(1, len(shares)))
    tiers = [tuple(range(cut)), tuple(range(cut, len(shares)))] if cut < len(shares) else []

    assert stored.dropped_tokens == sum(prompt - each for each in held.values())
    assert stored.mean(len(shares)) == math.ceil(Fraction(sum(held.values()), len(shares)))
    for tier, layers in zip(stored.by_tier(tiers), tiers, strict=True):
        mean = Fraction(sum(held[layer] for layer in layers), len(layers))
        assert tier.stored_tokens == math.ceil(mean)


def test_tiers_are_named_by_their_layers() -> None:
    stored = LayersStored(1000, {3: 512, 4: 512, 7: 512, 5: 96})

    assert stored.by_tier([(3, 4, 7), (5,), (6,)]) == [
        TierStored("3-4,7", 512),
        TierStored("5", 96),
        TierStored("6", 1000),
    ]


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
        "3 requests finished; 1 sieved: 1000 prompt tokens, 300 kept per sieved layer,"
        " 7 blocks freed, 20.00% of attention lost; 1 in shadow: 50.00% of attention would be"
        " lost; 0.25 s of scoring and compaction"
    )


def test_the_log_says_when_nothing_was_sieved() -> None:
    totals = SieveTotals()
    totals.add(report(sieved=False, attention_mass_lost=None))

    assert str(totals) == "1 request finished, none of them longer than its budget"


FASTKV = PrunedPrompt("fastkv", 14, "fixed", 300, 0.65, seconds_saved=0.5)
ASL = PrunedPrompt("asl", 12, "threshold", 300, 0.55, 1.0, {"9": 1.0, "10": 0.4, "12": 0.2})
UNSETTLED = PrunedPrompt("asl", None, "never", 1000, 1.0, seconds_saved=0.0)


def test_what_pruning_did_is_a_part_of_the_report() -> None:
    plain = report(pruned=ASL).as_dict()

    assert json.loads(json.dumps(plain)) == plain
    assert plain["pruned"] == {
        "method": "asl",
        "layer": 12,
        "reason": "threshold",
        "kept_tokens": 300,
        "computed_share": 0.55,
        "seconds_saved": 1.0,
        "relative_variance": {"9": 1.0, "10": 0.4, "12": 0.2},
    }
    assert report().as_dict()["pruned"] is None


def test_what_pruning_did_in_words() -> None:
    assert pruning_sentence(report().as_dict()) is None
    assert pruning_sentence(report(pruned=FASTKV).as_dict()) == (
        "fastkv pruned after layer 14 (fixed): 300 of 1000 tokens went on, 65% of the prompt's"
        " work was done, about 0.50 s saved"
    )
    assert pruning_sentence(report(pruned=UNSETTLED).as_dict()) == (
        "asl pruned nothing: the ranks of tokens did not settle"
    )
    assert pruning_sentence(report(not_pruned="the prompt fits its budget").as_dict()) == (
        "not pruned: the prompt fits its budget"
    )


def test_the_log_says_what_pruning_did() -> None:
    totals = SieveTotals()
    for pruned in (FASTKV, ASL, ASL):
        totals.add(report(pruned=pruned))
    totals.add(report(not_pruned="1000 tokens must be read at once"))
    # Nothing was to be gained of a prompt that fits its budget.
    totals.add(report(sieved=False, not_pruned="the prompt fits its budget"))

    assert (
        "; 3 pruned while read (1 fastkv, 2 asl): 58% of their prompts' work done, about 2.50 s"
        " saved; 1 to be pruned and could not be; "
    ) in str(totals)
