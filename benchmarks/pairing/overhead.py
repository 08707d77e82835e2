"""What the sieve costs where it has nothing to do: a budget that every prompt fits."""

from __future__ import annotations

from typing import Any

from pairing.arm import Arm, Lab, alternating
from pairing.gate import pass_gate, require_equal, require_not_sieved
from pairing.records import StepRecord, spread, verdict
from pairing.workload import Options

AIM = 1.02


def measure(lab: Lab, options: Options) -> dict[str, Any]:
    """Run one batch in stock and in an arm whose budget is the longest prompt.

    Both arms take the same steps, so they take turns: every prefill step and every few
    decode steps, in alternating order.
    """
    pool = options.plentiful_pool()
    budget = options.sizes.prompt[1]
    arms = lab.arms(
        [
            options.stock("stock", pool),
            options.sieved("budget >= prompt", pool, budget=budget),
        ]
    )
    stock, other = arms
    gate = pass_gate(options, stock, other, budget)
    total = options.sizes.repeats["overhead"]
    repeats = []
    for repeat in range(total):
        prompts, outputs = options.batch("overhead", repeat)
        turns = _by_turns(options, arms, prompts, outputs, repeat)
        steps = {arm.name: [step for turn in turns[arm.name] for step in turn] for arm in arms}
        finished = [arm.call("take_finished") for arm in arms]
        require_equal(*finished, other)
        require_not_sieved(other, finished[1])
        sums = {arm.name: _sums(steps[arm.name]) for arm in arms}
        ratios = {
            part: sums[other.name][part] / sums[stock.name][part]
            for part in ("prefill_cpu_s", "decode_cpu_s", "cpu_s")
        }
        lab.say(f"overhead: repeat {repeat + 1}/{total}, CPU ratio {ratios['cpu_s']:.4f}")
        repeats.append(
            {
                "prompt_tokens": [len(prompt) for prompt in prompts],
                "output_tokens": outputs,
                "arms": sums,
                "ratios": ratios,
                "turn_ratios": _turn_ratios(turns[other.name], turns[stock.name]),
            }
        )
    summary: dict[str, Any] = {
        "prefill + decode, CPU, budget >= prompt/stock": verdict(
            spread([repeat["ratios"]["cpu_s"] for repeat in repeats]), at_most=AIM
        )
    }
    for part in ("prefill", "decode"):
        summary[f"{part}, CPU, budget >= prompt/stock"] = spread(
            [repeat["ratios"][f"{part}_cpu_s"] for repeat in repeats]
        )
        summary[f"{part}, the same, turn by turn"] = spread(
            [ratio for repeat in repeats for ratio in repeat["turn_ratios"][part]]
        )
    return {
        "settings": {"pool_bytes": pool, "budget": budget},
        "gate": gate,
        "arms": {arm.name: arm.description for arm in arms},
        "repeats": repeats,
        "summary": summary,
    }


def _by_turns(
    options: Options,
    arms: list[Arm],
    prompts: list[list[int]],
    outputs: list[int],
    repeat: int,
) -> dict[str, list[list[StepRecord]]]:
    """The steps of each arm, turn by turn."""
    for arm in arms:
        arm.call("submit", prompts, outputs)
    turns: dict[str, list[list[StepRecord]]] = {arm.name: [] for arm in arms}
    turn = repeat
    while True:
        decoding = arms[0].call("is_decoding")
        for arm in alternating(arms, turn):
            taken = arm.call("steps", limit=options.sizes.decode_steps if decoding else 1)
            turns[arm.name].append(taken)
        if not taken:
            return turns
        turn += 1


def _turn_ratios(
    other: list[list[StepRecord]], stock: list[list[StepRecord]]
) -> dict[str, list[float]]:
    ratios: dict[str, list[float]] = {"prefill": [], "decode": []}
    for ours, theirs in zip(other, stock, strict=True):
        if theirs:
            part = "prefill" if theirs[0].prompt_tokens else "decode"
            ratios[part].append(_sums(ours)["cpu_s"] / _sums(theirs)["cpu_s"])
    return ratios


def _sums(steps: list[StepRecord]) -> dict[str, float]:
    prefill = sum(step.cpu for step in steps if step.prompt_tokens)
    total = sum(step.cpu for step in steps)
    return {
        "cpu_s": total,
        "prefill_cpu_s": prefill,
        "decode_cpu_s": total - prefill,
        "wall_s": sum(step.wall for step in steps),
        "steps": len(steps),
    }
