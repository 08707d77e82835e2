"""From the answers to one load to its figures: pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvsieve.bench.load import Answered
from kvsieve.bench.options import Arm, Goals
from kvsieve.bench.percentiles import percentile, weighted_mean
from kvsieve.bench.proof import prove
from kvsieve.bench.schema import ArmRecord, ArmRun, PoolSample, Quantiles, RequestRecord


@dataclass(frozen=True)
class Costs:
    """What a run cost.

    Attributes:
        cpu_s: CPU seconds of the server.
        client_cpu_s: CPU seconds of the process that sent the load.
        others_cpu_s: CPU seconds of the other arms' servers.
        gpus: GPUs that the server used; 0 on a CPU.
        preemptions: Preemptions.
    """

    cpu_s: float
    client_cpu_s: float
    others_cpu_s: float
    gpus: int
    preemptions: int


def summarise(
    arm: Arm,
    record: ArmRecord,
    answered: Sequence[Answered],
    samples: Sequence[PoolSample],
    costs: Costs,
    goals: Goals,
) -> ArmRun:
    """The figures of one run.

    Args:
        arm: Which arm it was.
        record: What its server said of itself.
        answered: Every request; at least one.
        samples: The pool over time.
        costs: What it cost.
        goals: What counts as a good request.

    Raises:
        BenchError: The responses do not show that the sieve ran.
    """
    proof = prove(
        arm.settings,
        record.block_size,
        [(each.completion.prompt_tokens, each.completion.report) for each in answered],
    )
    began = min(each.completion.sent_at for each in answered)
    ended = max(each.completion.token_times[-1] for each in answered)
    wall = ended - began
    requests = tuple(_request(each, began) for each in answered)
    # What was seen before the first request or after the last token is an idle server.
    during = tuple(each for each in samples if 0 <= each.at_s <= wall)
    output = sum(each.output_tokens for each in requests)
    prompt = sum(each.prompt_tokens for each in requests)
    resource = wall * costs.gpus if costs.gpus else costs.cpu_s
    good = sum(is_good(each, goals) for each in requests) if goals.are_given else None
    times = [each.at_s for each in during]
    usage = [each.kv_usage for each in during]
    running = [each.running for each in during]
    peak, mean = max(usage, default=0.0), weighted_mean(usage, times)
    mib = record.pool_bytes / 2**20 if record.pool_bytes else None
    cached = [each.cached_tokens for each in requests]
    told = [tokens for tokens in cached if tokens is not None]
    turns = range(max(each.turn for each in requests) + 1)
    return ArmRun(
        wall_s=wall,
        resource_s=resource,
        client_cpu_s=costs.client_cpu_s,
        others_cpu_s=costs.others_cpu_s,
        output_tokens_per_s=output / wall,
        total_tokens_per_s=(prompt + output) / wall,
        requests_per_s=len(requests) / wall,
        output_tokens_per_resource_s=output / resource if resource else 0.0,
        ttft=quantiles(each.ttft_s for each in requests),
        tpot=quantiles(each.tpot_s for each in requests),
        latency=quantiles(each.latency_s for each in requests),
        ttft_by_turn=tuple(
            quantiles(each.ttft_s for each in requests if each.turn == turn) for turn in turns
        ),
        goodput_share=None if good is None else good / len(requests),
        goodput_per_s=None if good is None else good / wall,
        preemptions=costs.preemptions,
        cached_share=sum(told) / prompt if len(told) == len(cached) else None,
        kv_peak=peak,
        kv_mean=mean,
        kv_peak_mib=None if mib is None else peak * mib,
        kv_mean_mib=None if mib is None else mean * mib,
        running_max=max(running, default=0.0),
        running_mean=weighted_mean(running, times),
        waiting_max=max((each.waiting for each in during), default=0.0),
        sieve=proof,
        requests=requests,
        samples=during,
    )


def quantiles(values: Iterable[float]) -> Quantiles:
    """The percentiles that are reported, of at least one value."""
    known = list(values)
    return Quantiles(
        p50=percentile(known, 0.50), p90=percentile(known, 0.90), p99=percentile(known, 0.99)
    )


def is_good(request: RequestRecord, goals: Goals) -> bool:
    """Whether a request keeps every goal that is given."""
    return (goals.ttft_s is None or request.ttft_s <= goals.ttft_s) and (
        goals.tpot_s is None or request.tpot_s <= goals.tpot_s
    )


def _request(answered: Answered, began: float) -> RequestRecord:
    completion = answered.completion
    first, last = completion.token_times[0], completion.token_times[-1]
    report = completion.report
    return RequestRecord(
        chat=answered.chat,
        turn=answered.turn,
        sent_s=completion.sent_at - began,
        late_s=answered.late_s,
        ttft_s=first - completion.sent_at,
        # A piece of the stream may hold several tokens, so they are counted by the server.
        tpot_s=(last - first) / (completion.completion_tokens - 1),
        latency_s=last - completion.sent_at,
        prompt_tokens=completion.prompt_tokens,
        output_tokens=completion.completion_tokens,
        cached_tokens=completion.cached_tokens,
        sieved=None if report is None else report["sieved"],
        kept_tokens=None if report is None else report["stored_tokens"]["sieved"],
        blocks_freed=None if report is None else report["blocks_freed"],
    )
