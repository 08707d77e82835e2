"""What each policy costs, as a share of prefill: scoring and compaction, and gathering."""

from __future__ import annotations

from typing import Any

from kvsieve.policies import parse_settings, policy_from_config
from pairing.arm import Arm, Lab
from pairing.gate import pass_gate
from pairing.records import spread, verdict
from pairing.scoring import AIM, prefills
from pairing.workload import ModelShape, Options

AIM_WINDOW = 64
"""Observation windows to which `AIM` applies, in tokens, at most."""
AIM_OVER_FLOPS = 1.3
"""The same share over the share of its floating-point operations, for larger windows."""
AIM_GATHER = 0.35
"""Gathering from every query over what prefill costs without it."""

WINDOWS = (32, 64, 256)
"""Observation windows of SnapKV, in tokens."""
DEFAULT_POLICIES = (
    "kvsieve",
    "kvsieve_agnostic",
    "chunkkv",
    "expected_attention",
    "h2o",
    "criticalkv",
    "rkv",
)
"""Those that do more than SnapKV's one pass over the window, or something else."""


def measure(lab: Lab, options: Options) -> dict[str, Any]:
    """Prefill single prompts under several policies, one engine after the other.

    `end_step` scores and moves the rows of a prompt in every sieved layer, `gather` lets a
    policy look at every query in `forward`. Both are CPU seconds over those of the steps that
    prefilled; gathering over what those cost without it.
    """
    repeats = options.sizes.repeats["policies"]
    cases = [
        (f"snapkv, window {window}", {"policy": "snapkv", "observation_window": window})
        for window in WINDOWS
    ]
    cases += [(name, {"policy": name}) for name in options.policies]
    results: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    gates = []
    for name, settings in cases:
        budget = max(options.budget, 2 * settings.get("observation_window", 256))
        spec = options.sieved(name, options.plentiful_pool(), budget=budget, settings=settings)
        stock, arm = lab.arms([options.stock("stock", options.plentiful_pool()), spec])
        gates.append(pass_gate(options, stock, arm, budget))
        of_case = [
            result
            for length in options.sizes.scoring_prompts
            for result in _prefill(lab, options, arm, name, length, repeats)
        ]
        results += of_case
        summary |= _summarise(name, settings, options, of_case)
    return {
        "settings": {"prompt_tokens": options.sizes.scoring_prompts, "cases": dict(cases)},
        "gates": gates,
        "repeats": results,
        "summary": summary,
    }


def _prefill(
    lab: Lab, options: Options, arm: Arm, name: str, length: int, repeats: int
) -> list[dict[str, Any]]:
    results = []
    for _, prefill, seconds in prefills(options, arm, length, repeats, "policies"):
        gather = seconds.get("gather", 0.0)
        result = {
            "case": name,
            "prompt_tokens": length,
            "prefill_cpu_s": prefill,
            "sieve_cpu_s": seconds["end_step"],
            "gather_cpu_s": gather,
            "share": seconds["end_step"] / prefill,
            "gather_share": gather / (prefill - gather),
        }
        lab.say(
            f"{name}: {length} tokens, {100 * result['share']:.2f}% of {prefill:.1f} s, gathering"
            f" {100 * result['gather_share']:.1f}%"
        )
        results.append(result)
    return results


def _summarise(
    name: str, settings: dict[str, Any], options: Options, results: list[dict[str, Any]]
) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    policy = policy_from_config(parse_settings(settings))
    window = policy.observation_window
    for length in options.sizes.scoring_prompts:
        mine = [result for result in results if result["prompt_tokens"] == length]
        shares = [result["share"] for result in mine]
        title = f"{name}: scoring and compaction / prefill, {length} tokens"
        if window <= AIM_WINDOW:
            summary[title] = verdict(spread(shares), at_most=AIM)
        else:
            flops = window_flops_share(options.shape, window, length)
            summary[title] = spread(shares)
            summary[f"{name}: that share / its share of the FLOPs, {length} tokens"] = verdict(
                spread([share / flops for share in shares]), at_most=AIM_OVER_FLOPS
            )
        if policy.accumulator is not None:
            summary[f"{name}: gathering / prefill without it, {length} tokens"] = verdict(
                spread([result["gather_share"] for result in mine]), at_most=AIM_GATHER
            )
    return summary


def window_flops_share(shape: ModelShape, window: int, num_tokens: int) -> float:
    """Floating-point operations of the window's logits in every layer, over a prefill's.

    A prefill multiplies every token with the layers' weights, and half of the square of
    queries and keys twice (logits, and weights times values).
    """
    attention = shape.num_heads * shape.head_size * shape.num_layers
    window_flops = 2 * window * num_tokens * attention
    prefill = 2 * shape.layer_weights * num_tokens + 2 * num_tokens**2 * attention
    return window_flops / (prefill + window_flops)
