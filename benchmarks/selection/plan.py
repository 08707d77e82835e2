"""What is run: prompts in two splits, methods, and the engines that serve them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsieve.evals.item import Item
from kvsieve.evals.prompts import PromptMaker
from kvsieve.evals.tasks import TASKS

FULL = "full KV"
ALONE = "budget alone"
LOWEST_JUDGED = 7
"""ASL compares eight layers, so this is the lowest it can judge."""

ASL_SCORES = {"window": 32, "pooling": "avg", "pool_size": 7}
"""ASL's own scoring, given to the fixed method: nothing but the layer then differs."""


@dataclass(frozen=True)
class Plan:
    """One experiment.

    Attributes:
        tasks: Names of `kvsieve eval`'s tasks.
        length: Tokens of a prompt, at most.
        count: Prompts of a task that results are taken from.
        calibration_count: Prompts of a task that threshold and first judged layer are taken from.
        budgets: Shares of the prompt that are kept, as a request gives them.
        fixed_layers: Selection layers of the fixed method.
        others: Further requests, such as "gemfilter@12", with their authors' settings.
        target_layer: ASL's threshold is the one with which it prunes calibration prompts after
            this layer on average: it then costs what the fixed method costs there.
        max_layer: Where ASL prunes what has not settled.
        seed: Of the prompts of results; the calibration's is the next one.
    """

    tasks: tuple[str, ...]
    length: int
    count: int
    calibration_count: int
    budgets: tuple[str, ...]
    fixed_layers: tuple[int, ...]
    others: tuple[str, ...]
    target_layer: int
    max_layer: int
    seed: int

    @property
    def max_model_len(self) -> int:
        """Longest request, in tokens: an answer takes at most 48."""
        return self.length + 64

    @property
    def num_requests(self) -> int:
        """Requests of the whole experiment."""
        methods = len((ALONE, "asl")) + len(self.fixed_layers) + len(self.others)
        of_a_task = self.count + len(self.budgets) * (self.calibration_count + methods * self.count)
        return len(self.tasks) * of_a_task

    def items(self, maker: PromptMaker, split: str) -> list[Item]:
        """The prompts of a split, "results" or "calibration": of each task in turn."""
        is_result = split == "results"
        count = self.count if is_result else self.calibration_count
        seed = self.seed if is_result else self.seed + 1
        by_task = [
            TASKS[task].generate(maker.count_tokens, self.length, count, seed)
            for task in self.tasks
        ]
        # In turn, so that a run that is cut short has read as many of each.
        return [maker.item(example) for row in zip(*by_task, strict=True) for example in row]


@dataclass(frozen=True)
class Job:
    """Prompts under one setting.

    Attributes:
        split: "results" or "calibration".
        method: Name in the results.
        budget: Share of the prompt that is kept, or "full".
        request: The request's `extra_args`.
        reads_only: Whether the answer is of no interest.
    """

    split: str
    method: str
    budget: str
    request: dict[str, Any]
    reads_only: bool = False


def judging_settings(budget: str) -> dict[str, Any]:
    """An engine whose ASL never settles: every layer is judged, and nothing is pruned."""
    options = {"layer": LOWEST_JUDGED, "threshold": 0.0}
    return {"budget": budget, "prune": "asl", "prune_options": options}


def fixed_settings(budget: str) -> dict[str, Any]:
    """An engine whose fixed method scores as ASL does."""
    return {"budget": budget, "prune": "fastkv", "prune_options": ASL_SCORES}


def asl_settings(budget: str, first_layer: int, threshold: float, max_layer: int) -> dict[str, Any]:
    """An engine whose ASL prunes every prompt somewhere."""
    options = {"layer": first_layer, "threshold": threshold, "max_layer": max_layer}
    return {"budget": budget, "prune": "asl", "prune_options": options}


def judging_job(split: str, budget: str) -> Job:
    """The budget alone, with every layer judged; of calibration prompts no answer is of use."""
    return Job(split, ALONE, budget, {"kv_budget": budget}, reads_only=split == "calibration")


def fixed_jobs(plan: Plan) -> list[Job]:
    """Full KV, the fixed layers and then the others.

    The layer that costs what ASL does comes first: a run that is cut short is then of some use.
    """
    layers = sorted(plan.fixed_layers, key=lambda layer: (abs(layer - plan.target_layer), layer))
    wishes = {fixed_name(layer): f"fastkv@{layer}" for layer in layers}
    wishes |= {wish: wish for wish in plan.others}
    first, *rest = [
        Job("results", name, budget, {"kv_budget": budget, "kv_prune": wish})
        for name, wish in wishes.items()
        for budget in plan.budgets
    ]
    full = Job("results", FULL, "full", {"kv_budget": "full", "kv_prune": "none"})
    return [first, full, *rest]


def asl_job(budget: str) -> Job:
    """ASL with the engine's first judged layer and threshold."""
    return Job("results", "asl", budget, {"kv_budget": budget})


def fixed_name(layer: int) -> str:
    """Name of a fixed layer in the results."""
    return f"fixed@{layer}"
