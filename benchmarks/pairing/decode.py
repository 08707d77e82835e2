"""CPU seconds per decode step at long contexts."""

from __future__ import annotations

from typing import Any

from pairing.arm import Arm, Lab, alternating
from pairing.gate import pass_gate, require_sieved
from pairing.records import StepRecord, held, spread, verdict
from pairing.workload import Options

AIM = 0.50


def measure(lab: Lab, options: Options) -> dict[str, Any]:
    """Prefill a batch once in either arm, then take turns of a few decode steps.

    The ratio of a repeat is that of two neighbouring turns, so that what else the machine
    does falls on both. Contexts grow by a turn per repeat, in both arms alike.
    """
    pool = options.plentiful_pool()
    arms = lab.arms([options.stock("stock", pool), options.sieved("sieved", pool)])
    stock, sieved = arms
    gate = pass_gate(options, stock, sieved, options.budget)
    sizes = options.sizes
    repeats = sizes.repeats["decode"]
    generator = options.random("decode")
    middle = sum(sizes.prompt) // 2
    lengths = [generator.randint(middle - 64, middle + 64) for _ in range(sizes.requests)]
    prompts = [options.prompt_ids(length, index, "decode") for index, length in enumerate(lengths)]
    # Enough for the steps that decode while other prompts are still prefilled.
    output = (repeats + 1) * sizes.decode_steps + 8 + sizes.requests
    prefill = {}
    for arm in arms:
        lab.say(f"decode: prefilling {sum(lengths)} tokens in {arm.name}")
        arm.call("submit", prompts, [output] * len(prompts))
        prefill[arm.name] = _sum(arm.call("steps", until="decoding"))
        arm.call("steps", limit=sizes.decode_steps)
    results = []
    for repeat in range(repeats):
        turns = {}
        order = alternating(arms, repeat)
        for arm in order:
            turns[arm.name] = _per_step(arm, arm.call("steps", limit=sizes.decode_steps))
        ratio = turns["sieved"]["cpu_ms"] / turns["stock"]["cpu_ms"]
        lab.say(f"decode: repeat {repeat + 1}/{repeats}, sieved/stock {ratio:.3f}")
        results.append({"order": [arm.name for arm in order], "arms": turns, "ratio": ratio})
    for arm in arms:
        arm.call("steps")
    stock.call("take_finished")
    require_sieved(sieved, sieved.call("take_finished"))
    return {
        "settings": {
            "requests": sizes.requests,
            "prompt_tokens": lengths,
            "steps_per_turn": sizes.decode_steps,
            "pool_bytes": pool,
        },
        "gate": gate,
        "arms": {arm.name: arm.description for arm in arms},
        "prefill": prefill,
        "repeats": results,
        "summary": {
            "cpu per step, sieved/stock": verdict(
                spread([result["ratio"] for result in results]), at_most=AIM
            ),
            "stock, CPU ms per step": spread([r["arms"]["stock"]["cpu_ms"] for r in results]),
            "sieved, CPU ms per step": spread([r["arms"]["sieved"]["cpu_ms"] for r in results]),
        },
    }


def _sum(records: list[StepRecord]) -> dict[str, float]:
    return {
        "cpu_s": sum(record.cpu for record in records),
        "wall_s": sum(record.wall for record in records),
        "steps": len(records),
    }


def _per_step(arm: Arm, records: list[StepRecord]) -> dict[str, Any]:
    assert all(record.prompt_tokens == 0 for record in records), "a decode turn holds no prefill"
    return {
        "cpu_ms": 1e3 * sum(record.cpu for record in records) / len(records),
        "wall_ms": 1e3 * sum(record.wall for record in records) / len(records),
        "batch": records[0].decode_tokens,
        "held": held(records[-1].blocks_held, arm.description),
    }
