"""Two earlier results side by side: what differs between them, and what can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvsieve.bench.quantities import QUANTITIES
from kvsieve.bench.schema import KIND, SCHEMA_VERSION, BenchResult, WorkloadResult
from kvsieve.bench.tables import answer, median_over_repeats, quantity_label, ratio_text
from kvsieve.core.errors import KvsieveError
from kvsieve.reports.page import Table


@dataclass(frozen=True)
class Comparison:
    """What two results have in common.

    Attributes:
        differences: Sentences on what differs between the two runs.
        refused: Sentences on what cannot be compared, and why.
        tables: What can be, side by side. Nothing is divided: the runs are no pairs.
    """

    differences: tuple[str, ...]
    refused: tuple[str, ...]
    tables: tuple[Table, ...]


def load_result(path: Path) -> BenchResult:
    """Read a result that `--json` wrote.

    Raises:
        KvsieveError: The file cannot be read, or is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KvsieveError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise KvsieveError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise KvsieveError(f"{path} is no result of `kvsieve bench --json`")
    if (version := content.get("schema_version")) != SCHEMA_VERSION:
        raise KvsieveError(
            f"{path} has schema version {version!r}, and this kvsieve reads {SCHEMA_VERSION}: read"
            " it with the kvsieve that wrote it, or measure again"
        )
    try:
        return BenchResult.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise KvsieveError(f"{path} is damaged: {where}: {first['msg']}") from None


def compare(a: BenchResult, b: BenchResult) -> Comparison:
    """Set two results side by side.

    Raises:
        KvsieveError: Nothing of them can be compared; says every reason.
    """
    hard = [*_incomplete(a, "A"), *_incomplete(b, "B"), *_other_question(a, b)]
    if hard:
        raise KvsieveError("these results cannot be compared: " + "; ".join(hard))
    differences = tuple(_differences(a, b))
    refused: list[str] = []
    tables: list[Table] = []
    is_same_machine = _machine(a) == _machine(b)
    if not is_same_machine:
        refused.append(
            "absolute figures (tokens per second, seconds) are left out, since the machines differ"
        )
    of_b = {workload.name: workload for workload in b.workloads}
    names_of_a = {workload.name for workload in a.workloads}
    for name in [
        *(n for n in names_of_a if n not in of_b),
        *(n for n in of_b if n not in names_of_a),
    ]:
        refused.append(f"{name} is in one of them only")
    for workload in a.workloads:
        other = of_b.get(workload.name)
        if other is None:
            continue
        if _shape(workload) != _shape(other):
            refused.append(
                f"{workload.name} has other lengths (prompts {_tokens(workload.prompt_tokens)}"
                f" against {_tokens(other.prompt_tokens)}, outputs"
                f" {_tokens(workload.output_tokens)} against {_tokens(other.output_tokens)})"
            )
            continue
        tables += _tables(a, b, workload, other, is_same_machine)
    if not tables:
        reasons = "; ".join(refused) or "they have no measurement in common"
        raise KvsieveError(f"these results cannot be compared: {reasons}")
    return Comparison(differences, tuple(refused), tuple(tables))


def _incomplete(result: BenchResult, name: str) -> Iterator[str]:
    if not result.complete:
        yield f"{name} is incomplete ({(result.failure or 'interrupted').splitlines()[0]})"


def _other_question(a: BenchResult, b: BenchResult) -> Iterator[str]:
    if not _is_same_model(a, b):
        yield f"the model is {a.model.given} in A and {b.model.given} in B"
    if a.resource != b.resource:
        yield f"A was measured on a {a.resource.upper()} and B on a {b.resource.upper()}"
    loads = (a.load, b.load)
    for name in ("concurrency", "rate", "scale"):
        one, two = (getattr(load, name) for load in loads)
        if one != two:
            yield f"the load differs: {name} {one} in A and {two} in B"


def _is_same_model(a: BenchResult, b: BenchResult) -> bool:
    one, two = a.model, b.model
    if one.config_sha256 and two.config_sha256:
        # The same model lies in another folder on another machine.
        return one.config_sha256 == two.config_sha256
    return one.name == two.name


def _machine(result: BenchResult) -> tuple[Any, ...]:
    machine = result.provenance.get("machine", {})
    return tuple(str(machine.get(key)) for key in ("cpu", "cores", "gpus"))


def _shape(workload: WorkloadResult) -> tuple[Any, ...]:
    return workload.summary, workload.prompt_tokens, workload.output_tokens


def _tokens(lengths: tuple[int, int, int]) -> str:
    return f"{lengths[0]}-{lengths[2]}"


def _differences(a: BenchResult, b: BenchResult) -> Iterator[str]:
    """One sentence for each thing that is not the same, the important first."""
    pairs: list[tuple[str, Any, Any]] = [("flags of vLLM", list(a.flags), list(b.flags))]
    machines = [result.provenance.get("machine", {}) for result in (a, b)]
    for key in ("system", "cpu", "cores", "memory_gib", "gpus"):
        pairs.append((f"machine, {key}", *(machine.get(key) for machine in machines)))
    versions = [result.provenance.get("versions", {}) for result in (a, b)]
    for key in sorted(set(versions[0]) | set(versions[1])):
        pairs.append((f"version of {key}", *(version.get(key) for version in versions)))
    for key in ("commit", "source_sha256"):
        pairs.append((key, a.provenance.get(key), b.provenance.get(key)))
    for key in type(a.load).model_fields:
        pairs.append((f"load, {key}", getattr(a.load, key), getattr(b.load, key)))
    pairs.append(("servers one at a time", a.one_at_a_time, b.one_at_a_time))
    settings = [{arm.name: arm.settings for arm in result.arms} for result in (a, b)]
    pools = [{arm.name: arm.pool_bytes for arm in result.arms} for result in (a, b)]
    for arm in settings[0]:
        if arm in settings[1]:
            pairs.append((f"settings of {arm}", settings[0][arm], settings[1][arm]))
            pairs.append((f"pool of {arm}, bytes", pools[0][arm], pools[1][arm]))
    for what, one, two in pairs:
        if one != two:
            yield f"{what}: {one} in A, {two} in B"


def _tables(
    a: BenchResult,
    b: BenchResult,
    one: WorkloadResult,
    two: WorkloadResult,
    is_same_machine: bool,
) -> Iterator[Table]:
    arms = list(dict.fromkeys([*one.ratios, *two.ratios]))
    columns = tuple(f"{arm}, {name}" for arm in arms for name in ("A", "B"))
    rows = []
    for quantity in QUANTITIES:
        cells = [
            ratio_text(each.ratios.get(arm, {}).get(quantity.key))
            for arm in arms
            for each in (one, two)
        ]
        if any(cells):
            rows.append((quantity.label.format(resource=a.resource.upper()), *cells))
    if rows:
        yield Table(
            ("ratio to stock", *columns), tuple(rows), f"{one.name}: each run's own ratios to stock"
        )
    if is_same_machine and one.repeats and two.repeats:
        yield _absolute(a, one, two)
    if one.sweep and two.sweep and one.sweep.bound_s == two.sweep.bound_s:
        names = [arm for arm in one.sweep.points if arm in two.sweep.points]
        yield Table(
            ("arm", "A", "B"),
            tuple((arm, answer(one.sweep, arm), answer(two.sweep, arm)) for arm in names),
            f"{one.name}: clients at once with TTFT p50 below {one.sweep.bound_s:g} s",
        )


def _absolute(result: BenchResult, one: WorkloadResult, two: WorkloadResult) -> Table:
    in_two = two.repeats[0].arms
    arms = [arm for arm in one.repeats[0].arms if arm in in_two]
    rows = []
    for quantity in QUANTITIES:
        values = [median_over_repeats(each, arm, quantity) for arm in arms for each in (one, two)]
        if any(value is not None for value in values):
            cells = [None if value is None else f"{value:,.4g}" for value in values]
            rows.append((quantity_label(quantity, result.resource), *cells))
    return Table(
        ("measured", *(f"{arm}, {name}" for arm in arms for name in ("A", "B"))),
        tuple(rows),
        f"{one.name}: medians of two runs that are no pairs, on machines of one kind",
    )
