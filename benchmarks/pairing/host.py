"""Host time per decode step, by part, for plans with different numbers of cache groups."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from pairing.arm import Arm, Lab, alternating
from pairing.gate import pass_gate
from pairing.records import spread
from pairing.spec import ArmSpec
from pairing.workload import ModelShape, Options, read_shape

BUDGET = 64
WINDOW = 8
PROMPT = 160
"""Shortest prompt; the others are up to one block longer, so that block boundaries are
crossed by some requests in every step instead of by all in one of 32."""

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 30,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "vocab_size": 512,
    "dtype": "float32",
}
"""SmolLM2-135M's layers without its size: host time does not depend on the widths."""

PARTS = (
    "schedule",
    "update_from_output",
    "update_states",
    "prepare_inputs",
    "slot_mapping",
    "metadata",
    "sieve",
)
"""Parts that are added up as `host`: disjoint, and all that depends on the groups."""


def write_tiny_model(folder: Path) -> str:
    """A model folder for random weights; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG, indent=1))
    return str(folder)


def measure(lab: Lab, options: Options, scratch: Path) -> dict[str, Any]:
    """Decode with a tiny model in all arms by turns; compare medians of a turn's steps.

    Every repeat goes once through all arms, forward or backward, and its differences are
    taken within the repeat.
    """
    sizes = options.sizes
    model = write_tiny_model(scratch / "tiny")
    shape = read_shape(model)
    arms = lab.arms(_specs(options, model, shape))
    stock, plans = arms[0], arms[1:]
    tiny = Options(model, shape, sizes, BUDGET, options.seed, options.profile)
    gates = [pass_gate(tiny, stock, plan, BUDGET) for plan in plans]
    batches = {batch: _measure_batch(lab, tiny, arms, batch) for batch in sizes.host_batches}
    return {
        "settings": {
            "prompt_tokens": [PROMPT, PROMPT + 31],
            "budget": BUDGET,
            "observation_window": WINDOW,
            "steps_per_turn": sizes.decode_steps,
        },
        "gate": gates,
        "arms": {arm.name: arm.description for arm in arms},
        "batches": batches,
        "summary": {
            f"{batch} requests, {part}, {plan.name} - stock, ms": batches[batch]["summary"][
                plan.name
            ]["over_stock_ms"][part]
            for batch in batches
            for plan in plans
            for part in ("host",)
        },
    }


def _specs(options: Options, model: str, shape: ModelShape) -> list[ArmSpec]:
    sizes = options.sizes
    batch = max(sizes.host_batches)
    longest = PROMPT + 32 + _output_tokens(options)
    common: dict[str, Any] = {
        "model": model,
        "pool_bytes": shape.pool_bytes(max(8192, batch * (longest + 32)) + 512),
        "max_num_seqs": batch,
        "dummy_weights": True,
        # As in a server: publishing to the prefix cache costs host time per group too.
        "prefix_caching": True,
    }
    specs = [ArmSpec(name="stock", sieve=None, **common)]
    for full in sizes.host_full_layers:
        settings = (("budget", BUDGET), ("observation_window", WINDOW), ("full_layers", full))
        specs.append(ArmSpec(name=f"{full} full", sieve=settings, **common))
    return specs


def _output_tokens(options: Options) -> int:
    sizes = options.sizes
    profiled = sizes.decode_steps if options.profile else 0
    # While the prompts are prefilled, the first of them decode.
    return (sizes.repeats["host"] + 1) * sizes.decode_steps + profiled + 40


def _measure_batch(lab: Lab, options: Options, arms: list[Arm], batch: int) -> dict[str, Any]:
    sizes = options.sizes
    repeats = sizes.repeats["host"]
    generator = options.random("host", batch)
    lengths = [PROMPT + generator.randrange(32) for _ in range(batch)]
    prompts = [options.prompt_ids(length, index, "host") for index, length in enumerate(lengths)]
    for arm in arms:
        arm.call("submit", prompts, [_output_tokens(options)] * batch)
        arm.call("steps", until="decoding")
        arm.call("host_steps", sizes.decode_steps)
    turns: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in arms}
    cpu_turns: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in arms}
    for repeat in range(repeats):
        for arm in alternating(arms, repeat):
            steps = arm.call("host_steps", sizes.decode_steps)
            turns[arm.name].append(_turn(steps, "wall"))
            cpu_turns[arm.name].append(_turn(steps, "cpu"))
        lab.say(
            f"host: {batch} requests, repeat {repeat + 1}/{repeats}, ms "
            + ", ".join(f"{arm.name} {turns[arm.name][-1]['host']:.2f}" for arm in arms)
        )
    profiles = {}
    for arm in arms:
        if options.profile:
            profiles[arm.name] = arm.call("profile_steps", sizes.decode_steps)[:60]
        arm.call("abort_all")
    summary = {}
    stock = arms[0].name
    for arm in arms:
        keys = turns[arm.name][0]
        summary[arm.name] = {
            "ms": {key: spread([turn[key] for turn in turns[arm.name]]) for key in keys},
            "thread_cpu_ms": {
                key: spread([turn[key] for turn in cpu_turns[arm.name]]) for key in keys
            },
            "over_stock_ms": {
                key: spread(
                    [
                        turn[key] - base[key]
                        for turn, base in zip(turns[arm.name], turns[stock], strict=True)
                    ]
                )
                for key in keys
            },
        }
    return {"turns_ms": turns, "summary": summary, "profiles": profiles}


def _turn(steps: list[dict[str, dict[str, float]]], clock: str) -> dict[str, float]:
    """Medians over a turn's steps, in milliseconds."""

    def median(keys: tuple[str, ...], minus: tuple[str, ...] = ()) -> float:
        values = []
        for step in steps:
            plus = sum(step[key][clock] for key in keys if key in step)
            values.append(plus - sum(step[key][clock] for key in minus if key in step))
        return 1e3 * statistics.median(values)

    kernel, views = "slot_mapping_kernel", "slot_mapping_views"
    turn = {
        "schedule": median(("schedule",)),
        "update_from_output": median(("update_from_output",)),
        "update_states": median(("update_states",)),
        "prepare_inputs": median(("prepare_inputs",), minus=(kernel,)),
        "slot_mapping": median((kernel, views)),
        "metadata": median(("metadata",)),
        "sieve": median(("sieve_begin_end",)),
        "forward": median(("forward",)),
        "step_without_forward": median(("step",), minus=("forward",)),
    }
    turn["host"] = sum(turn[part] for part in PARTS)
    return turn
