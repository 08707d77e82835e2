"""Sentences that a reader of the figures must know."""

from __future__ import annotations

from collections.abc import Iterator

from kvsieve.bench.options import STOCK
from kvsieve.bench.schema import ArmRun, BenchResult, WorkloadResult

IDLE_SHARE = 0.05
"""Of a core that the idle servers may take before the reader is told."""

LATE_S = 0.1
"""How late an open loop may send a request before the reader is told, in seconds."""


def notes_on(result: BenchResult) -> tuple[str, ...]:
    """Everything about a result that its figures do not say by themselves."""
    notes: list[str] = []
    sizes = {record.name: record.block_size for record in result.arms}
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{name} {size}" for name, size in sizes.items())
        notes.append(
            f"The arms have different block sizes ({said} tokens), as each has by default;"
            " --block-size makes them equal."
        )
    bytes_of = {record.pool_bytes for record in result.arms}
    if len(bytes_of) > 1:
        notes.append("The arms' KV-cache pools differ in size; --kv-cache-gib makes them equal.")
    if result.provenance.get("source_changed_meanwhile"):
        notes.append("The source changed while this ran: do not quote it.")
    for workload in result.workloads:
        notes += _on_workload(workload)
    return tuple(notes)


def _on_workload(workload: WorkloadResult) -> Iterator[str]:
    runs = [(arm, run) for repeat in workload.repeats for arm, run in repeat.arms.items()]
    for arm in dict.fromkeys(arm for arm, _ in runs):
        of_arm = [run for name, run in runs if name == arm]
        if arm != STOCK:
            yield from _on_sieve(workload.name, arm, of_arm)
    idle = max((run.others_cpu_s / run.wall_s for _, run in runs), default=0.0)
    if idle > IDLE_SHARE:
        yield (
            f"{workload.name}: the servers that had nothing to do took up to {idle:.0%} of a core"
            " from the one that was measured."
        )
    late = max((each.late_s for _, run in runs for each in run.requests), default=0.0)
    if late > LATE_S:
        yield (
            f"{workload.name}: requests were sent up to {late:.2g} s after they were due, because"
            " this process was too busy: the load was lower than --rate."
        )
    unseen = [run for _, run in runs if not run.samples]
    if unseen:
        yield (
            f"{workload.name}: {len(unseen)} runs were over before /metrics was looked at: their"
            " KV usage and their running requests are shown as 0. Use more or longer requests."
        )


def _on_sieve(workload: str, arm: str, runs: list[ArmRun]) -> Iterator[str]:
    proofs = [run.sieve for run in runs if run.sieve is not None]
    requests = sum(proof.requests for proof in proofs)
    expected = sum(proof.expected for proof in proofs)
    sieved = sum(proof.sieved for proof in proofs)
    if not expected:
        yield (
            f"{workload}, {arm}: no prompt is longer than its budget, or the mode drops nothing:"
            " the ratios show what the plugin costs, and nothing that it saves."
        )
    elif sieved < expected:
        yield (
            f"{workload}, {arm}: {sieved} of {requests} requests were sieved, though {expected}"
            " are longer than their budget: the ratios understate the sieve."
        )
