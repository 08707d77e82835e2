"""The configuration: what is accepted, and what each mistake is answered with."""

from __future__ import annotations

from typing import Any

import pytest

from kvsieve import BudgetRule, ConfigError, SieveConfig


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budgt": 3}, ["unknown setting 'budgt'", "did you mean 'budget'?"]),
        ({"zzz": 3}, ["unknown setting 'zzz'", "known settings: policy, ", "budget"]),
        ({"budget": 0}, ["budget", "at least 1 token", "0"]),
        ({"budget": -5}, ["budget", "at least 1 token", "-5"]),
        ({"budget": "ten"}, ["budget", "'ten'", "'10%'"]),
        ({"budget": "0%"}, ["above 0%"]),
        ({"budget": "101%"}, ["at most 100%"]),
        ({"budget": True}, ["budget", "True"]),
        ({"budget": 1.5}, ["budget", "1.5"]),
        ({"budget": None}, ["budget", "None"]),
        ({"policy": 7}, ["policy", "string", "7"]),
        ({"pool_size": 4}, ["pool_size", "odd", "try 5"]),
        ({"pooling": "sum"}, ["pooling", "'max'", "sum"]),
        ({"observation_window": 0}, ["observation_window", "0"]),
        ({"num_sink_tokens": -1}, ["num_sink_tokens", "-1"]),
        ({"full_layers": -1}, ["full_layers", "negative"]),
        ({"full_layers": "3-1"}, ["full_layers", "'3-1'", "backwards"]),
        ({"full_layers": "a"}, ["full_layers", "'a'", "range"]),
        ({"full_layers": [1, -2]}, ["full_layers", "start at 0"]),
        ({"min_budget": 500, "max_budget": 100}, ["min_budget (500)", "max_budget (100)"]),
        ({"budget": 100, "min_budget": 200}, ["budget (100)", "min_budget (200)"]),
        ({"budget": 300, "max_budget": 200}, ["budget (300)", "max_budget (200)"]),
        ({"layer_budgets": "piramid"}, ["layer_budgets", '"uniform", "pyramid"', "'piramid'"]),
        ({"layer_budgets": '{"3-9": 51'}, ["layer_budgets", '"uniform", "pyramid"']),
        ({"layer_budgets": '{"3-9": 51, "3-9": 52}'}, ["layer_budgets: it names '3-9' twice"]),
        ({"layer_budgets": "[" * 100_000}, ["layer_budgets: it is nested too deeply", "pyramid"]),
        ({"layer_budgets": {}}, ["layer_budgets", '"uniform", "pyramid"']),
        ({"layer_budgets": None}, ["layer_budgets", '"uniform", "pyramid"']),
        ({"layer_budgets": [3, 4]}, ["layer_budgets", '"uniform", "pyramid"']),
        ({"layer_budgets": {"9-3": 512}}, ["at '9-3'", "runs backwards"]),
        ({"layer_budgets": {"3-9": "some"}}, ["at '3-9'", "'some'"]),
        ({"layer_budgets": {"3-9": True}}, ["at '3-9'", "True"]),
        ({"layer_budgets": {"3-9": 0.5}}, ["at '3-9'", "0.5"]),
        (
            {"layer_budgets": {"3-9": 512, "8-12": 300, "x": 5, "20": 0, "11,30": "1%"}},
            ["in more than one range: 8-9, 11", "at 'x'", "at '20', a budget must be at least 1"],
        ),
        (
            {"layer_budgets": {"3-9": 90, "10-29": 4000}, "min_budget": 100, "max_budget": 3000},
            [
                "layer_budgets '3-9' (90) is below min_budget (100)",
                "layer_budgets '10-29' (4000) is above max_budget (3000)",
            ],
        ),
        ({"max_tiers": 0}, ["max_tiers", "0"]),
        ({"prune": "asl", "full_layers": "0-2"}, ["every layer to be sieved", "full_layers to 0"]),
        ({"full_layers": 10**30}, ["full_layers: no model has more than 10000 layers"]),
        ({"full_layers": "99999999999"}, ["full_layers: no model has more than 10000 layers"]),
        ({"full_layers": [3, 10**30]}, ["full_layers: no model has a layer beyond 10000"]),
        ({"full_layers": [3, True]}, ["full_layers: expected a number", "True"]),
        ({"protect_roles": ","}, ["protect_roles: '' is no role of a chat", "(given: ',')"]),
        ({"protect_roles": "system,,user"}, ["protect_roles: '' is no role of a chat"]),
    ],
)
def test_a_mistake_is_named_with_what_to_do(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        SieveConfig.parse(settings)

    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        *("budget", "min_budget", "max_budget", "max_tiers", "full_layers", "observation_window"),
        *("num_recent_tokens", "pool_size", "num_sink_tokens"),
    ],
)
def test_true_is_no_number(name: str) -> None:
    for value in (True, False):
        with pytest.raises(ConfigError, match=f"^.*: {name}: expected a number .*{value}"):
            SieveConfig.parse({name: value})


def test_no_text_protects_no_role() -> None:
    for text in ("", "  "):
        assert SieveConfig.parse({"protect_roles": text}).protect_roles == ()
    assert SieveConfig.parse({"protect_roles": "system, user"}).protect_roles == ("system", "user")


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        SieveConfig.parse({"budget": 0, "pool_size": 2, "colour": "red"})

    assert len(error.value.reasons) == 3
    assert "for 3 reasons" in str(error.value)


@pytest.mark.parametrize("settings", [None, [], "budget", 3])
def test_settings_must_be_an_object(settings: Any) -> None:
    with pytest.raises(ConfigError, match="must be a JSON object"):
        SieveConfig.parse(settings)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (3, 3),
        ("3", 3),
        ("0-2", (0, 1, 2)),
        ("0-2, 15", (0, 1, 2, 15)),
        ([5, 1, 5], (1, 5)),
    ],
)
def test_full_layers_in_every_form(given: Any, expected: Any) -> None:
    assert SieveConfig.parse({"full_layers": given}).full_layers == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (" Pyramid", "pyramid"),
        ("uniform", "uniform"),
        ({"3-9": 512, "29, 10-28": " 5 %"}, {"3-9": 512, "10-29": "5%"}),
        ('{"3-9": "512", "10-29": "5%"}', {"3-9": 512, "10-29": "5%"}),
        ({3: 512}, {"3": 512}),
        ({"1,3,5-7": 512}, {"1, 3, 5-7": 512}),
    ],
)
def test_layer_budgets_in_every_form(given: Any, expected: Any) -> None:
    config = SieveConfig.parse({"layer_budgets": given})

    assert config.layer_budgets == expected
    assert SieveConfig.parse({"layer_budgets": config.layer_budgets}) == config


def test_the_default_budget_is_not_held_against_budgets_by_layers() -> None:
    settings = {"layer_budgets": {"3-9": 3000}, "min_budget": 2000}

    assert not SieveConfig.parse(settings).is_budget_used
    assert SieveConfig.parse({**settings, "budget": 2500}).is_budget_used
    with pytest.raises(ConfigError, match=r"budget \(1024\) is below"):
        SieveConfig.parse({"min_budget": 2000})
    # Blocks of 2048 tokens make the default of 1024 too small, but it does not count here.
    assert SieveConfig.parse({"layer_budgets": {"3-9": 3000}}).layer_rules(2048)


def test_budgets_by_layers_become_rules_with_the_bounds() -> None:
    config = SieveConfig.parse(
        {"layer_budgets": {"3,5": 512, "7": "5%"}, "min_budget": 100, "max_budget": 600}
    )

    assert config.layer_rules(32) == (
        ((3, 5), BudgetRule(tokens=512, min_tokens=100, max_tokens=600)),
        ((7,), BudgetRule(share=0.05, min_tokens=100, max_tokens=600)),
    )
    assert SieveConfig().layer_rules(32) == ()
    with pytest.raises(ConfigError, match="'3' 67 is too small: the smallest legal budget is 68"):
        SieveConfig.parse({"layer_budgets": {"3": 67}}).layer_rules(32)


def test_the_budget_rule_names_the_smallest_legal_budget() -> None:
    config = SieveConfig.parse({"budget": 40})

    with pytest.raises(ConfigError, match="smallest legal budget is 68"):
        config.budget_rule(block_size=32)


def test_a_share_is_clamped_to_the_smallest_legal_budget() -> None:
    rule = SieveConfig.parse({"budget": "10%"}).budget_rule(block_size=32)

    assert rule.tokens_for(100) == 68
    assert rule.tokens_for(10_000) == 1000


def test_every_setting_has_a_description_and_tokens_a_unit() -> None:
    for name, field in SieveConfig.model_fields.items():
        assert field.description, name
        if name in {"budget", "min_budget", "max_budget", "observation_window", "pool_size"}:
            assert "token" in field.description, name
