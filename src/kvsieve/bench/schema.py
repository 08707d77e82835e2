"""The result of a benchmark, as it is written to JSON and read again."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION: Literal[1] = 1
KIND: Literal["kvsieve bench"] = "kvsieve bench"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Quantiles(_Record):
    """Percentiles of one quantity over the requests of one run, in seconds."""

    p50: float
    p90: float
    p99: float


class RequestRecord(_Record):
    """One request.

    Attributes:
        chat: Number of its conversation.
        turn: Its place in it, from 0.
        sent_s: When it was sent, in seconds since the run began.
        late_s: How long after its planned time that was; 0 in a closed loop.
        ttft_s: From sending it to its first token, in seconds.
        tpot_s: Mean time between two tokens after the first, in seconds.
        latency_s: From sending it to its last token, in seconds.
        prompt_tokens: Length of its prompt.
        output_tokens: Generated tokens.
        cached_tokens: Prompt tokens that the prefix cache had, as the server says; None if not.
        sieved: Whether the sieve dropped tokens of it, as the response says; None from stock.
        kept_tokens: Prompt tokens that a sieved layer stored, as the response says.
        blocks_freed: Blocks that went back to the pool, as the response says.
    """

    chat: int
    turn: int
    sent_s: float
    late_s: float
    ttft_s: float
    tpot_s: float
    latency_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    sieved: bool | None
    kept_tokens: int | None
    blocks_freed: int | None


class PoolSample(_Record):
    """What `/metrics` said at one moment: how things were after the last step that ended.

    A request whose first step takes long counts as running only after it.

    Attributes:
        at_s: Seconds since the run began.
        kv_usage: Share of the pool's blocks in use.
        running: Requests in the running batch.
        waiting: Requests that wait to be scheduled.
    """

    at_s: float
    kv_usage: float
    running: float
    waiting: float


class SieveProof(_Record):
    """What the responses of a sieved arm said, summed over one run.

    Attributes:
        requests: Responses.
        expected: Those whose prompt is longer than its budget by a block or more, by the
            arm's settings and not by the response; 0 where nothing is to be dropped.
        sieved: Those that say they were sieved.
        prompt_tokens: Prompt tokens of the sieved ones.
        kept_tokens: Of these, tokens that a sieved layer stored per KV head.
        blocks_freed: Blocks that went back to the pool.
    """

    requests: int
    expected: int
    sieved: int
    prompt_tokens: int
    kept_tokens: int
    blocks_freed: int


class ArmRun(_Record):
    """One arm under one load, once.

    Attributes:
        wall_s: From the first request sent to the last token received, in seconds.
        resource_s: CPU seconds of the server's processes, or GPU seconds (wall time times GPUs).
        client_cpu_s: CPU seconds of the process that sent the load.
        others_cpu_s: CPU seconds that the other arms' idle servers took meanwhile.
        output_tokens_per_s: Generated tokens per second.
        total_tokens_per_s: Prompt and generated tokens per second.
        requests_per_s: Requests per second.
        output_tokens_per_resource_s: Generated tokens per CPU or GPU second.
        ttft: Time to first token.
        tpot: Time per output token after the first.
        latency: Time to the last token.
        ttft_by_turn: TTFT of each turn of the chats; one entry where they have one turn.
        goodput_share: Share of requests within the goals; None without goals.
        goodput_per_s: Requests within the goals, per second.
        preemptions: Requests that lost their cache for want of blocks, and started again.
        cached_share: Share of prompt tokens that the prefix cache had; None if not told.
        kv_peak: The most of the pool that was in use, as a share of its blocks.
        kv_mean: Its mean over time.
        kv_peak_mib: `kv_peak` in MiB; None if the server does not tell the pool's size.
        kv_mean_mib: `kv_mean` in MiB.
        running_max: Most requests running at once.
        running_mean: Requests running, mean over time.
        waiting_max: Most requests waiting.
        sieve: What the responses say; None for stock vLLM.
        requests: Every request.
        samples: The pool over time.
    """

    wall_s: float
    resource_s: float
    client_cpu_s: float
    others_cpu_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    output_tokens_per_resource_s: float
    ttft: Quantiles
    tpot: Quantiles
    latency: Quantiles
    ttft_by_turn: tuple[Quantiles, ...]
    goodput_share: float | None
    goodput_per_s: float | None
    preemptions: int
    cached_share: float | None
    kv_peak: float
    kv_mean: float
    kv_peak_mib: float | None
    kv_mean_mib: float | None
    running_max: float
    running_mean: float
    waiting_max: float
    sieve: SieveProof | None
    requests: tuple[RequestRecord, ...]
    samples: tuple[PoolSample, ...]


class Repeat(_Record):
    """Every arm once, under the same load.

    Attributes:
        order: Names of the arms in the order in which they were measured.
        arms: What was measured, by arm.
        ratios: By arm other than stock, the quantities' ratios to stock; None where there is
            no ratio. Empty in a result that is not complete.
    """

    order: tuple[str, ...]
    arms: dict[str, ArmRun]
    ratios: dict[str, dict[str, float | None]]


class RatioSummary(_Record):
    """A ratio over all repeats; see `kvsieve.bench.ratios.Ratios`."""

    median: float
    min: float
    max: float
    repeats: int
    mean: float | None
    low: float | None
    high: float | None


class SweepPoint(_Record):
    """One concurrency of a sweep.

    Attributes:
        concurrency: Clients that send one request after another.
        met: Whether the median TTFT stayed below the bound.
        run: What was measured.
    """

    concurrency: int
    met: bool
    run: ArmRun


class Sweep(_Record):
    """The search for the highest concurrency that keeps a bound on TTFT.

    Attributes:
        bound_s: The bound on the median TTFT, in seconds; the same for all arms.
        limit: The highest concurrency that was tried.
        points: Every point that was measured, by arm, in the order of measuring.
        highest: The answer by arm; 0: not even one client. An arm that was not finished is
            missing.
    """

    bound_s: float
    limit: int
    points: dict[str, tuple[SweepPoint, ...]]
    highest: dict[str, int]


class WorkloadResult(_Record):
    """One workload.

    Attributes:
        name: Name of the workload.
        summary: What it is, for people, at full scale.
        prompt_tokens: Shortest, median and longest prompt of the first repeat.
        output_tokens: Shortest, median and longest output of the first repeat.
        repeats: The finished repeats.
        ratios: By arm and quantity, the ratios to stock over all repeats. Empty in a result
            that is not complete.
        sweep: The search for the highest concurrency, if there was one.
    """

    name: str
    summary: str
    prompt_tokens: tuple[int, int, int]
    output_tokens: tuple[int, int, int]
    repeats: tuple[Repeat, ...]
    ratios: dict[str, dict[str, RatioSummary]]
    sweep: Sweep | None


class ArmRecord(_Record):
    """One arm.

    Attributes:
        name: What tables call it.
        settings: Settings of the sieve that were given; None for stock vLLM.
        start_s: Time that its server took to start, in seconds; of the last start.
        block_size: Tokens of a block; None if the server does not tell.
        num_blocks: Blocks of its pool.
        pool_bytes: Bytes of its pool.
        max_model_len: Longest context that its server takes, in tokens.
    """

    name: str
    settings: dict[str, Any] | None
    start_s: float
    block_size: int | None
    num_blocks: int | None
    pool_bytes: int | None
    max_model_len: int | None


class ModelRecord(_Record):
    """The model that was served.

    Attributes:
        given: As it was given.
        name: Last part of that.
        config_sha256: Of its `config.json`; None if it is not a folder.
    """

    given: str
    name: str
    config_sha256: str | None


class LoadRecord(_Record):
    """How requests arrive and how many there are; see `kvsieve.bench.options.Options`."""

    concurrency: int | None
    rate: float | None
    requests: int | None
    scale: float
    repeats: int
    seed: int
    ttft_goal_s: float | None
    tpot_goal_s: float | None


class BenchResult(_Record):
    """Everything that one run of `kvsieve bench` found.

    Attributes:
        kind: What this file is.
        schema_version: Changes when a reader of the old one would go wrong.
        complete: Whether all that was asked for was measured. If not, there are no ratios.
        failure: Why it is not complete.
        model: What was served.
        load: Under what load.
        flags: Flags of `vllm serve`, the same for all arms.
        one_at_a_time: Whether servers were started anew for each measurement.
        resource: What `resource_s` counts.
        arms: The arms, stock first.
        workloads: What was measured.
        notes: Sentences that a reader of the figures must know.
        provenance: Where the figures come from.
    """

    kind: Literal["kvsieve bench"] = KIND
    schema_version: Literal[1] = SCHEMA_VERSION
    complete: bool
    failure: str | None
    model: ModelRecord
    load: LoadRecord
    flags: tuple[str, ...]
    one_at_a_time: bool
    resource: Literal["cpu", "gpu"]
    arms: tuple[ArmRecord, ...]
    workloads: tuple[WorkloadResult, ...]
    notes: tuple[str, ...]
    provenance: dict[str, Any]
