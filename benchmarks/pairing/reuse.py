"""What prefix caching saves: in stock, with a sieve, and with one that has nothing to drop."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pairing.arm import Arm, BenchmarkError, Lab, alternating
from pairing.conversation import Conversation, Text
from pairing.gate import pass_gate, require_equal, require_not_sieved
from pairing.records import RequestRecord, StepRecord, spread
from pairing.workload import Options

STOCK, SIEVED, CONTROL = "stock", "sieved", "budget >= prompt"
CONTROL_BUDGET = 4096
POOL_TOKENS = 16 * 1024
"""Room for every prefix of a workload: eviction is not what is measured."""

TURNS = 10
FIRST_TEXT, TURN_TEXT, ANSWER = 540, 175, 64

SHARED, TAIL, TAILS, CONCURRENCY, SHORT_ANSWER = 2000, 60, 50, 8, 16

OVER_BUDGET, CHANGED, RESENT_PROMPTS, RESENDS, RESENT_ANSWER = 40, 20, 8, 2, 8


@dataclass(frozen=True)
class Turn:
    """What one arm did in its turn.

    Attributes:
        label: Which turn.
        steps: The engine's steps.
        requests: What ended.
        cold: Whether nothing of it can have been in the prefix cache.
    """

    label: str
    steps: list[StepRecord]
    requests: list[RequestRecord]
    cold: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Sums of the turn: CPU seconds, tokens, and the times to the first token."""
        prompt = sum(request.prompt_tokens for request in self.requests)
        cached = sum(request.cached_tokens for request in self.requests)
        return {
            "label": self.label,
            "cold": self.cold,
            "requests": len(self.requests),
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "computed_tokens": prompt - cached,
            # vLLM counts a chunk of one token as a decode step, and so does `StepRecord`.
            "scheduled_prefill_tokens": sum(step.prompt_tokens for step in self.steps),
            "output_tokens": sum(len(request.token_ids) for request in self.requests),
            "cpu_s": sum(step.cpu for step in self.steps),
            "prefill_cpu_s": sum(step.cpu for step in self.steps if step.prompt_tokens),
            "wall_s": sum(step.wall for step in self.steps),
            "preempted": sum(step.preempted for step in self.steps),
            "ttft_cpu_s": [request.first_token_cpu for request in self.requests],
        }


Turns = dict[str, list[Turn]]


def measure(lab: Lab, options: Options, workload: str, repeats: int) -> dict[str, Any]:
    """Run one workload in three arms that take turns within it.

    Turns alternate (ABC, CBA, ...), so that what else the machine does falls on all arms.

    Raises:
        BenchmarkError: An arm did not do what it is there to show.
    """
    pool = options.shape.pool_bytes(POOL_TOKENS)
    arms = lab.arms(
        [
            replace(spec, prefix_caching=True, max_num_seqs=CONCURRENCY)
            for spec in (
                options.stock(STOCK, pool),
                options.sieved(SIEVED, pool),
                options.sieved(CONTROL, pool, budget=CONTROL_BUDGET),
            )
        ]
    )
    gate = pass_gate(options, arms[0], arms[1], options.budget)
    text = Text(options.model)
    results = []
    for repeat in range(repeats):
        for arm in arms:
            arm.call("forget_prefixes")
        turns = WORKLOADS[workload](options, text, arms, repeat)
        _require_sound(arms, turns)
        sums = {name: [turn.as_dict() for turn in taken] for name, taken in turns.items()}
        ratios = {name: _ratios(sums[name], sums[STOCK]) for name in (SIEVED, CONTROL)}
        lab.say(
            f"{workload}: repeat {repeat + 1}/{repeats}, CPU of stock:"
            f" sieved {ratios[SIEVED]['cpu']:.3f}, control {ratios[CONTROL]['cpu']:.3f}"
        )
        results.append({"turns": sums, "totals": _totals(sums), "ratios": ratios})
    for arm in arms:
        arm.call("forget_prefixes")
    return {
        "settings": {"pool_bytes": pool, "control_budget": CONTROL_BUDGET, **SETTINGS[workload]},
        "gate": gate,
        "arms": {arm.name: arm.description for arm in arms},
        "repeats": results,
        "summary": _summary(results),
    }


def _chat(options: Options, text: Text, arms: list[Arm], repeat: int) -> Turns:
    """Ten turns of one conversation; every arm goes on with its own answers."""
    new_tokens = [FIRST_TEXT, *[TURN_TEXT] * (TURNS - 1)]
    chats = {arm.name: Conversation(text, new_tokens, 97 * repeat) for arm in arms}
    turns: Turns = {arm.name: [] for arm in arms}
    for turn in range(TURNS):
        for arm in alternating(arms, turn + repeat):
            arm.call("submit", [chats[arm.name].ask()], [ANSWER], end_token=False)
            steps = arm.call("steps")
            requests = arm.call("take_finished")
            chats[arm.name].answered(requests[0].token_ids)
            turns[arm.name].append(Turn(f"turn {turn + 1}", steps, requests, cold=turn == 0))
    return turns


def _shared(options: Options, text: Text, arms: list[Arm], repeat: int) -> Turns:
    """Fifty tails of one long system prompt, eight of them at a time."""
    shared, *tails = text.slices([SHARED, *[TAIL] * TAILS], 97 * repeat)
    # The report is shorter than all tails: a number makes each one of a kind.
    prompts = [
        [*shared, *text.ids(f"\n\nQuestion {index + 1}: "), *tail]
        for index, tail in enumerate(tails)
    ]
    waiting = {arm.name: list(prompts) for arm in arms}
    steps: dict[str, list[StepRecord]] = {arm.name: [] for arm in arms}
    ended: dict[str, list[RequestRecord]] = {arm.name: [] for arm in arms}
    for arm in arms:
        _submit_next(arm, waiting[arm.name], CONCURRENCY)
    wave = repeat
    while any(len(done) < TAILS for done in ended.values()):
        for arm in alternating(arms, wave):
            steps[arm.name] += arm.call("steps", until="finished")
            finished = arm.call("take_finished")
            ended[arm.name] += finished
            _submit_next(arm, waiting[arm.name], len(finished))
        wave += 1
    # Arms form other waves, so only the whole is compared, and each request with itself.
    return {
        name: [Turn(f"{TAILS} tails", steps[name], sorted(done, key=_number))]
        for name, done in ended.items()
    }


def _submit_next(arm: Arm, waiting: list[list[int]], count: int) -> None:
    batch = [waiting.pop(0) for _ in range(min(count, len(waiting)))]
    if batch:
        arm.call("submit", batch, [SHORT_ANSWER] * len(batch))


def _resent(options: Options, text: Text, arms: list[Arm], repeat: int) -> Turns:
    """Prompts just over the budget, then again with other last tokens."""
    length = options.budget + OVER_BUDGET
    sizes = [length, *[CHANGED] * RESENDS] * RESENT_PROMPTS
    slices = list(text.slices(sizes, 97 * repeat))
    turns: Turns = {arm.name: [] for arm in arms}
    for number in range(RESENT_PROMPTS):
        first, *ends = slices[number * (RESENDS + 1) : (number + 1) * (RESENDS + 1)]
        first = [*text.ids(f"Part {number + 1}. "), *first][:length]
        prompts = [first, *[[*first[:-CHANGED], *end] for end in ends]]
        for arm in alternating(arms, number + repeat):
            for sending, prompt in enumerate(prompts):
                arm.call("submit", [prompt], [RESENT_ANSWER])
                steps = arm.call("steps")
                label = f"prompt {number + 1}, {f'resent {sending}' if sending else 'first'}"
                requests = arm.call("take_finished")
                turns[arm.name].append(Turn(label, steps, requests, cold=not sending))
    return turns


WORKLOADS: dict[str, Callable[[Options, Text, list[Arm], int], Turns]] = {
    "chat": _chat,
    "shared": _shared,
    "resent": _resent,
}
SETTINGS: dict[str, dict[str, int]] = {
    "chat": {"turns": TURNS, "output_tokens": ANSWER},
    "shared": {
        "shared_tokens": SHARED,
        "tail_tokens": TAIL,
        "tails": TAILS,
        "concurrency": CONCURRENCY,
        "output_tokens": SHORT_ANSWER,
    },
    "resent": {
        "over_budget": OVER_BUDGET,
        "changed_tokens": CHANGED,
        "prompts": RESENT_PROMPTS,
        "resends": RESENDS,
        "output_tokens": RESENT_ANSWER,
    },
}


def _number(request: RequestRecord) -> int:
    return int(request.request_id[1:])


def _require_sound(arms: list[Arm], turns: Turns) -> None:
    _, sieved, control = arms
    requests = {
        name: [request for turn in taken for request in turn.requests]
        for name, taken in turns.items()
    }
    for name in requests:
        requests[name].sort(key=_number)
    require_equal(requests[STOCK], requests[CONTROL], control)
    require_not_sieved(control, requests[CONTROL])
    for request in requests[SIEVED]:
        # How many blocks a hit leaves to be freed is the prefix cache's affair.
        report = request.report
        if not report or report["stored_tokens"]["sieved"] >= report["prompt_tokens"]:
            raise BenchmarkError(f"arm {sieved.name!r} did not sieve {request.request_id}")
    for arm in arms:
        if leaked := arm.call("num_blocks_out"):
            raise BenchmarkError(f"arm {arm.name!r} leaks {leaked} blocks")


def _ratios(ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of a repeat; those of single turns are over the turns that could hit."""
    warm = [(a, b) for a, b in zip(ours, stock, strict=True) if not a["cold"]]
    return {
        "cpu": _sum(ours, "cpu_s") / _sum(stock, "cpu_s"),
        "prefill cpu": _sum(ours, "prefill_cpu_s") / _sum(stock, "prefill_cpu_s"),
        "computed tokens": _sum(ours, "computed_tokens") / _sum(stock, "computed_tokens"),
        "ttft cpu": statistics.median(_ttfts(ours)) / statistics.median(_ttfts(stock)),
        "cpu by turn": [a["cpu_s"] / b["cpu_s"] for a, b in warm],
        "ttft cpu by request": [x / y for x, y in zip(_ttfts(ours), _ttfts(stock), strict=True)],
    }


def _sum(turns: list[dict[str, Any]], key: str) -> float:
    return sum(turn[key] for turn in turns)


def _ttfts(turns: list[dict[str, Any]]) -> list[float]:
    """CPU seconds to the first token of every request that could hit."""
    return [value for turn in turns if not turn["cold"] for value in turn["ttft_cpu_s"]]


TOTALS = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "scheduled_prefill_tokens",
    "cpu_s",
    "prefill_cpu_s",
    "wall_s",
    "preempted",
)


def _totals(sums: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    totals = {}
    for name, turns in sums.items():
        totals[name] = {key: _sum(turns, key) for key in TOTALS}
        totals[name]["ttft_p50_cpu_s"] = statistics.median(_ttfts(turns))
    return totals


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for name in (SIEVED, CONTROL):
        ratios = [result["ratios"][name] for result in results]
        for key in ("computed tokens", "cpu", "prefill cpu", "ttft cpu"):
            summary[f"{key}, {name}/stock"] = spread([ratio[key] for ratio in ratios])
        for key in ("cpu by turn", "ttft cpu by request"):
            summary[f"{key}, {name}/stock"] = spread(
                [value for ratio in ratios for value in ratio[key]]
            )
    return summary
