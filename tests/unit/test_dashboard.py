"""The Grafana dashboard: its structure, its PromQL, and that every metric in it exists."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from kvsieve.engine.frontend.metrics import exported_names

FILE = Path(__file__).parents[2] / "dashboards" / "kvsieve.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SCHEMA_VERSION = 42
"""Of Grafana 12.3 to 13.2; an older Grafana reads what it knows of it."""

VARIABLES = {
    "$__rate_interval": "5m",
    "$__range": "1h",
    "$model_name": ".*",
    "$engine": ".*",
    "$scored": "sieve",
}
"""What Grafana puts in before it sends an expression."""

SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}


def substituted(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def queries() -> Iterator[tuple[str, str]]:
    """Title and PromQL of every query; a variable's `label_values` without its wrapper."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], substituted(target["expr"])
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert found
            yield variable["name"], substituted(found.group(1))


QUERIES = list(queries())


def vllm_names() -> set[str]:
    """Every name that a PromQL expression can use, from the source text of vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    text = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    found = re.findall(r'_(counter|gauge|histogram)_cls\(\s*name="(vllm:\w+)"', text)
    assert len(found) > 30
    return {name + suffix for kind, name in found for suffix in SUFFIXES[kind]}


def selectors(expression: str) -> list[tuple[str, set[str]]]:
    """Metric name and label names of every selector in the expression."""
    found = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name, {matcher.name for matcher in node.matchers.matchers}))

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def unknown(expression: str) -> list[str]:
    """The metrics of an expression that neither kvsieve nor vLLM exports."""
    names = exported_names().keys() | vllm_names()
    return [name for name, _ in selectors(expression) if name not in names]


def grouping_labels(expression: str) -> set[str]:
    found: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            found.update(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def test_it_is_a_dashboard() -> None:
    assert DASHBOARD["schemaVersion"] == SCHEMA_VERSION
    assert DASHBOARD["id"] is None, "an import would overwrite the dashboard of that number"
    assert {"title", "uid", "time", "refresh", "templating", "annotations"} <= DASHBOARD.keys()
    by_name = {each["name"]: each["type"] for each in DASHBOARD["templating"]["list"]}
    assert by_name == {
        "datasource": "datasource",
        "model_name": "query",
        "engine": "query",
        "scored": "custom",
    }


def test_panels_have_ids_titles_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_the_chosen_data_source(panel: dict[str, Any]) -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert panel["datasource"] == chosen
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        assert target["datasource"] == chosen


@pytest.mark.parametrize(("title", "expression"), QUERIES)
def test_an_expression_is_promql_over_metrics_that_exist(title: str, expression: str) -> None:
    assert selectors(expression)
    assert unknown(expression) == []


@pytest.mark.parametrize(("title", "expression"), QUERIES)
def test_an_expression_uses_labels_that_its_metrics_have(title: str, expression: str) -> None:
    ours = exported_names()
    labels: set[str] = set()
    for name, matched in selectors(expression):
        has = set(ours.get(name, ("model_name", "engine", "le")))
        assert matched <= has
        labels |= has
    assert grouping_labels(expression) <= labels


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_keeps_to_the_chosen_models_and_engines(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for _, labels in selectors(substituted(target["expr"])):
            assert {"model_name", "engine"} <= labels


def test_every_metric_of_ours_is_shown() -> None:
    shown = {name for _, expression in QUERIES for name, _ in selectors(expression)}
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in exported_names()}

    assert families <= {re.sub("_(bucket|sum|count)$", "", name) for name in shown}


@pytest.mark.parametrize(
    "expression",
    [
        "rate(kvsieve_prompt_tokens[5m])",
        "kvsieve_blocks_hold",
        "vllm:gpu_cache_usage_perc",
        "vllm:num_preemptions",
        "rate(vllm:inter_token_latency_seconds[5m])",
    ],
)
def test_a_planted_metric_is_found(expression: str) -> None:
    assert len(unknown(expression)) == 1


@pytest.mark.parametrize("expression", ["sum(rate(x[5m])", "rate(x)", "sum by le (x)", "x{a=b}"])
def test_planted_syntax_is_found(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        selectors(expression)
