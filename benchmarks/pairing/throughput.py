"""Output tokens per CPU second of a batch, in a plentiful pool and in a tight one."""

from __future__ import annotations

import statistics
from typing import Any

from pairing.arm import Arm, Lab, alternating
from pairing.gate import pass_gate, require_sieved
from pairing.records import RequestRecord, StepRecord, held, spread, verdict
from pairing.workload import Options

TIGHT_AIM = 1.5


def measure(lab: Lab, options: Options) -> dict[str, Any]:
    """Run the same batch in both arms, all requests submitted at once, per repeat a new batch."""
    pools = {"tight": options.tight_pool(), "plentiful": (options.plentiful_pool(), 8192)}
    result: dict[str, Any] = {"settings": {}, "gate": [], "arms": {}, "pools": {}, "summary": {}}
    for pool in options.pools:
        pool_bytes, max_model_len = pools[pool]
        result["settings"][pool] = {"pool_bytes": pool_bytes, "max_model_len": max_model_len}
        repeats = _measure_pool(lab, options, pool, pool_bytes, max_model_len, result)
        result["pools"][pool] = repeats
        result["summary"] |= _summary(pool, repeats)
    return result


def _measure_pool(
    lab: Lab,
    options: Options,
    pool: str,
    pool_bytes: int,
    max_model_len: int,
    result: dict[str, Any],
) -> list[dict[str, Any]]:
    arms = lab.arms(
        [
            options.stock("stock", pool_bytes, max_model_len),
            options.sieved("sieved", pool_bytes, max_model_len),
        ]
    )
    stock, sieved = arms
    result["gate"].append(pass_gate(options, stock, sieved, options.budget))
    result["arms"][pool] = {arm.name: arm.description for arm in arms}
    repeats = []
    total = options.sizes.repeats["throughput"]
    for repeat in range(total):
        prompts, outputs = options.batch("throughput", repeat)
        order = alternating(arms, repeat)
        runs = {}
        for arm in order:
            arm.call("submit", prompts, outputs)
            steps = arm.call("steps")
            requests = arm.call("take_finished")
            if arm is sieved:
                require_sieved(arm, requests)
            runs[arm.name] = summarise_run(arm, steps, requests)
        ratios = _ratios(runs["sieved"], runs["stock"])
        lab.say(
            f"throughput, {pool} pool: repeat {repeat + 1}/{total},"
            f" sieved/stock {ratios['output tokens per CPU s']:.3f}"
        )
        repeats.append(
            {
                "order": [arm.name for arm in order],
                "prompt_tokens": [len(prompt) for prompt in prompts],
                "output_tokens": outputs,
                "arms": runs,
                "ratios": ratios,
            }
        )
    return repeats


def summarise_run(
    arm: Arm, steps: list[StepRecord], requests: list[RequestRecord]
) -> dict[str, Any]:
    """What a batch took, and what it held."""
    cpu = sum(step.cpu for step in steps)
    output = sum(len(request.token_ids) for request in requests)
    decoding = [step for step in steps if not step.prompt_tokens]
    blocks = [step.blocks_held for step in steps]
    # Weighted by CPU time: a prefill step lasts as long as dozens of decode steps.
    mean_blocks = sum(step.blocks_held * step.cpu for step in steps) / cpu
    return {
        "cpu_s": cpu,
        "wall_s": sum(step.wall for step in steps),
        "output_tokens": output,
        "output_tokens_per_cpu_s": output / cpu,
        "ttft_p50_cpu_s": statistics.median(r.first_token_cpu for r in requests),
        "ttft_p50_wall_s": statistics.median(r.first_token_wall for r in requests),
        "tpot_p50_cpu_ms": 1e3 * statistics.median(_per_output_token(requests, "cpu")),
        "tpot_p50_wall_ms": 1e3 * statistics.median(_per_output_token(requests, "wall")),
        "peak_running": max(step.running for step in steps),
        "preemptions": sum(step.preempted for step in steps),
        "held_peak": held(max(blocks), arm.description),
        "held_mean": held(mean_blocks, arm.description),
        "blocks_held": blocks,
        "steps": len(steps),
        "decode_steps": len(decoding),
        "decode_cpu_s": sum(step.cpu for step in decoding),
        "prompt_tokens_computed": sum(step.prompt_tokens for step in steps),
    }


def _per_output_token(requests: list[RequestRecord], clock: str) -> list[float]:
    return [
        (getattr(r, f"last_token_{clock}") - getattr(r, f"first_token_{clock}"))
        / (len(r.token_ids) - 1)
        for r in requests
    ]


def _ratios(sieved: dict[str, Any], stock: dict[str, Any]) -> dict[str, float]:
    named = {
        "output tokens per CPU s": "output_tokens_per_cpu_s",
        "TTFT p50 (CPU)": "ttft_p50_cpu_s",
        "TPOT p50 (CPU)": "tpot_p50_cpu_ms",
    }
    ratios = {name: sieved[key] / stock[key] for name, key in named.items()}
    for name in ("held_peak", "held_mean"):
        ratios[f"KV memory {name.replace('_', ', ')}"] = sieved[name]["mib"] / stock[name]["mib"]
    return ratios


def _summary(pool: str, repeats: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {
        f"{name}, {pool}, sieved/stock": spread([repeat["ratios"][name] for repeat in repeats])
        for name in repeats[0]["ratios"]
    }
    name = f"output tokens per CPU s, {pool}, sieved/stock"
    if pool == "tight":
        summary[name] = verdict(summary[name], at_least=TIGHT_AIM)
    for key in ("peak_running", "preemptions"):
        for arm in ("stock", "sieved"):
            summary[f"{key.replace('_', ' ')}, {pool}, {arm}"] = spread(
                [repeat["arms"][arm][key] for repeat in repeats]
            )
    return summary
