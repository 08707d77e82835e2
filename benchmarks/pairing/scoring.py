"""Scoring and compaction as a share of prefill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pairing.arm import Arm, Lab
from pairing.gate import pass_gate, require_sieved
from pairing.records import spread, verdict
from pairing.workload import Options

AIM = 0.015


def measure(lab: Lab, options: Options) -> dict[str, Any]:
    """Prefill single prompts in the sieved arm, with CPU clocks around the sieve.

    The share is that of `Sieve.end_step` (scores and moves the rows of a prompt in every
    sieved layer) in all CPU time of the steps that prefilled. Copying the window's queries
    in `forward` is measured as well, and named apart.
    """
    pool = options.plentiful_pool()
    stock, sieved = lab.arms([options.stock("stock", pool), options.sieved("sieved", pool)])
    gate = pass_gate(options, stock, sieved, options.budget)
    repeats = options.sizes.repeats["scoring"]
    results = []
    for length in options.sizes.scoring_prompts:
        for repeat, prefill, seconds in prefills(options, sieved, length, repeats, "scoring"):
            result = {
                "prompt_tokens": length,
                "prefill_cpu_s": prefill,
                "sieve_cpu_s": seconds["end_step"],
                "observe_cpu_s": seconds["observe"],
                "plan_cpu_s": seconds["enter_group"],
                "worker_timer_wall_s": seconds["worker_wall"],
                "share": seconds["end_step"] / prefill,
                "share_with_observe": (seconds["end_step"] + seconds["observe"]) / prefill,
            }
            lab.say(
                f"scoring: {length} tokens, repeat {repeat + 1}/{repeats},"
                f" {100 * result['share']:.2f}% of {prefill:.1f} s"
            )
            results.append(result)
    summary: dict[str, Any] = {}
    for length in options.sizes.scoring_prompts:
        mine = [result for result in results if result["prompt_tokens"] == length]
        summary[f"scoring and compaction / prefill, {length} tokens"] = verdict(
            spread([result["share"] for result in mine]), at_most=AIM
        )
        summary[f"the same with observing, {length} tokens"] = spread(
            [result["share_with_observe"] for result in mine]
        )
    return {
        "settings": {"prompt_tokens": options.sizes.scoring_prompts, "observation_window": 32},
        "gate": gate,
        "arms": {"sieved": sieved.description},
        "repeats": results,
        "summary": summary,
    }


def prefills(
    options: Options, arm: Arm, length: int, repeats: int, place: str
) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Prefill prompts of one length alone, one after the other, and check that each was sieved.

    The first one allocates what the later ones reuse: it is not counted.

    Args:
        options: The command line.
        arm: A sieved arm.
        length: Length of the prompts, in tokens.
        repeats: Prompts that count.
        place: Where the prompts are used (`Options.random`).

    Yields:
        The repeat, CPU seconds of the steps that prefilled, and those of the sieve's parts in
        them (`EngineArm.sieve_steps`).
    """
    for repeat in range(-1, repeats):
        arm.call("submit", [options.prompt_ids(length, repeat, place)], [2])
        steps, seconds = arm.call("sieve_steps")
        require_sieved(arm, arm.call("take_finished"))
        if repeat >= 0:
            yield repeat, sum(step.cpu for step in steps if step.prompt_tokens), seconds
