"""Layer plans and the grouping that vLLM makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvsieve import BudgetRule, ConfigError, SieveConfig
from kvsieve.cli.main import app
from kvsieve.core.cost import request_cost
from kvsieve.core.plan import (
    group_layers,
    make_plan,
    tier_sizes,
)
from kvsieve.core.pruning import PRUNE_NAMES
from kvsieve.core.tiers import make_tiers
from kvsieve.planning.plan import plan_model
from kvsieve.policies import METHODS, method_names
from kvsieve.pruning import PRUNE_METHODS, pruning_from_config


@pytest.mark.parametrize(
    ("full", "sieved", "groups", "padding"),
    # Seen on vLLM 0.32 unless marked: 3 of 30, 4 of 30, 3 of 32, 4 of 32, 8 of 80, 0 of 30.
    [(3, 27, 10, 0), (4, 26, 8, 2), (3, 29, 11, 1), (4, 28, 8, 0), (8, 72, 10, 0), (0, 30, 1, 0)],
)
def test_grouping_follows_vllm(full: int, sieved: int, groups: int, padding: int) -> None:
    grouping = group_layers(full, sieved)

    assert (grouping.num_groups, grouping.padding_layers) == (groups, padding)


def test_layers_are_named_or_counted() -> None:
    layers = tuple(range(6))

    assert make_plan(layers, (), 2).full == (0, 1)
    assert make_plan(layers, (), (1, 5)).full == (1, 5)
    assert make_plan(layers, (), (1, 5)).sieved == (0, 2, 3, 4)
    assert make_plan((2, 5), (0, 1, 3, 4), 1).full == (2,)


@pytest.mark.parametrize(
    ("sievable", "full_layers", "words"),
    [
        ((), 0, "no full-attention layer"),
        ((0, 1), 2, "not one layer"),
        ((0, 1), 9, "not one layer"),
        ((0, 1), (0, 7), r"layers \[7\]"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(
    sievable: tuple[int, ...], full_layers: object, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(sievable, (), full_layers)


def test_the_cost_of_a_request() -> None:
    plan = make_plan(tuple(range(30)), (), 3)
    rule = BudgetRule(tokens=256)
    full = request_cost(plan, None, 2991, 0, 32, page_bytes=10)
    sieved = request_cost(plan, rule, 2991, 0, 32, page_bytes=10)

    # 94 blocks of prompt; 85 of them lie before the start at 2720.
    assert (full.blocks, full.bytes) == (94, 94 * 30 * 10)
    assert (sieved.blocks, sieved.bytes) == (94 + 9 * 9, (94 + 9 * 9) * 3 * 10)
    assert request_cost(plan, rule, 200, 0, 32, 10).bytes == 7 * 30 * 10


@pytest.mark.parametrize(
    ("full", "sieved", "tiers", "expected"),
    [
        (3, 27, 3, (9, 9, 9)),
        (4, 28, 3, (8, 8, 12)),
        (8, 72, 4, (16, 16, 16, 24)),
        (0, 30, 3, (10, 10, 10)),
        (4, 26, 3, (8, 8, 10)),
        (15, 15, 3, (5, 5, 5)),
        (3, 27, 1, (27,)),
        (1, 1, 3, (1,)),
        # Three tiers of ten layers beside twenty would make eleven groups.
        (20, 10, 3, (5, 5)),
    ],
)
def test_the_sizes_of_tiers(full: int, sieved: int, tiers: int, expected: tuple[int, ...]) -> None:
    assert tier_sizes(full, sieved, 0, tiers) == expected


@given(st.integers(0, 20), st.integers(1, 100), st.integers(0, 20), st.integers(1, 12))
def test_tiers_take_all_layers_and_are_few(
    full: int, sieved: int, untouched: int, max_tiers: int
) -> None:
    sizes = tier_sizes(full, sieved, untouched, max_tiers)

    assert sum(sizes) == sieved
    assert min(sizes) >= 1
    assert len(sizes) <= max_tiers
    assert len(sizes) >= min(2, max_tiers, sieved)


@given(st.integers(1, 8), st.integers(2, 10), st.integers(1, 10))
def test_tiers_pad_nothing_and_add_no_group_where_full_layers_divide(
    full: int, groups: int, max_tiers: int
) -> None:
    sieved = full * (groups - 1)
    sizes = tier_sizes(full, sieved, 0, min(max_tiers, groups - 1))
    grouping = group_layers(full, *sizes)

    assert len(sizes) == min(max_tiers, groups - 1)
    assert grouping.padding_layers == 0
    assert grouping.num_groups == groups
    assert all(size % full == 0 for size in sizes)


def test_the_cost_of_a_request_with_tiers() -> None:
    plan = make_plan(tuple(range(30)), (), 3)
    config = SieveConfig.parse({"layer_budgets": {"3-11": 512, "12-29": 96}})
    tiers = make_tiers(config, plan, 32)
    cost = request_cost(plan, tiers, 2991, 40, 32, page_bytes=10)

    # Blocks of 3,031 tokens: 95. Freed: 77 before 2,464 in the first tier, 90 before 2,880.
    assert cost.blocks == 1 * 95 + 3 * (95 - 77) + 6 * (95 - 90)
    assert cost.bytes == cost.blocks * 3 * 10
    one = request_cost(plan, BudgetRule(tokens=256), 2991, 40, 32, page_bytes=10)
    uniform = make_tiers(SieveConfig(budget=256), plan, 32)
    assert request_cost(plan, uniform, 2991, 40, 32, page_bytes=10) == one


def planned(tmp_path: Path, settings: dict[str, object], prompt: int = 4000) -> dict[str, object]:
    shape = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return plan_model(
        str(tmp_path),
        SieveConfig.parse({"full_layers": 3, **settings}),
        prompt_tokens=prompt,
        output_tokens=500,
        block_size=32,
        pool_bytes=2**30,
        kv_bytes=2,
    )


def test_a_plan_shows_the_tiers_of_a_pyramid(tmp_path: Path) -> None:
    facts = planned(tmp_path, {"layer_budgets": "pyramid", "budget": 512})
    tiers = facts["tiers"]

    assert [tier["layers"] for tier in tiers] == [
        [*range(3, 12)],
        [*range(12, 21)],
        [*range(21, 30)],
    ]
    per_layer = [budget for tier in tiers for budget in tier["nominal_per_layer"]]
    assert (per_layer[0], per_layer[-1], sum(per_layer)) == (956, 68, 27 * 512)
    assert [tier["nominal"] for tier in tiers] == [820, 512, 204]
    assert [tier["stored"] for tier in tiers] == [832, 512, 224]
    assert [tier["groups"] for tier in tiers] == [3, 3, 3]
    assert facts["budget"] == {"shape": "pyramid", "nominal": 512, "stored": 523}
    assert facts["groups"] == {"count": 10, "layers_each": 3, "padding_percent": 0}
    # A page is 32 tokens of 3 heads, keys and values of 64 numbers, 2 bytes each.
    full = 141 * 3 * 32 * 3 * 2 * 64 * 2
    assert facts["request"]["sieved"]["end"] == full + sum(tier["bytes"] for tier in tiers)
    assert facts["notes"] == []


def test_a_plan_of_one_tier_is_as_it_was(tmp_path: Path) -> None:
    facts = planned(tmp_path, {"budget": "10%"})

    assert facts["budget"] == {"shape": "uniform", "nominal": 400, "stored": 416}
    (tier,) = facts["tiers"]
    assert (tier["layers"], tier["nominal"], tier["stored"]) == ([*range(3, 30)], 400, 416)
    assert tier["nominal_per_layer"] == [400] * 27


def test_a_plan_warns_of_many_groups_and_of_nothing_to_sieve(tmp_path: Path) -> None:
    many = planned(tmp_path, {"layer_budgets": {"3-9": 512, "10-29": "5%"}})
    short = planned(tmp_path, {"layer_budgets": {"3-11": 512, "12-29": 300}}, prompt=300)
    partly = planned(tmp_path, {"layer_budgets": {"3-11": 512, "12-29": 200}}, prompt=300)

    assert "11 cache groups: each costs host time" in many["notes"][0]
    assert many["groups"]["padding_percent"] == pytest.approx(100 * 3 / 33)
    assert "fits the budget of 300" in short["notes"][0]
    assert partly["notes"] == []
    assert [tier["stored"] for tier in partly["tiers"]] == [300, 204]


def test_the_commands_take_and_show_what_methods_and_settings_need(tmp_path: Path) -> None:
    planned(tmp_path, {})
    budgets = '{"3-9": 512, "10-29": "5%"}'
    words = ["plan", str(tmp_path), "--json", "--full-layers", "3", "--layer-budgets", budgets]
    shown = json.loads(CliRunner().invoke(app, words).stdout)
    text = CliRunner().invoke(app, [word for word in words if word != "--json"]).stdout
    listed = json.loads(CliRunner().invoke(app, ["policies", "--json"]).stdout)
    table = CliRunner().invoke(app, ["policies"]).stdout

    assert [tier["nominal"] for tier in shown["tiers"]] == [512, 200]
    assert "Tiers of the sieved layers" in text
    assert "10-29" in text
    assert [method["name"] for method in listed["policies"]] == method_names()
    for method in listed["policies"]:
        assert method["name"] in table
        assert (method["sees_question"], method["summary"]) == (
            METHODS[method["name"]].sees_question,
            METHODS[method["name"]].summary,
        )


def test_options_of_a_policy_are_given_as_json(tmp_path: Path) -> None:
    planned(tmp_path, {})
    words = ["plan", str(tmp_path), "--json", "--policy-options"]

    assert CliRunner().invoke(app, [*words, "{}"]).exit_code == 0
    for text, said in (
        ("{chunk: 3}", "must be JSON"),
        ('{"none_such": 3}', "'none_such'"),
        ('{"a": 1, "b": 2, "a": 1}', "it names 'a' twice"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * 900 + "]" * 900, "policy_options"),
        ('{"a": ' + "[" * 900 + "]" * 900 + "}", "'a'"),
        ("9" * 5000, "policy_options must be JSON"),
    ):
        result = CliRunner().invoke(app, [*words, text])
        assert isinstance(result.exception, ConfigError)
        assert said in str(result.exception)
        assert len(str(result.exception)) < 500


def test_the_methods_of_pruning_are_listed() -> None:
    listed = json.loads(CliRunner().invoke(app, ["policies", "--json"]).stdout)["pruning"]
    table = CliRunner().invoke(app, ["policies"]).stdout

    assert [method["name"] for method in listed] == list(PRUNE_NAMES)
    for method in listed:
        known = PRUNE_METHODS[method["name"]]
        assert method["name"] in table
        assert (method["layer"], method["of_layers"]) == (known.layer, 32)
        assert (method["window"], method["pooling"], method["pool_size"], method["passes"]) == (
            known.window,
            known.pooling,
            known.pool_size,
            known.num_passes,
        )
        assert (method["threshold"] is None) == (method["name"] in ("fastkv", "gemfilter"))


def token_layers(prompt: int, kept: int, layer: int, passes: int) -> int:
    """Tokens that each of the 30 layers computes, one by one."""
    first_pass = [prompt] * (layer + 1)
    rest = [kept] * (30 if passes == 2 else 30 - len(first_pass))
    return sum(first_pass + rest)


@pytest.mark.parametrize(
    ("settings", "layers", "may_stay_whole", "passes"),
    [
        ({"prune": "fastkv@12"}, (12, 12), False, 1),
        ({"prune": "fastkv", "prune_options": {"layer": 3}}, (3, 3), False, 1),
        ({"prune": "gemfilter@5"}, (5, 5), False, 2),
        # The layer at which judging begins only sets the scale.
        ({"prune": "asl@10"}, (11, 28), True, 1),
        ({"prune": "asl@10", "prune_options": {"max_layer": 20}}, (11, 20), False, 1),
        ({"prune": "asl-two-pass@10"}, (11, 29), False, 2),
    ],
)
def test_a_plan_shows_what_pruning_would_do(
    tmp_path: Path,
    settings: dict[str, object],
    layers: tuple[int, int],
    may_stay_whole: bool,
    passes: int,
) -> None:
    facts = planned(tmp_path, {"full_layers": 0, "budget": 500, **settings})
    pruning = facts["pruning"]

    # Blocks of 32: of 4,000 tokens those from 3,488 on are stored.
    assert pruning["kept_tokens"] == 512
    assert tuple(pruning["layers"].values()) == layers
    assert (pruning["may_stay_whole"], pruning["passes"]) == (may_stay_whole, passes)
    least, most = (token_layers(4000, 512, layer, passes) for layer in layers)
    assert pruning["token_layers"] == {
        "full": 4000 * 30,
        "least": least,
        "most": 4000 * 30 if may_stay_whole else most,
    }
    assert pruning["read_at_once"] == (512 if "fastkv" in str(settings) else 4000)
    assert "every layer allocates all of it" in facts["notes"][0]
    plain = planned(tmp_path, {"full_layers": 0, "budget": 500})
    assert plain["pruning"] is None
    assert plain["request"] == facts["request"]


def test_a_plan_says_when_there_is_nothing_to_prune(tmp_path: Path) -> None:
    facts = planned(tmp_path, {"full_layers": 0, "budget": 5000, "prune": "asl"})

    assert not facts["pruning"]["is_pruned"]
    assert facts["pruning"]["not_pruned"] == "the prompt fits its budget"
    assert set(facts["pruning"]["token_layers"].values()) == {4000 * 30}
    assert not any("allocates" in note for note in facts["notes"])


@pytest.mark.parametrize(("window", "is_pruned"), [(507, True), (508, False), (1024, False)])
def test_a_plan_says_when_the_window_leaves_nothing_to_choose(
    tmp_path: Path, window: int, is_pruned: bool
) -> None:
    options = {"window": window, "num_sink_tokens": 4}
    settings = {"full_layers": 0, "budget": 500, "prune": "fastkv", "prune_options": options}
    pruning = planned(tmp_path, settings)["pruning"]

    assert pruning["kept_tokens"] == 512
    assert pruning["is_pruned"] == is_pruned
    assert (pruning["not_pruned"] is None) == is_pruned


def test_a_model_with_sliding_windows_cannot_be_pruned(tmp_path: Path) -> None:
    shape = {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    words = ["plan", str(tmp_path), "--prune", "fastkv"]
    result = CliRunner().invoke(app, words)

    assert isinstance(result.exception, ConfigError)
    assert "needs every layer to be sieved, and 0, 2 of this model are not" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prune", "fastkv@12"], ["fastkv", "pruned after layer", "of which at most"]),
        (
            ["--prune", "asl"],
            ["first judged layer", "for each prompt; or not at all", "% to 100.0%"],
        ),
        (["--prune", "asl", "--budget", "5000"], ["the prompt fits its budget"]),
    ],
)
def test_the_command_prints_the_plan_of_pruning(
    tmp_path: Path, words: list[str], said: list[str]
) -> None:
    planned(tmp_path, {})
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["plan", str(tmp_path), *words])

    assert result.exit_code == 0, result.exception
    assert all(part in result.stdout for part in said)


@pytest.mark.parametrize("command", ["plan", "serve", "generate", "eval"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prune", "fastkw"], "must be none or one of asl, fastkv"),
        (["--prune", "asl", "--prune-options", "{a: 3}"], "prune_options must be JSON"),
        (["--prune", "asl", "--prune-options", '{"layr": 3}'], "did you mean 'layer'?"),
        (["--prune-options", '{"layer": 3}'], "do nothing while prune is 'none'"),
        (["--prune", "asl", "--prune-calibration", "none.json"], "none.json cannot be read"),
        (["--prune", "asl", "--full-layers", "3"], "set full_layers to 0"),
        (["--prune", "asl", "--layer-budgets", "pyramid"], "leave out layer_budgets"),
    ],
)
def test_settings_of_pruning_are_refused_in_words_by_every_command(
    tmp_path: Path, command: str, words: list[str], said: str
) -> None:
    planned(tmp_path, {})
    more = ["--prompt", "x"] if command == "generate" else []
    result = CliRunner().invoke(app, [command, str(tmp_path), *more, *words])

    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


@pytest.mark.parametrize(
    ("prune", "options", "said"),
    [
        (
            "fastkv@12",
            {"num_sink_tokens": 4},
            "fastkv of 30 layers: after layer 12; window 8, pooling max 7, 4 sinks",
        ),
        (
            "asl@9",
            {},
            "asl of 30 layers: after layer 10 to 28, threshold 0.3 over 8 layers, or not at all;"
            " window 32, pooling avg 7, 0 sinks",
        ),
        (
            "asl-two-pass@9",
            {"max_layer": 20},
            "asl-two-pass of 30 layers: after layer 10 to 20, threshold 0.3 over 8 layers; window"
            " 32, pooling avg 7, 0 sinks, two passes",
        ),
    ],
)
def test_the_log_says_how_a_server_prunes(prune: str, options: dict[str, int], said: str) -> None:
    pruning = pruning_from_config(SieveConfig(prune=prune, prune_options=options))

    assert pruning is not None
    assert str(pruning.settings(pruning.prune, 30)) == said
