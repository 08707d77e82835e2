"""Prefill pruning: time to the first token by method, and output of a crowded server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvsieve.evals.tasks.niah import Niah
from pairing.arm import Arm, BenchmarkError, Lab
from pairing.gate import pass_gate, require_sieved
from pairing.records import RequestRecord, spread, verdict
from pairing.throughput import summarise_run
from pairing.workload import Options

TTFT_AIMS = {"fastkv": 0.60, "asl": 0.75}
"""Time to the first token over stock's, at most."""
THROUGHPUT_AIM = 2.0
"""Output tokens per CPU second over stock's, with pruning and a budget together."""

KEPT = "25%"
"""Budget of the time to the first token."""
WHOLE_STEP = 8192
"""Tokens of one step, in every arm: a prompt is pruned where a step can read it at once."""


@dataclass(frozen=True)
class Case:
    """One way to serve a prompt.

    Attributes:
        name: As in tables.
        request: The request's `extra_args`; None for the stock arm.
    """

    name: str
    request: dict[str, Any] | None


def _cases(options: Options, budget: str | int, methods: Sequence[str]) -> list[Case]:
    def asking(name: str) -> dict[str, Any]:
        # The published figures of FastKV are of the middle of a model.
        middle = f"fastkv@{options.shape.num_layers // 2 - 1}"
        return {"kv_budget": budget, "kv_prune": middle if name == "fastkv" else name}

    return [
        Case("stock", None),
        Case("budget alone", {"kv_budget": budget, "kv_prune": "none"}),
        *(Case(name, asking(name)) for name in methods),
    ]


def _arms(lab: Lab, options: Options, pool_bytes: int, max_model_len: int) -> list[Arm]:
    settings = {"prune": "fastkv"}
    if options.calibration:
        settings["prune_calibration"] = options.calibration
    step = {"max_num_batched_tokens": WHOLE_STEP}
    return lab.arms(
        [
            options.stock("stock", pool_bytes, max_model_len, **step),
            options.sieved("sieved", pool_bytes, max_model_len, settings=settings, **step),
        ]
    )


def measure_ttft(lab: Lab, options: Options) -> dict[str, Any]:
    """Prefill single prompts under every method, by turns, at a budget of a quarter.

    Prompts are a needle in filler: where ASL prunes depends on the text. CPU seconds from
    submission to the first token, over stock's for the same prompt.
    """
    arms = _arms(lab, options, options.plentiful_pool(), 8192)
    gate = pass_gate(options, *arms, options.budget)
    cases = _cases(options, KEPT, ("fastkv", "asl", "gemfilter", "asl-two-pass"))
    repeats = []
    for length in options.sizes.prune_prompts:
        for repeat in range(options.sizes.repeats["prune"]):
            prompt = _needle(options, length, repeat)
            order = cases if repeat % 2 == 0 else cases[::-1]
            runs = {case.name: _first_token(arms, case, prompt) for case in order}
            stock = runs["stock"]["cpu_s"]
            ratios = {name: run["cpu_s"] / stock for name, run in runs.items()}
            lab.say(f"prune: {len(prompt)} tokens, " + _in_words(ratios, runs))
            repeats.append(
                {
                    "length": length,
                    "prompt_tokens": len(prompt),
                    "order": [case.name for case in order],
                    "runs": runs,
                    "ratios": ratios,
                }
            )
    summary: dict[str, Any] = {}
    for length in options.sizes.prune_prompts:
        mine = [repeat for repeat in repeats if repeat["length"] == length]
        for case in cases[1:]:
            values = spread([repeat["ratios"][case.name] for repeat in mine])
            title = f"TTFT (CPU), {length} tokens, {case.name}/stock"
            aim = TTFT_AIMS.get(case.name)
            summary[title] = values if aim is None else verdict(values, at_most=aim)
    return {
        "settings": {"kept": KEPT, "calibration": options.calibration},
        "gate": gate,
        "arms": {arm.name: arm.description for arm in arms},
        "repeats": repeats,
        "summary": summary,
    }


def _in_words(ratios: dict[str, float], runs: dict[str, dict[str, Any]]) -> str:
    return ", ".join(
        f"{name} {ratio:.3f} (layer {runs[name]['layer']})"
        for name, ratio in ratios.items()
        if name != "stock"
    )


def _needle(options: Options, length: int, repeat: int) -> list[int]:
    """A single needle in filler, of about so many tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def count(text: str) -> int:
        return len(tokenizer(text).input_ids)

    niah = Niah("niah_single_1", "", "filler")
    example = niah.generate(count, length, repeat + 1, options.seed)[repeat]
    text = f"{example.context}\n\n{example.question}\n{example.answer_prefix}"
    ids: list[int] = tokenizer(text).input_ids
    return ids


def _first_token(arms: list[Arm], case: Case, prompt: list[int]) -> dict[str, Any]:
    arm = arms[0] if case.request is None else arms[1]
    arm.call("submit", [prompt], [2], extra_args=case.request)
    arm.call("steps")
    (record,) = arm.call("take_finished")
    pruned = _check(arm, case, record)
    return {
        "cpu_s": record.first_token_cpu,
        "wall_s": record.first_token_wall,
        "layer": pruned and pruned["layer"],
        "pruned": pruned,
    }


def _check(arm: Arm, case: Case, record: RequestRecord) -> dict[str, Any] | None:
    """Refuse to go on unless what was asked for was done.

    Raises:
        BenchmarkError: It was not.
    """
    if case.request is None:
        return None
    require_sieved(arm, [record])
    assert record.report is not None
    pruned: dict[str, Any] | None = record.report["pruned"]
    if (pruned is None) != (case.request["kv_prune"] == "none"):
        raise BenchmarkError(f"{case.name}: {record.report['not_pruned'] or pruned}")
    return pruned


def measure_throughput(lab: Lab, options: Options) -> dict[str, Any]:
    """Serve a batch in a pool for a few full requests: stock, a budget alone, FastKV as well."""
    sizes = options.sizes
    length, output = sizes.prune_batch
    tokens = sizes.tight_requests * (length + output)
    max_model_len = min(8192, int(tokens) // 32 * 32)
    arms = _arms(lab, options, options.shape.pool_bytes(tokens), max_model_len)
    gate = pass_gate(options, *arms, options.budget)
    cases = _cases(options, KEPT, ("fastkv",))
    cases += [
        Case(f"{case.name}, {options.budget} tokens", case.request)
        for case in _cases(options, options.budget, ("fastkv",))[1:]
    ]
    repeats = []
    for repeat in range(sizes.repeats["prune-throughput"]):
        prompts = [
            options.prompt_ids(length, index, "prune", repeat)
            for index in range(sizes.prune_requests)
        ]
        order = cases if repeat % 2 == 0 else cases[::-1]
        runs = {case.name: _serve(arms, case, prompts, output) for case in order}
        key = "output_tokens_per_cpu_s"
        ratios = {name: run[key] / runs["stock"][key] for name, run in runs.items()}
        for name, ratio in ratios.items():
            lab.say(f"prune-throughput: {name} {ratio:.3f}")
        repeats.append({"order": [case.name for case in order], "runs": runs, "ratios": ratios})
    summary: dict[str, Any] = {}
    for case in cases[1:]:
        values = spread([repeat["ratios"][case.name] for repeat in repeats])
        title = f"output tokens per CPU s, {length}/{output}, {case.name}/stock"
        is_pruned = "fastkv" in case.name
        summary[title] = verdict(values, at_least=THROUGHPUT_AIM) if is_pruned else values
    return {
        "settings": {
            "prompt_tokens": length,
            "output_tokens": output,
            "requests": sizes.prune_requests,
            "kept": KEPT,
            "pool_tokens": tokens,
            "calibration": options.calibration,
        },
        "gate": gate,
        "arms": {arm.name: arm.description for arm in arms},
        "repeats": repeats,
        "summary": summary,
    }


def _serve(arms: list[Arm], case: Case, prompts: list[list[int]], output: int) -> dict[str, Any]:
    arm = arms[0] if case.request is None else arms[1]
    arm.call("submit", prompts, [output] * len(prompts), extra_args=case.request)
    steps = arm.call("steps")
    records = arm.call("take_finished")
    for record in records:
        _check(arm, case, record)
    return summarise_run(arm, steps, records)
