"""A result as a page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvsieve.bench.options import STOCK
from kvsieve.bench.quantities import BY_KEY
from kvsieve.bench.schema import BenchResult, PoolSample, Sweep, WorkloadResult
from kvsieve.bench.sentences import load_text, sentences
from kvsieve.bench.tables import median_over_repeats, tables_of
from kvsieve.reports.figures import Bars, Figure, Reference, Series, bar_figure, line_figure
from kvsieve.reports.page import Section, render_page

MOST_POINTS = 150
"""Of a line over time; more cannot be told apart."""


def render(result: BenchResult) -> str:
    """The text of an HTML file about a complete result."""
    sections = [_section(result, workload) for workload in result.workloads]
    sections.append(Section("How it was measured", _method(result)))
    return render_page(
        f"What a KV budget saves: {result.model.name}",
        summary=sentences(result),
        sections=sections,
        provenance=result.provenance,
    )


def _method(result: BenchResult) -> str:
    notes = "\n\n".join(result.notes)
    return (
        "Stock vLLM and the sieved servers got the same requests over HTTP, one server at a time,"
        " and their order turned round from one repeat to the next. A ratio is taken within a"
        f" repeat; what is shown is the median over the repeats.\n\n{load_text(result)}\n\n{notes}"
    )


def _section(result: BenchResult, workload: WorkloadResult) -> Section:
    figures: list[Figure] = []
    if workload.repeats:
        figures += [_throughput(result, workload), _latency(workload), _pool(result, workload)]
    if workload.sweep:
        figures.append(_sweep(workload.name, workload.sweep))
    text = (
        f"{workload.summary[0].upper()}{workload.summary[1:]}. At the scale of this run, prompts of"
        f" {_range(*workload.prompt_tokens)} tokens and outputs of"
        f" {_range(*workload.output_tokens)}. TTFT is the time to the first token, TPOT the time"
        " per output token after it; p50 is the median."
    )
    return Section(workload.name, text, tuple(figures), tables_of(result, workload))


def _range(low: int, middle: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,}-{high:,} (median {middle:,})"


def _arms(result: BenchResult) -> list[str]:
    return [record.name for record in result.arms]


def _spread(workload: WorkloadResult, arm: str, key: str) -> tuple[float, float, float]:
    quantity = BY_KEY[key]
    values = [quantity.read(repeat.arms[arm]) for repeat in workload.repeats]
    known = [value for value in values if value is not None]
    middle = median_over_repeats(workload, arm, quantity)
    if middle is None:
        return math.nan, math.nan, math.nan
    return middle, min(known), max(known)


def _throughput(result: BenchResult, workload: WorkloadResult) -> Figure:
    keys = {
        "output_tokens_per_s": "per second",
        "output_tokens_per_resource_s": f"per {result.resource.upper()} second",
    }
    bars = []
    for arm in _arms(result):
        spreads = [_spread(workload, arm, key) for key in keys]
        middles, lows, highs = zip(*spreads, strict=True)
        bars.append(Bars(arm, middles, lows, highs))
    return bar_figure(
        list(keys.values()),
        bars,
        value_label="output tokens",
        title="Throughput",
        caption="Median over the repeats; the whiskers reach from the least to the most.",
    )


def _latency(workload: WorkloadResult) -> Figure:
    keys = {
        f"{kind}_{quantile}": f"{kind.upper()} {quantile}"
        for kind in ("ttft", "tpot")
        for quantile in ("p50", "p90", "p99")
    }
    # Stock's own bars are 1: the reference, and every arm keeps its colour of the other figures.
    bars = [Bars(STOCK, [1.0] * len(keys))]
    for arm in workload.ratios:
        found = [workload.ratios[arm].get(key) for key in keys]
        bars.append(
            Bars(
                arm,
                [each.median if each else math.nan for each in found],
                [each.min if each else math.nan for each in found],
                [each.max if each else math.nan for each in found],
            )
        )
    return bar_figure(
        list(keys.values()),
        bars,
        value_label="ratio to stock (below 1: faster)",
        title="Time to first token and per output token",
        caption="Median of the repeats' ratios; the whiskers reach from the least to the most.",
    )


def _pool(result: BenchResult, workload: WorkloadResult) -> Figure:
    """KV memory over time, of the last repeat: the earlier ones are in the JSON."""
    repeat = workload.repeats[-1]
    sizes = {record.name: record.pool_bytes for record in result.arms}
    are_known = all(sizes[arm] for arm in repeat.arms)
    series = []
    for arm in _arms(result):
        samples = thin(repeat.arms[arm].samples, MOST_POINTS)
        unit = (sizes[arm] or 0) / 2**20 if are_known else 100.0
        series.append(
            Series(arm, [each.at_s for each in samples], [each.kv_usage * unit for each in samples])
        )
    if not any(len(one.x) for one in series):
        # A run that was over before the first look; the notes say so.
        series = [Series(arm, [0.0], [0.0]) for arm in _arms(result)]
    return line_figure(
        series,
        x_label="seconds since the first request",
        y_label="KV blocks in use, MiB" if are_known else "KV blocks in use, % of the pool",
        title="KV blocks over time",
        caption=f"Repeat {len(workload.repeats)} of {len(workload.repeats)}.",
    )


def thin(samples: Sequence[PoolSample], most: int) -> list[PoolSample]:
    """At most `most` samples: of each stretch the one with the highest usage, so peaks stay."""
    if len(samples) <= most:
        return list(samples)
    size = math.ceil(len(samples) / most)
    return [
        max(samples[start : start + size], key=lambda each: each.kv_usage)
        for start in range(0, len(samples), size)
    ]


def _sweep(name: str, sweep: Sweep) -> Figure:
    series = []
    for arm, unordered in sweep.points.items():
        points = sorted(unordered, key=lambda point: point.concurrency)
        series.append(
            Series(
                arm,
                [point.concurrency for point in points],
                [point.run.ttft.p50 for point in points],
            )
        )
    return line_figure(
        series,
        x_label="clients at once",
        y_label="TTFT p50, s",
        title=f"How many clients keep the bound: {name}",
        reference=Reference("bound", sweep.bound_s),
    )
