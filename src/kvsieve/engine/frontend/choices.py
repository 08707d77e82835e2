"""The reports of a response's choices: where they lie, and how several become one field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kvsieve.core.config import CONFIG_KEY

Report: TypeAlias = dict[str, Any]

CHOICES = "choices"
"""The key under which several reports lie, in the order of `choices[].index`. No field of
a report has this name."""


def report_of(kv_transfer_params: Mapping[str, Any] | None, index: int) -> Report | None:
    """The report of one choice, or None if there is none.

    Args:
        kv_transfer_params: As they come out of the engine, of one prompt.
        index: The choice among those of the prompt.
    """
    found = (kv_transfer_params or {}).get(CONFIG_KEY)
    if not isinstance(found, Mapping):
        return None
    reports = found.get(CHOICES)
    if reports is None:
        return dict(found)
    return reports[index] if index < len(reports) else None


def reports_of(output: Any) -> list[Report | None]:
    """The reports of a `RequestOutput`, in the order of its outputs."""
    return [report_of(output.kv_transfer_params, o.index) for o in output.outputs]


def joined(
    kv_transfer_params: Mapping[str, Any] | None, reports: Sequence[Report | None]
) -> dict[str, Any]:
    """The field of a response with these choices: a plain report for one, a list for several."""
    field = reports[0] if len(reports) == 1 else {CHOICES: list(reports)}
    return {**(kv_transfer_params or {}), CONFIG_KEY: field}


def finished_reports(output: Any, first: int = 0) -> dict[int, Report]:
    """The reports of the choices that end with a `RequestOutput`, by the choice's index.

    A request with stop strings carries a report on every output, so that a report alone
    does not say that its choice ends.

    Args:
        output: What came out of the engine for one prompt.
        first: Index of the prompt's first choice in the response.
    """
    found = {}
    for completion in output.outputs:
        if completion.finish_reason is not None:
            report = report_of(output.kv_transfer_params, completion.index)
            if report is not None:
                found[first + completion.index] = report
    return found
