"""The quantities that are compared, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvsieve.bench.ratios import ratio
from kvsieve.bench.schema import ArmRun, Quantiles


@dataclass(frozen=True)
class Quantity:
    """One figure of a run.

    Attributes:
        key: Its key in `Repeat.ratios`.
        label: What tables call it; `{resource}` stands for CPU or GPU.
        unit: Its unit, or "".
        higher_is_better: None where neither is.
        read: Reads it from a run; None if it was not measured.
    """

    key: str
    label: str
    unit: str
    higher_is_better: bool | None
    read: Callable[[ArmRun], float | None]


def _field(key: str, label: str, unit: str, higher_is_better: bool | None) -> Quantity:
    def read(run: ArmRun) -> float | None:
        value: float | None = getattr(run, key)
        return value

    return Quantity(key, label, unit, higher_is_better, read)


def _kv_per_request(run: ArmRun) -> float | None:
    if run.kv_mean_mib is None or not run.running_mean:
        return None
    return run.kv_mean_mib / run.running_mean


_LEAST_REQUESTS = {"p50": 1, "p90": 10, "p99": 100}
"""Requests from which on a percentile is more than the slowest of them."""


def _quantiles(field: str, label: str) -> list[Quantity]:
    def quantity(name: str) -> Quantity:
        def read(run: ArmRun) -> float | None:
            if len(run.requests) < _LEAST_REQUESTS[name]:
                return None
            quantiles: Quantiles = getattr(run, field)
            value: float = getattr(quantiles, name)
            return value

        return Quantity(f"{field}_{name}", f"{label} {name}", "s", False, read)

    return [quantity(name) for name in Quantiles.model_fields]


QUANTITIES: tuple[Quantity, ...] = (
    _field("output_tokens_per_s", "output tokens per second", "/s", True),
    _field("total_tokens_per_s", "all tokens per second", "/s", True),
    _field("requests_per_s", "requests per second", "/s", True),
    _field("output_tokens_per_resource_s", "output tokens per {resource} second", "/s", True),
    *_quantiles("ttft", "TTFT"),
    *_quantiles("tpot", "TPOT"),
    *_quantiles("latency", "end to end"),
    _field("goodput_per_s", "requests within the goals per second", "/s", True),
    _field("goodput_share", "requests within the goals", "share", True),
    Quantity("kv_per_request", "KV memory of a running request", "MiB", False, _kv_per_request),
    # Neither way is better: a sieve that lets more requests run fills the pool as well.
    _field("kv_peak", "KV pool in use, peak", "share", None),
    _field("kv_mean", "KV pool in use, mean", "share", None),
    _field("kv_peak_mib", "KV memory in use, peak", "MiB", None),
    _field("kv_mean_mib", "KV memory in use, mean", "MiB", None),
    _field("running_max", "requests running at once, most", "", None),
    _field("running_mean", "requests running at once, mean", "", None),
    _field("preemptions", "preemptions", "", None),
)
BY_KEY = {quantity.key: quantity for quantity in QUANTITIES}


def ratios_to_stock(run: ArmRun, stock: ArmRun) -> dict[str, float | None]:
    """Every quantity of a run divided by that of stock in the same repeat."""
    return {each.key: ratio(each.read(run), each.read(stock)) for each in QUANTITIES}
