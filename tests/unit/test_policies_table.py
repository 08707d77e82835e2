"""From settings to a policy: names, options, packages of third parties, and the documentation."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvsieve import ConfigError, SieveConfig
from kvsieve.cli.main import app
from kvsieve.policies import (
    METHODS,
    Method,
    find_method,
    method_names,
    parse_settings,
    policy_from_config,
    read_count,
    read_number,
    read_switch,
)
from tests.unit.policy_parts import Shape, make_policy, make_tensors

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "policies.md").read_text()


def fenced(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS, flags=re.DOTALL)


@pytest.mark.parametrize("name", ["snapkw", "TOVA", "h20"])
def test_a_near_miss_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no policy '{name}'"):
        find_method(name)


def test_a_typing_error_names_the_method_that_was_meant() -> None:
    with pytest.raises(ConfigError, match="did you mean 'snapkv'"):
        parse_settings({"policy": "snapvk"})


@pytest.mark.parametrize("policy", [None, 3, ["snapkv"], {"name": "snapkv"}])
def test_what_is_no_name_is_refused(policy: Any) -> None:
    with pytest.raises(ConfigError, match="there is no policy"):
        parse_settings({"policy": policy})


@pytest.mark.parametrize("given", ["alpha=1", [1], 3])
def test_options_that_are_no_object_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="policy_options"):
        parse_settings({"policy": "adakv", "policy_options": given})


def test_what_the_user_gives_goes_before_the_methods_defaults() -> None:
    config = parse_settings(
        {
            "policy": "rkv",
            "observation_window": 16,
            "pooling": "avg",
            "policy_options": {"mix_lambda": 0.07},
        }
    )
    policy = policy_from_config(config)

    assert (policy.observation_window, policy.num_recent_tokens) == (16, 16)
    assert (policy.pool_size, policy.pooling, policy.num_sink_tokens) == (7, "avg", 4)
    assert config.policy_options == {"mix_lambda": 0.07}


def test_options_not_given_have_the_authors_values_in_the_configuration() -> None:
    config = parse_settings({"policy": "criticalkv", "policy_options": {"epsilon": 0.5}})

    assert config.policy_options == {"first_stage_ratio": 0.5, "epsilon": 0.5}


def test_an_error_of_a_method_is_said_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings({"policy": "adakv", "policy_options": {"alpha": 2}})

    assert caught.value.reasons == (
        "policy_options: alpha must be at least 0 and at most 1, got 2",
    )


def test_an_error_about_a_setting_is_not_put_down_to_the_options() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings({"policy": "rkv", "num_recent_tokens": 4})

    assert caught.value.reasons == (
        "num_recent_tokens (4) must be at least observation_window (8): rkv has no score for the"
        " tokens of its window",
    )


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("adakv", "alpha", -0.1),
        ("adakv", "alpha", float("nan")),
        ("adakv", "alpha", True),
        ("keyformer", "temperature", 0),
        ("keyformer", "temperature", 1e-40),
        ("keyformer", "temperature", 1e38),
        ("keyformer", "temperature", float("inf")),
        ("keyformer", "seed", -1),
        ("keyformer", "seed", 2**12),
        ("keyformer", "seed", 1.5),
        ("chunkkv", "chunk_length", 0),
        ("rkv", "mix_lambda", 1.01),
        ("expected_attention", "n_future_positions", 0),
        ("expected_attention", "use_vnorm", 1),
        ("criticalkv", "first_stage_ratio", 1.5),
        ("criticalkv", "epsilon", -1e-9),
        ("criticalkv", "epsilon", 1e308),
        pytest.param("criticalkv", "epsilon", 10**400, id="criticalkv-epsilon-huge"),
        ("expected_attention", "epsilon", 1e308),
        ("headkv", "temp", 1e308),
        pytest.param("headkv", "temp", 10**400, id="headkv-temp-huge"),
        pytest.param("keyformer", "temperature", 10**400, id="keyformer-temperature-huge"),
        pytest.param("keyformer", "temperature", -(10**400), id="keyformer-temperature-minus-huge"),
        pytest.param("chunkkv", "chunk_length", 10**400, id="chunkkv-chunk_length-huge"),
    ],
)
def test_values_that_an_option_cannot_have_are_refused(name: str, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"policy_options: {option} must be"):
        parse_settings({"policy": name, "policy_options": {option: value}})


def test_a_number_that_no_float_holds_is_refused_in_few_words() -> None:
    with pytest.raises(ConfigError, match="policy_options: beta is too large") as refusal:
        parse_settings({"policy": "headkv", "policy_options": {"beta": 10**400}})
    assert len(str(refusal.value)) < 200


def extreme(name: str, option: str, value: float) -> Any:
    return pytest.param(name, option, value, id=f"{name}-{option}-{value}")


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        extreme("adakv", "alpha", 0),
        extreme("adakv", "alpha", 1),
        extreme("headkv", "temp", 0),
        extreme("headkv", "temp", 10),
        extreme("headkv", "beta", 1e308),
        extreme("criticalkv", "epsilon", 0),
        extreme("criticalkv", "epsilon", 1),
        extreme("criticalkv", "first_stage_ratio", 0),
        extreme("expected_attention", "epsilon", 0),
        extreme("expected_attention", "epsilon", 1),
        extreme("keyformer", "temperature", 0.1),
        extreme("keyformer", "temperature", 1e9),
        extreme("rkv", "mix_lambda", 0),
        extreme("rkv", "mix_lambda", 1),
    ],
)
def test_the_furthest_values_of_an_option_still_rank_the_tokens(
    name: str, option: str, value: float, tmp_path: Path
) -> None:
    policy = make_policy(name, 4, tmp_path, pool_size=1, policy_options={option: value})
    scores = policy.candidate_scores(make_tensors(Shape(300, 2, 2)).evidence(policy), 100)
    ranked = scores[:, policy.num_sink_tokens :]

    assert ranked.isfinite().all()
    for head in ranked:
        assert len(head.unique()) > len(head) // 2


@pytest.mark.parametrize(
    ("read", "default"), [(read_number, 1.5), (read_count, 3), (read_switch, True)]
)
def test_an_option_that_is_not_given_has_its_default(
    read: Callable[..., Any], default: Any
) -> None:
    given = SieveConfig(policy_options={"other": 0})

    assert read(given, {"depth": default}, "depth") == default


# Packages of third parties

MODULE = """
from kvsieve.policies import Method, Policy

def build(config):
    return Policy.with_settings(config, lambda evidence: evidence.window_attention())

DEFAULTS = {"pool_size": 3, "pooling": "max"}
FRIENDLY = Method("friendly", "As SnapKV", "here", True, build, DEFAULTS, {"depth": 1})
STRANGER = Method("other_name", "As SnapKV", "here", True, build)
NOT_ONE = "friendly"
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a module and the metadata of a package with the given entry points on the path."""

    def put(module: str, entry_points: str, name: str = "kvsieve_friendly") -> None:
        site = tmp_path / f"site_of_{name}"
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{name}.py").write_text(module)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kvsieve.policies]\n{entry_points}\n")
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, name, raising=False)

    return put


def test_a_package_of_a_third_party_brings_a_method(install: Callable[..., None]) -> None:
    install(MODULE, "friendly = kvsieve_friendly:FRIENDLY")

    config = parse_settings({"policy": "friendly", "policy_options": {"depth": 2}})
    policy = policy_from_config(config)

    assert method_names() == [*METHODS, "friendly"]
    assert (policy.name, policy.pool_size) == ("friendly", 3)
    tensors = make_tensors(Shape(100, 2, 2))
    snapkv = policy_from_config(parse_settings({"policy": "snapkv", "pool_size": 3}))
    chosen = policy.choose(tensors.evidence(policy), 60)
    assert torch.equal(chosen, snapkv.choose(tensors.evidence(snapkv), 60))
    with pytest.raises(ConfigError, match="friendly has no option 'width'; its options: depth"):
        parse_settings({"policy": "friendly", "policy_options": {"width": 1}})
    with pytest.raises(ConfigError, match="did you mean 'friendly'"):
        parse_settings({"policy": "frindly"})


@pytest.mark.parametrize(
    ("entry_point", "complaint"),
    [
        ("kvsieve_friendly:STRANGER", "must name a kvsieve.policies.Method of that name"),
        ("kvsieve_friendly:NOT_ONE", "must name a kvsieve.policies.Method of that name"),
        ("kvsieve_friendly:MISSING", "cannot be loaded"),
        ("kvsieve_nowhere:FRIENDLY", "cannot be loaded"),
    ],
)
def test_an_entry_point_that_cannot_be_used_is_named(
    install: Callable[..., None], entry_point: str, complaint: str
) -> None:
    install(MODULE, f"friendly = {entry_point}")

    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_settings({"policy": "friendly"})
    assert entry_point in str(caught.value)


def test_a_module_that_fails_is_named(install: Callable[..., None]) -> None:
    install("raise RuntimeError('no such card')", "friendly = kvsieve_friendly:FRIENDLY")

    with pytest.raises(ConfigError) as caught:
        parse_settings({"policy": "friendly"})
    assert caught.value.reasons == (
        "policy: 'friendly' of the package kvsieve_friendly (kvsieve_friendly:FRIENDLY)"
        " cannot be loaded: RuntimeError: no such card",
    )


FAILING = """
from kvsieve.policies import Method, read_number

def build(config):
    {step}

FRIENDLY = Method("friendly", "As SnapKV", "here", True, build, {defaults}, {options})
"""


def failing(step: str = "pass", defaults: str = "{}", options: str = "{}") -> str:
    return FAILING.format(step=step, defaults=defaults, options=options)


PACKAGE = r"'friendly' of the package kvsieve_friendly \(kvsieve_friendly:FRIENDLY\)"


@pytest.mark.parametrize(
    ("step", "complaint"),
    [
        ("return config.colour", f"policy: {PACKAGE} cannot be built: AttributeError: .*colour"),
        ("return {}['depth']", f"policy: {PACKAGE} cannot be built: KeyError: 'depth'"),
        ("return len(3)", f"policy: {PACKAGE} cannot be built: TypeError"),
        ("assert False, 'never'", f"policy: {PACKAGE} cannot be built: AssertionError: never"),
        ("return None", f"policy: {PACKAGE} .* must return .*Policy, and returned a NoneType"),
        ("return build", f"policy: {PACKAGE} .*returned a function"),
        ("raise ValueError('too deep')", rf"policy_options: too deep \(says {PACKAGE}\)"),
        (
            "return read_number(config, {'depth': 'a'}, 'depth')",
            rf"policy_options: depth must be a number, got 'a' \(says {PACKAGE}\)",
        ),
    ],
)
def test_a_method_that_cannot_be_built_is_named(
    install: Callable[..., None], step: str, complaint: str
) -> None:
    install(failing(step), "friendly = kvsieve_friendly:FRIENDLY")

    with pytest.raises(ConfigError, match=complaint):
        parse_settings({"policy": "friendly"})


@pytest.mark.parametrize(
    ("defaults", "options", "complaint"),
    [
        ("{'pool_size': 4}", "{}", "its defaults are wrong: pool_size: .*must be odd"),
        ("{'poolsize': 3}", "{}", "its defaults are wrong: unknown setting 'poolsize'"),
        ("None", "{}", "its defaults or options are wrong"),
        ("{}", "5", "its defaults or options are wrong"),
        ("{'full_layers': {0, 1}}", "{}", "must be JSON: .* set "),
        ("{}", "{'depth': float('nan')}", "must be JSON"),
        ("{}", "{'depth': object()}", "must be JSON"),
    ],
)
def test_values_of_a_method_that_are_wrong_are_not_the_users_fault(
    install: Callable[..., None], defaults: str, options: str, complaint: str
) -> None:
    install(failing("pass", defaults, options), "friendly = kvsieve_friendly:FRIENDLY")

    words = f"policy: {PACKAGE} cannot be used, whatever your settings are: .*{complaint}"
    with pytest.raises(ConfigError, match=words):
        parse_settings({"policy": "friendly"})


def test_a_package_that_is_broken_hides_no_other(install: Callable[..., None]) -> None:
    module = "import kvsieve.policies\nraise SystemExit('[red]no card[/red]')"
    install(module, "broken = kvsieve_broken:METHOD", name="kvsieve_broken")
    module = MODULE.replace('"As SnapKV"', '"As [bold]SnapKV[/bold] [/]"')
    install(module, "friendly = kvsieve_friendly:FRIENDLY")

    listed = CliRunner().invoke(app, ["policies", "--json"])
    shown = CliRunner().invoke(app, ["policies"], terminal_width=200)

    assert (listed.exit_code, shown.exit_code) == (0, 0)
    names = [method["name"] for method in json.loads(listed.stdout)["policies"]]
    assert names == [*METHODS, "friendly"]
    assert "[bold]SnapKV[/bold]" in shown.stdout
    for result in (listed, shown):
        assert "left out: policy: 'broken' of the package kvsieve_broken" in result.stderr
        assert "SystemExit: [red]no card[/red]" in result.stderr


def test_of_two_packages_with_one_name_the_first_that_is_found_wins(
    install: Callable[..., None],
) -> None:
    later = MODULE.replace('"here"', '"the later"')
    install(later, "friendly = kvsieve_later:FRIENDLY", name="kvsieve_later")
    install(MODULE, "friendly = kvsieve_friendly:FRIENDLY")

    # What is installed later goes to the front of the path here.
    assert find_method("friendly").source == "here"
    assert method_names() == [*METHODS, "friendly"]


def test_a_package_cannot_take_the_name_of_one_of_ours(install: Callable[..., None]) -> None:
    install(MODULE, "snapkv = kvsieve_friendly:FRIENDLY")

    assert find_method("snapkv") is METHODS["snapkv"]
    assert method_names() == list(METHODS)


# The documentation


def test_the_example_of_the_documentation_is_a_method(install: Callable[..., None]) -> None:
    (module, _), (project,) = fenced("python"), fenced("toml")
    entry = re.search(r"^(\w+) = \"([\w.]+):(\w+)\"$", project, flags=re.MULTILINE)
    assert entry is not None and '[project.entry-points."kvsieve.policies"]' in project
    install(module, f"{entry[1]} = kvsieve_example:{entry[3]}", name="kvsieve_example")
    tensors = make_tensors(Shape(200, 2, 3))

    policy = policy_from_config(
        parse_settings({"policy": entry[1], "policy_options": {"value_power": 2}})
    )
    scores = policy.candidate_scores(tensors.evidence(policy), 60)

    snapkv = policy_from_config(parse_settings({"policy": "snapkv", "pool_size": 1}))
    attention = snapkv.candidate_scores(tensors.evidence(snapkv), 60)
    norms = tensors.values.abs().sum(dim=-1)[:, :168]
    assert torch.allclose(scores, attention * norms**2, rtol=1e-5)
    assert policy.choose(tensors.evidence(policy), 60).shape == (2, 60)


def test_the_example_of_the_documentation_can_be_run_as_it_stands() -> None:
    namespace = types.ModuleType("example")
    exec(fenced("python")[0], vars(namespace))

    assert isinstance(namespace.VATP, Method)


def test_a_method_can_be_tried_in_the_running_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, trial = fenced("python")
    registered = re.search(r"^METHODS\[.*$", trial, flags=re.MULTILINE)
    assert registered is not None
    namespace: dict[str, Any] = {"METHODS": METHODS}
    exec(method, namespace)
    monkeypatch.setitem(METHODS, "vatp", None)  # Taken out again afterwards.

    exec(registered[0], namespace)

    assert policy_from_config(parse_settings({"policy": "vatp", "budget": 256})).name == "vatp"
    assert method_names() == list(METHODS)


def test_what_a_method_leaves_out_is_kvsieves_own(install: Callable[..., None]) -> None:
    install(MODULE.replace("DEFAULTS,", "{},"), "friendly = kvsieve_friendly:FRIENDLY")

    policy = policy_from_config(parse_settings({"policy": "friendly"}))

    assert (policy.pooling, policy.pool_size, policy.num_sink_tokens) == ("avg", 21, 4)
    assert (policy.observation_window, policy.num_recent_tokens) == (32, 32)
    assert "average pooling of 21, four sinks, a window of 32 queries" in DOCS


def test_every_method_has_its_row_and_its_source_in_the_documentation(tmp_path: Path) -> None:
    rows = {}
    for line in DOCS.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and cells[0].startswith("`"):
            rows[cells[0].strip("`")] = cells[2:]
    assert list(rows) == list(METHODS)
    for name, (window, recent, sinks, pool, question, options) in rows.items():
        policy = make_policy(name, 4, tmp_path)
        assert int(window) == policy.observation_window, name
        assert int(recent) == policy.num_recent_tokens, name
        assert int(sinks) == policy.num_sink_tokens, name
        width = policy.pool_size
        assert pool == ("none" if width == 1 else f"{policy.pooling} {width}"), name
        assert question == ("yes" if METHODS[name].sees_question else "no"), name
        assert re.findall(r"`(\w+)`", options) == list(METHODS[name].options), name
        if METHODS[name].source.startswith(("arXiv", "vLLM")):
            assert re.search(rf"\* \*\*{name}\*\* \({METHODS[name].source}[,)]", DOCS), name


def test_every_option_is_documented_with_what_it_may_be() -> None:
    documented = set()
    for line in DOCS.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and (named := re.fullmatch(r"(.*) \((.*)\)", cells[0])):
            options, methods = (re.findall(r"`(\w+)`", part) for part in named.groups())
            documented |= {(method, option) for method in methods for option in options}
    assert documented == {
        (name, option) for name, method in METHODS.items() for option in method.options
    }
