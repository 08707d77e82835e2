from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve.core.budget import BudgetRule
from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError
from kvsieve.core.pruning import Prune
from kvsieve.core.treatment import (
    MODES,
    Treatment,
    check_mode,
    requested_budget,
    requested_protection,
    requested_pruning,
    treat,
)

CONFIG = SieveConfig(budget=256, max_budget=1000)
SMALLEST = 32 + 4 + 32
MAY_HAVE = "may have 'kv_budget', 'kv_protect' and 'kv_prune'"


def test_without_a_wish_the_operator_decides() -> None:
    assert treat("sieve", CONFIG, None, 32) == Treatment("sieve")
    assert treat("shadow", CONFIG, None, 32) == Treatment("shadow")
    assert treat("full", CONFIG, None, 32) == Treatment("full")


@pytest.mark.parametrize(
    ("wish", "budget"),
    [
        (68, 68),
        (1000, 1000),
        ("256", 256),
        (" 256 ", 256),
        (256.0, 256),
        ("10%", 400),
        ("10 %", 400),
        (0.1, 400),
        ("0.5%", SMALLEST),
        ("90%", 1000),
        (0.9, 1000),
    ],
)
def test_a_wish_within_the_bounds_is_granted(wish: Any, budget: int) -> None:
    treatment = treat("sieve", CONFIG, wish, 32)

    assert treatment.mode == "sieve"
    assert treatment.budget is not None
    assert treatment.budget.tokens_for(4000) == budget


@pytest.mark.parametrize(
    "wish",
    [
        *[0, -1, 1, 67, 1001, 10**30, "67", "1001", "full", "FULL", "none", "", "ten", "10%%"],
        *[
            "-10%",
            "0%",
            "101%",
            "1e3",
            0.0,
            -0.5,
            67.5,
            1.0,
            1.5,
            1e20,
            1e300,
            float("nan"),
            float("inf"),
        ],
        *[True, [256], {"tokens": 256}, "68; drop table", "\x00", "9" * 10_000, "\u0661\u0660%"],
    ],
)
def test_any_other_wish_is_refused_in_every_mode(wish: Any) -> None:
    for mode in MODES:
        with pytest.raises(ValueError, match="kv_budget"):
            treat(mode, CONFIG, wish, 32)


@given(
    st.one_of(
        st.integers(), st.floats(), st.text(), st.none(), st.booleans(), st.lists(st.integers())
    )
)
def test_whatever_is_asked_for_is_refused_in_few_words_or_can_be_reported(wish: Any) -> None:
    config = SieveConfig()
    try:
        treatment = treat("sieve", config, wish, 32)
    except ValueError as error:
        refusal = str(error)
        treatment = Treatment("full")
    else:
        refusal = ""
    assert len(refusal) < 500
    if treatment.budget is not None:
        # What a report carries must fit into 64 bits, or the engine's messages break for all.
        assert 0 < treatment.budget.tokens_for(2**40) < 2**63


def test_full_is_allowed_where_the_operator_sets_no_upper_bound() -> None:
    assert treat("sieve", SieveConfig(), "full", 32) == Treatment("full")
    assert treat("shadow", SieveConfig(), " Full", 32) == Treatment("full")


def test_the_operators_lower_bound_holds() -> None:
    config = SieveConfig(budget=512, min_budget=200)
    with pytest.raises(ValueError, match="smallest that this server allows is 200"):
        treat("sieve", config, 199, 32)
    assert treat("sieve", config, 200, 32).budget == BudgetRule(tokens=200, min_tokens=200)


def test_the_full_mode_wins() -> None:
    assert treat("full", CONFIG, 68, 32) == Treatment("full")


@given(st.integers(0, 2000), st.integers(1, 20_000))
def test_a_budget_of_a_request_never_leaves_the_bounds(wish: int, prompt_tokens: int) -> None:
    try:
        treatment = treat("sieve", CONFIG, wish, 32)
    except ValueError:
        assert not SMALLEST <= wish <= 1000
        return
    assert treatment.budget is not None
    assert SMALLEST <= treatment.budget.tokens_for(prompt_tokens) <= 1000


def test_the_wish_is_found_and_a_slip_is_named() -> None:
    assert requested_budget(None) is None
    assert requested_budget({}) is None
    assert requested_budget({"other": 1}) is None
    slips = ("kv_budgte", "kv-budget", "kvbudget", "KV_BUDGET", "kv_budget ", "kv_budgets")
    for slip in (*slips, "kv_max_budget", "kv_budget_in_tokens"):
        for beside in ({}, {"kv_budget": 5}):
            with pytest.raises(ValueError, match="did you mean 'kv_budget'"):
                requested_budget({**beside, slip: 256})


def test_the_two_keys_are_not_taken_for_each_other() -> None:
    assert requested_budget({"kv_protect": "system"}) is None
    assert requested_protection({"kv_budget": 256}) is None
    assert requested_protection({"kv_protect": "0:5", "kv_budget": 1}) == "0:5"
    assert requested_protection(None) is None
    for slip in (
        "kv_protec",
        "kv-protect",
        "kvprotect",
        "KV_PROTECT",
        "kv_protect ",
        "kv_protects",
    ):
        for beside in ({}, {"kv_protect": "0:9"}):
            assert requested_budget({**beside, slip: "0:5"}) is None
            with pytest.raises(ValueError, match="did you mean 'kv_protect'"):
                requested_protection({**beside, slip: "0:5"})


@pytest.mark.parametrize(
    "key",
    [
        *("budget", "max_budget", "layer_budgets", "full_layers", "observation_window"),
        *("policy_options", "num-recent-tokens", "num_sink_tokens", "kv_policy", "kv_max_tiers"),
        *("kv_mode", "kvsieve", "kvsieve_budget", "kvsieve.budget", "KVSIEVE", "kvsieve" * 10_000),
    ],
)
def test_a_setting_of_the_operator_in_a_request_is_refused(key: str) -> None:
    for beside in ({}, {"kv_budget": 300}):
        with pytest.raises(ValueError, match=MAY_HAVE) as refusal:
            requested_budget({**beside, key: "400"})
        assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("key", ["protect_roles", "protect-roles"])
def test_roles_under_the_operators_name_are_refused(key: str) -> None:
    assert requested_budget({key: "system"}) is None
    for beside in ({}, {"kv_protect": "none"}):
        with pytest.raises(ValueError, match=MAY_HAVE):
            requested_protection({**beside, key: "system"})


def test_a_wish_to_be_pruned_is_found_and_a_slip_is_named() -> None:
    every = {"kv_prune": "asl", "kv_budget": 256, "kv_protect": "0:5"}
    assert requested_pruning(every) == "asl"
    assert requested_budget(every) == 256
    assert requested_protection(every) == "0:5"
    assert requested_pruning({"kv_budget": 256}) is None
    assert requested_pruning(None) is None
    for slip in (
        "kv_prun",
        "kv-prune",
        "kvprune",
        "KV_PRUNE",
        "kv_prune_layer",
        "kv_prune_options",
    ):
        for beside in ({}, {"kv_prune": "none"}):
            assert requested_budget({**beside, slip: "asl"}) is None
            assert requested_protection({**beside, slip: "asl"}) is None
            with pytest.raises(ValueError, match="did you mean 'kv_prune'"):
                requested_pruning({**beside, slip: "asl"})


@pytest.mark.parametrize("key", ["prune", "prune_options", "prune-calibration"])
def test_the_operators_settings_of_pruning_are_refused(key: str) -> None:
    assert requested_budget({key: "asl"}) is None
    for beside in ({}, {"kv_prune": "none"}):
        with pytest.raises(ValueError, match=MAY_HAVE):
            requested_pruning({**beside, key: "asl"})


PRUNING = SieveConfig(budget=256, prune="fastkv@12")


@pytest.mark.parametrize(
    ("wish", "prune"),
    [
        (None, Prune("fastkv", 12)),
        ("fastkv", Prune("fastkv")),
        (" asl ", Prune("asl")),
        ("gemfilter@3", Prune("gemfilter", 3)),
        ("none", None),
    ],
)
def test_a_request_is_pruned_as_it_wishes_where_it_is_sieved(
    wish: Any, prune: Prune | None
) -> None:
    def pruned(mode: Any, kv_budget: Any = None) -> Prune | None:
        return treat(mode, PRUNING, kv_budget, 32, kv_prune=wish).prune

    assert pruned("sieve") == prune
    assert pruned("shadow") is pruned("full") is pruned("sieve", "full") is None


@pytest.mark.parametrize("wish", ["", "asl@", "asl@-1", "ASL", "none@3", "pyramidinfer", True, 3])
def test_a_wish_to_be_pruned_that_names_no_method_is_refused_in_every_mode(wish: Any) -> None:
    for mode in MODES:
        with pytest.raises(ValueError, match="kv_prune"):
            treat(mode, PRUNING, None, 32, kv_prune=wish)


def test_a_server_that_prunes_nothing_refuses_a_wish_to_be_pruned() -> None:
    with pytest.raises(ValueError, match="kv_prune asl: this server was started without prune"):
        treat("sieve", CONFIG, None, 32, kv_prune="asl")
    assert treat("sieve", CONFIG, None, 32, kv_prune="none").prune is None


def test_keys_of_other_software_are_let_be() -> None:
    others = {
        **dict.fromkeys(["kv_transfer_params", "ec_transfer_params", "kv_role", "kv_cache_dtype"]),
        **dict.fromkeys(
            ["ngram_size", "window_size", "forced_tokens", "policy", "mode", "pooling"]
        ),
        **dict.fromkeys(["thinking_budget", "budget_tokens", "system", "", 5]),
    }

    assert requested_budget({**others, "kv_budget": 300}) == 300
    assert requested_protection({**others, "kv_protect": "0:5"}) == "0:5"


def test_spans_are_kept_in_order_where_something_is_dropped() -> None:
    wish = [[300, 340], [0, 100], [90, 120]]

    for mode in ("sieve", "shadow"):
        treatment = treat(mode, CONFIG, 300, 32, wish, 340)
        assert treatment.spans == ((0, 120), (300, 340))
        assert hash(treatment) == hash(treat(mode, CONFIG, 300, 32, "0:120,300:340", 340))
    assert treat("full", CONFIG, 300, 32, wish, 340) == Treatment("full")
    assert treat("sieve", SieveConfig(), "full", 32, wish, 340) == Treatment("full")
    assert treat("sieve", CONFIG, None, 32, "none", 340) == Treatment("sieve")


@pytest.mark.parametrize("wish", ["system", "0:341", [[0, 341]], "340:341", "5:4", [[0.0, 1.0]]])
def test_spans_that_cannot_be_kept_are_refused_in_every_mode(wish: Any) -> None:
    for mode in MODES:
        with pytest.raises(ValueError, match="kv_protect"):
            treat(mode, CONFIG, None, 32, wish, 340)


def test_an_unknown_mode_is_refused() -> None:
    assert [check_mode(mode) for mode in MODES] == list(MODES)
    for mode in ("", "Sieve", "off", None, 1):
        with pytest.raises(ConfigError, match="one of sieve, shadow, full"):
            check_mode(mode)
