"""What a soak showed: counts, latencies, growth, leaks, and whether it passes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from soaking.client import Outcome
from soaking.watch import PREEMPTIONS, RUNNING, USAGE, WAITING, Watch, slope

FINE = ("ok", "left", "refused")
SHORTEST_TREND_S = 900
"""Memory still warms up in a shorter soak: its growth is shown and not judged."""


def summarize(
    watches: Sequence[Watch],
    outcomes: Sequence[Outcome],
    drained: dict[str, bool],
    seconds: float,
    max_growth: float,
) -> dict[str, Any]:
    """The summary, with what failed as sentences under "problems"."""
    servers: dict[str, Any] = {}
    problems: list[str] = []
    for watch in watches:
        name = watch.server.name
        ours = [outcome for outcome in outcomes if outcome.server == name]
        servers[name] = _server(watch, ours, seconds) | {"drained": drained[name]}
        bad = [outcome for outcome in ours if outcome.status not in FINE]
        if bad:
            problems.append(f"{name}: {len(bad)} unexpected error(s)")
        problems += _leaks(name, servers[name])
        problems += _growth(name, servers[name], seconds, max_growth)
        if not all(root.is_running() for root in watch.roots):
            problems.append(f"{name}: its process ended")
        if not any(outcome.status == "ok" for outcome in ours):
            problems.append(f"{name}: no request was answered")
    return {
        "seconds": seconds,
        "max_growth_mb_per_hour": max_growth,
        "servers": servers,
        "kinds": _kinds(outcomes),
        "refusals": sorted({outcome.said for outcome in outcomes if outcome.status == "refused"}),
        "paired": _paired(watches, outcomes, servers),
        "problems": problems,
    }


def _server(watch: Watch, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    samples, last = watch.samples, watch.samples[-1]
    trend = slope(samples, seconds)
    usage = last.get(USAGE)
    blocks = last.get("num_blocks")
    during = [sample for sample in samples if sample["at"] <= seconds] or samples
    return {
        "url": watch.server.url,
        "budgets_per_request": watch.server.sieve,
        "requests": len(outcomes),
        "reports": sum(outcome.sieved is not None for outcome in outcomes),
        "sieved": sum(outcome.sieved is True for outcome in outcomes),
        "cpu_s": max(sample["cpu_s"] for sample in during) - samples[0]["cpu_s"],
        "rss_mb": {"first": samples[0]["rss_mb"], "last": during[-1]["rss_mb"]},
        "growth_mb_per_hour": trend and {"slope": trend.per_hour, "error": trend.error},
        "growth_samples": trend.samples if trend else 0,
        "peak_usage": max((sample.get(USAGE, 0.0) for sample in samples), default=None),
        "peak_running": max((sample.get(RUNNING, 0.0) for sample in samples), default=None),
        "preemptions": last.get(PREEMPTIONS),
        "final_usage": usage,
        "leaked_requests": _sum(last.get(RUNNING), last.get(WAITING)),
        "leaked_blocks": None if usage is None or blocks is None else round(usage * (blocks - 1)),
        "own_metrics": {key: value for key, value in last.items() if "kvsieve" in key},
        "metrics_misses": watch.misses,
    }


def _sum(*values: float | None) -> float | None:
    return None if None in values else sum(value for value in values if value is not None)


def _leaks(name: str, server: dict[str, Any]) -> list[str]:
    if server["drained"]:
        return []
    return [
        f"{name}: after the drain {server['leaked_requests']} request(s) are left and"
        f" {server['leaked_blocks']} block(s) are held (usage {server['final_usage']})"
    ]


def _growth(name: str, server: dict[str, Any], seconds: float, most: float) -> list[str]:
    growth = server["growth_mb_per_hour"]
    server["growth_judged"] = growth is not None and seconds >= SHORTEST_TREND_S
    if server["growth_judged"] and growth["slope"] - 2 * growth["error"] > most:
        return [
            f"{name}: memory grows by {growth['slope']:.1f} +- {growth['error']:.1f} MB/h,"
            f" more than {most:g}"
        ]
    return []


def _kinds(outcomes: Sequence[Outcome]) -> dict[str, dict[str, dict[str, int]]]:
    kinds: dict[str, dict[str, Counter[str]]] = {}
    for outcome in outcomes:
        by_server = kinds.setdefault(outcome.kind, {})
        by_server.setdefault(outcome.server, Counter())[outcome.status] += 1
    return {
        kind: {server: dict(counts) for server, counts in by_server.items()}
        for kind, by_server in sorted(kinds.items())
    }


def _quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that is at least as large as this share of them."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _paired(
    watches: Sequence[Watch], outcomes: Sequence[Outcome], servers: dict[str, Any]
) -> dict[str, Any]:
    """Latencies over the jobs that every server answered; ratios of the first to the second."""
    names = [watch.server.name for watch in watches]
    done: dict[str, dict[int, Outcome]] = {name: {} for name in names}
    for outcome in outcomes:
        if outcome.status == "ok":
            done[outcome.server][outcome.job] = outcome
    common = sorted(set.intersection(*(set(jobs) for jobs in done.values())))
    result: dict[str, Any] = {"jobs": len(common), "servers": {}, "ratios": {}}
    for name in names:
        latencies = [done[name][job].seconds for job in common]
        firsts = [first for job in common if (first := done[name][job].first_seconds) is not None]
        result["servers"][name] = {
            "latency_p50_s": _quantile(latencies, 0.5),
            "latency_p99_s": _quantile(latencies, 0.99),
            "first_chunk_p50_s": _quantile(firsts, 0.5),
            "first_chunk_p99_s": _quantile(firsts, 0.99),
        }
    if len(names) == 2 and common:
        one, two = (result["servers"][name] for name in names)
        result["ratios"] = {
            key: one[key] / two[key] for key in one if one[key] is not None and two[key]
        }
        result["ratios"]["median of the jobs' own"] = statistics.median(
            done[names[0]][job].seconds / done[names[1]][job].seconds for job in common
        )
        cpu = [servers[name]["cpu_s"] for name in names]
        result["ratios"]["cpu_s"] = cpu[0] / cpu[1] if cpu[1] else None
    return result


def print_summary(console: Console, summary: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """The summary as tables, every error with its text, and the verdict."""
    names = list(summary["servers"])
    table = Table(title="requests by kind and status", title_justify="left")
    for column in ("kind", *names):
        table.add_column(column)
    for kind, by_server in summary["kinds"].items():
        cells = (
            ", ".join(f"{count} {status}" for status, count in by_server.get(name, {}).items())
            for name in names
        )
        table.add_row(kind, *cells)
    console.print(table)
    table = Table(title="servers", title_justify="left")
    table.add_column("")
    for column in (*names, *(["ratio"] if len(names) == 2 else [])):
        table.add_column(column, justify="right")
    paired = summary["paired"]
    for key in paired["servers"][names[0]]:
        _row(table, key, [paired["servers"][name][key] for name in names], paired["ratios"])
    _row(table, "median of the jobs' own", [None] * len(names), paired["ratios"])
    for key in ("cpu_s", "peak_usage", "peak_running", "preemptions", "reports", "sieved"):
        _row(table, key, [summary["servers"][name][key] for name in names], paired["ratios"])
    growths = [summary["servers"][name]["growth_mb_per_hour"] for name in names]
    table.add_row(
        "memory, MB/h",
        *(f"{g['slope']:.1f} +- {g['error']:.1f}" if g else "-" for g in growths),
    )
    for key in ("first", "last"):
        _row(table, f"RSS {key}, MB", [summary["servers"][n]["rss_mb"][key] for n in names], {})
    for key in ("final_usage", "leaked_requests", "leaked_blocks"):
        _row(table, key, [summary["servers"][name][key] for name in names], {})
    console.print(table)
    if not all(summary["servers"][name]["growth_judged"] for name in names):
        console.print(f"Memory growth is not judged below {SHORTEST_TREND_S // 60} minutes.")
    for one in summary["bench"]:
        console.print(
            f"vllm bench serve, {one['server']}: "
            + ("cut short" if one["stopped"] else f"{one['succeeded']} ok, {one['failed']} failed")
        )
    for outcome in outcomes:
        if outcome.status not in FINE:
            console.print(
                f"ERROR {outcome.at:.0f} s, {outcome.server}, {outcome.status}: {outcome.error}",
                markup=False,
                soft_wrap=True,
            )
    for problem in summary["problems"]:
        console.print(f"PROBLEM {problem}", markup=False, soft_wrap=True)
    console.print("failed" if summary["problems"] else "passed")


def _row(table: Table, title: str, values: Sequence[Any], ratios: dict[str, Any]) -> None:
    cells = ["-" if value is None else f"{value:.4g}" for value in values]
    ratio = ratios.get(title)
    table.add_row(title, *cells, *([f"{ratio:.3f}"] if ratio is not None else []))
