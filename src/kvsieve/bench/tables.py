"""A result as tables, for the screen and for the report alike."""

from __future__ import annotations

import statistics

from kvsieve.bench.options import STOCK
from kvsieve.bench.quantities import QUANTITIES, Quantity
from kvsieve.bench.schema import ArmRun, BenchResult, RatioSummary, Sweep, WorkloadResult
from kvsieve.reports.page import Table


def quantity_label(quantity: Quantity, resource: str) -> str:
    """A quantity's name and unit, such as "TTFT p50, s"."""
    name = quantity.label.format(resource=resource.upper())
    return name if quantity.unit in ("", "/s", "share") else f"{name}, {quantity.unit}"


def ratio_text(summary: RatioSummary | None) -> str | None:
    """A ratio as "1.46 (1.37 .. 1.49)", with its interval where there is one."""
    if summary is None:
        return None
    if summary.repeats == 1:
        return f"{summary.median:.2f}"
    text = f"{summary.median:.2f} ({summary.min:.2f} .. {summary.max:.2f})"
    if summary.low is None or summary.high is None:
        return text
    return f"{text} [{summary.low:.2f}, {summary.high:.2f}]"


def ratio_table(result: BenchResult, workload: WorkloadResult) -> Table:
    """Every quantity's ratio to stock: a row per quantity, a column per sieved arm."""
    arms = list(workload.ratios)
    rows = []
    for quantity in QUANTITIES:
        cells = [ratio_text(workload.ratios[arm].get(quantity.key)) for arm in arms]
        if any(cells):
            better = {True: "higher", False: "lower", None: ""}[quantity.higher_is_better]
            rows.append((_bare_label(quantity, result.resource), better, *cells))
    count = len(workload.repeats)
    what = f"ratio of one pair ({count} repeat)" if count == 1 else "median (min .. max)"
    interval = (
        " [95% interval of the geometric mean]"
        if any(each.low is not None for arm in arms for each in workload.ratios[arm].values())
        else ""
    )
    over = "" if count == 1 else f" of the ratios of {count} repeats"
    return Table(
        ("ratio to stock", "better", *arms),
        tuple(rows),
        f"{workload.name}, arm/stock: {what}{interval}{over}",
    )


def _bare_label(quantity: Quantity, resource: str) -> str:
    return quantity.label.format(resource=resource.upper())


def median_over_repeats(workload: WorkloadResult, arm: str, quantity: Quantity) -> float | None:
    """Median over the repeats of what was measured of one arm; None if it was not."""
    values = [quantity.read(repeat.arms[arm]) for repeat in workload.repeats]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def value_table(result: BenchResult, workload: WorkloadResult) -> Table:
    """What was measured: a row per quantity, a column per arm."""
    arms = list(workload.repeats[0].arms)
    arms.sort(key=[record.name for record in result.arms].index)
    rows = []
    for quantity in QUANTITIES:
        values = [median_over_repeats(workload, arm, quantity) for arm in arms]
        if any(value is not None for value in values):
            # A column holds seconds, counts and shares: every cell has its own digits.
            cells = [None if value is None else f"{value:,.4g}" for value in values]
            rows.append((quantity_label(quantity, result.resource), *cells))
    count = len(workload.repeats)
    what = "one repeat" if count == 1 else f"medians over {count} repeats"
    return Table(
        ("measured", *arms),
        tuple(rows),
        f"{workload.name}, {what} (never divide these: the ratios are of pairs)",
    )


def proof_table(workload: WorkloadResult) -> Table:
    """What the responses of the sieved arms said, over all repeats."""
    rows = []
    for arm in workload.repeats[0].arms:
        proofs = [repeat.arms[arm].sieve for repeat in workload.repeats]
        told = [proof for proof in proofs if proof is not None]
        if not told:
            continue
        prompt = sum(proof.prompt_tokens for proof in told)
        kept = sum(proof.kept_tokens for proof in told)
        rows.append(
            (
                arm,
                sum(proof.requests for proof in told),
                sum(proof.expected for proof in told),
                sum(proof.sieved for proof in told),
                f"{kept / prompt:.1%}" if prompt else None,
                sum(proof.blocks_freed for proof in told),
            )
        )
    return Table(
        ("arm", "requests", "over budget", "sieved", "prompt kept", "blocks freed"),
        tuple(rows),
        f"{workload.name}: what the responses say the sieve did",
    )


def turn_table(workload: WorkloadResult) -> Table:
    """Median TTFT of each turn of the chats, in seconds."""
    runs = workload.repeats[0].arms
    turns = len(runs[STOCK].ttft_by_turn)

    def cell(arm: str, turn: int) -> str:
        values = [repeat.arms[arm].ttft_by_turn[turn].p50 for repeat in workload.repeats]
        return f"{statistics.median(values):.3g}"

    rows = [
        (arm, *(cell(arm, turn) for turn in range(turns)), _cached(workload, arm)) for arm in runs
    ]
    return Table(
        ("arm", *(f"turn {turn + 1}" for turn in range(turns)), "prompt cached"),
        tuple(rows),
        f"{workload.name}: TTFT p50 by turn, s, median over the repeats",
    )


def _cached(workload: WorkloadResult, arm: str) -> str | None:
    shares = [repeat.arms[arm].cached_share for repeat in workload.repeats]
    known = [share for share in shares if share is not None]
    return f"{statistics.median(known):.0%}" if known else None


def sweep_table(workload: WorkloadResult, sweep: Sweep) -> Table:
    """Every point of a sweep: a row per concurrency, a column per arm."""
    runs: dict[int, dict[str, ArmRun]] = {}
    for arm, points in sweep.points.items():
        for point in points:
            runs.setdefault(point.concurrency, {})[arm] = point.run
    rows: list[tuple[str | float | int | None, ...]] = []
    for clients in sorted(runs):
        cells: list[str | None] = []
        for arm in sweep.points:
            run = runs[clients].get(arm)
            mark = "" if run is None or run.ttft.p50 < sweep.bound_s else " too long"
            cells.append(None if run is None else f"{run.ttft.p50:.3g}{mark}")
        rows.append((clients, *cells))
    rows.append(("highest", *(answer(sweep, arm) for arm in sweep.points)))
    return Table(
        ("clients", *sweep.points),
        tuple(rows),
        f"{workload.name}: TTFT p50, s, by number of clients; bound {sweep.bound_s:g} s",
    )


def answer(sweep: Sweep, arm: str) -> str:
    """The highest concurrency of an arm, in words."""
    if arm not in sweep.highest:
        return "not finished"
    highest = sweep.highest[arm]
    if not highest:
        return "not reached even at 1"
    return f"at least {highest} (the limit)" if highest == sweep.limit else str(highest)


def tables_of(result: BenchResult, workload: WorkloadResult) -> tuple[Table, ...]:
    """All tables of a workload, ratios first."""
    tables: list[Table] = []
    if workload.repeats:
        tables += [ratio_table(result, workload), value_table(result, workload)]
        tables.append(proof_table(workload))
        if len(workload.repeats[0].arms[STOCK].ttft_by_turn) > 1:
            tables.append(turn_table(workload))
    if workload.sweep:
        tables.append(sweep_table(workload, workload.sweep))
    return tuple(tables)
