"""From records to results: a mean with its interval per task and setting, and a recommendation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from kvsieve.evals.passages import FIDELITY, PASSAGE_TASKS, RECALL
from kvsieve.evals.record import Record
from kvsieve.evals.settings import Setting
from kvsieve.evals.statistics import Estimate, mean, paired_difference, paired_ratio

SCHEMA = 1
"""Version of the results file."""


class Interval(BaseModel):
    """A mean with its 95% interval.

    Attributes:
        value: The mean.
        low: Lower end.
        high: Upper end.
        count: Examples, or pairs of them.
    """

    model_config = ConfigDict(frozen=True)

    value: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, estimate: Estimate) -> Interval:
        """An estimate, as results keep it."""
        return cls(value=estimate.value, low=estimate.low, high=estimate.high, count=estimate.count)


class TaskResult(BaseModel):
    """A task under a setting.

    Attributes:
        task: The task; "all" for those together that the model can do.
        setting: Name of the setting; "full" for full KV.
        policy: Its policy.
        kv_budget: Its budget.
        score: In [0, 1]; of "fidelity" the agreement with full KV.
        difference: Against full KV on the same examples; None for full KV itself.
        perplexity_ratio: Of forced texts, how many times full KV's.
        kl: Of forced texts, the divergence from full KV in nats, a lower bound.
        prompt_tokens: Mean length of the prompts.
        kv_share: Mean KV held of the prompt, as a share of full KV over all layers.
        mass_lost: Mean share of attention that went to what was dropped.
        sieved_share: Share of the requests that were sieved.
    """

    model_config = ConfigDict(frozen=True)

    task: str
    setting: str
    policy: str
    kv_budget: int | str
    score: Interval
    difference: Interval | None = None
    perplexity_ratio: Interval | None = None
    kl: Interval | None = None
    prompt_tokens: float
    kv_share: float
    mass_lost: float | None = None
    sieved_share: float


class EvalResults(BaseModel):
    """What an evaluation found, whole.

    Attributes:
        schema_version: Version of this layout.
        kind: Always "eval".
        provenance: Versions, commit, command, machine.
        run: Model, template, seed, tasks, lengths and settings as asked for.
        tolerance: Loss of score that the user can live with.
        floors: Score by task of an answer that has not read the context, where it is known.
        tasks: Results by task and setting, full KV first.
        beyond_the_model: Tasks where full KV is not clearly above the floor: no sieve can
            be judged by them, and they are left out of "all".
        disagreeing: Answers of full KV that differed from one server of the run to another.
        full_answers: Answers of full KV that could be compared in that way.
        recommended: Name of the setting that holds least memory within the tolerance.
        records: Every record.
    """

    schema_version: int = SCHEMA
    kind: str = "eval"
    provenance: dict[str, Any]
    run: dict[str, Any]
    tolerance: float
    floors: dict[str, float]
    tasks: list[TaskResult]
    beyond_the_model: list[str]
    disagreeing: int
    full_answers: int
    recommended: str | None
    records: list[Record]

    def of(self, task: str) -> list[TaskResult]:
        """A task's results, full KV first."""
        return [result for result in self.tasks if result.task == task]


def quality(record: Record) -> float:
    """What a record counts in its task's score."""
    if record.task == FIDELITY.name:
        assert record.agreement is not None, "a continuation is compared with full KV"
        return record.agreement
    return record.score


def summarise(
    records: Sequence[Record],
    *,
    provenance: dict[str, Any],
    run: dict[str, Any],
    tolerance: float,
    floors: Mapping[str, float],
    seed: int,
) -> EvalResults:
    """Results of complete records: every item under every setting.

    Args:
        records: In the order of settings and items.
        provenance: See `EvalResults`.
        run: See `EvalResults`.
        tolerance: Loss of score that the user can live with.
        floors: Score by task of an answer that has not read the context; 0 where it lacks.
        seed: Of the intervals.
    """
    tables = _Tables(records, seed)
    names = list(dict.fromkeys(record.task for record in records))
    known = {name: floors[name] for name in names if name in floors}
    if RECALL.name in names and (guessed := tables.unseen_text()) is not None:
        known[RECALL.name] = guessed
    results = [result for name in names for result in tables.results(name, [name])]
    beyond = [
        result.task
        for result in results
        if result.setting == "full"
        and result.task != FIDELITY.name
        and result.score.low <= known.get(result.task, 0.0)
    ]
    doable = [name for name in names if name not in beyond]
    if doable:
        results += tables.results("all", doable)
    overall = [result for result in results if result.task == "all"]
    return EvalResults(
        provenance=provenance,
        run=run,
        tolerance=tolerance,
        floors=known,
        tasks=results,
        beyond_the_model=beyond,
        disagreeing=tables.disagreeing,
        full_answers=tables.full_answers,
        recommended=recommend(overall, tolerance),
        records=list(records),
    )


def recommend(overall: Sequence[TaskResult], tolerance: float) -> str | None:
    """The setting that holds least memory and is shown to lose at most `tolerance`.

    Shown means that the lower end of the difference's interval is above the loss; settings
    that sieved nothing are no answer.
    """
    within = [
        result
        for result in overall
        if result.difference is not None
        and result.difference.low >= -tolerance
        and result.sieved_share > 0
    ]
    return min(within, key=lambda result: result.kv_share).setting if within else None


class _Tables:
    """Records by policy, budget and item."""

    def __init__(self, records: Sequence[Record], seed: int) -> None:
        self._seed = seed
        self._by_setting: dict[tuple[str, int | str], dict[str, Record]] = {}
        for record in records:
            key = (record.policy, record.kv_budget)
            self._by_setting.setdefault(key, {})[record.item_id] = record
        full = [one for key, one in self._by_setting.items() if Setting(*key).is_full]
        pairs = [
            (first, other[item_id])
            for other in full[1:]
            for item_id, first in full[0].items()
            if item_id in other
        ]
        self.full_answers = len(pairs)
        self.disagreeing = sum(
            (one.answer, one.score) != (other.answer, other.score) for one, other in pairs
        )

    def unseen_text(self) -> float | None:
        """How often full KV names the next token of text that it has not read before.

        A passage that comes twice is guessed as often without its first copy. None if no such
        text was asked.
        """
        for key, by_item in self._by_setting.items():
            scores = [one.score for one in by_item.values() if one.task == FIDELITY.name]
            if scores and Setting(*key).is_full:
                return sum(scores) / len(scores)
        return None

    def results(self, name: str, tasks: Sequence[str]) -> list[TaskResult]:
        """Results of the tasks together, full KV once and then every setting."""
        found: list[TaskResult] = []
        for (policy, kv_budget), by_item in self._by_setting.items():
            setting = Setting(policy, kv_budget)
            if setting.is_full and any(result.setting == "full" for result in found):
                continue
            records = [record for record in by_item.values() if record.task in tasks]
            if records:
                found.append(self._result(name, setting, records))
        return found

    def _result(self, name: str, setting: Setting, records: Sequence[Record]) -> TaskResult:
        fulls = self._by_setting[setting.policy, "full"]
        full = [fulls[record.item_id] for record in records]
        scores = [quality(record) for record in records]
        score = Interval.of(mean(scores, self._seed))
        if setting.is_full and name == FIDELITY.name:
            # Full KV agrees with itself by definition: nothing was sampled.
            score = Interval(value=1.0, low=1.0, high=1.0, count=len(records))
        lost = [record.mass_lost for record in records if record.mass_lost is not None]
        facts: dict[str, Any] = {}
        if not setting.is_full:
            difference = paired_difference(scores, [quality(one) for one in full], self._seed)
            facts["difference"] = Interval.of(difference)
            if name == FIDELITY.name:
                # Nothing agrees with full KV more than it does with itself.
                facts["difference"] = facts["difference"].model_copy(
                    update={"high": min(0.0, difference.high)}
                )
            if name in PASSAGE_TASKS:
                facts |= self._distribution(records, full)
        return TaskResult(
            task=name,
            setting=setting.name,
            policy=setting.policy,
            kv_budget=setting.kv_budget,
            score=score,
            prompt_tokens=_mean(records, lambda record: record.prompt_tokens),
            kv_share=_mean(records, lambda record: record.kv_share),
            mass_lost=sum(lost) / len(lost) if lost else None,
            sieved_share=_mean(records, lambda record: record.sieved),
            **facts,
        )

    def _distribution(
        self, records: Sequence[Record], full: Sequence[Record]
    ) -> dict[str, Interval]:
        """Perplexity and divergence of forced texts against full KV."""
        ratio = paired_ratio(
            [_exp(record.nll) for record in records],
            [_exp(record.nll) for record in full],
            self._seed,
        )
        # The mean of divergences, by way of the mean of logarithms that `paired_ratio` takes.
        kl = paired_ratio([_exp(record.kl) for record in records], [1.0] * len(records), self._seed)
        logs = (math.log(kl.value), max(0.0, math.log(kl.low)), math.log(kl.high))
        return {
            "perplexity_ratio": Interval.of(ratio),
            "kl": Interval.of(Estimate(*logs, kl.count)),
        }


def _exp(nats: float | None) -> float:
    """The exponential, of what is beyond all floats the largest."""
    assert nats is not None, "a forced text is judged by its distribution"
    return math.exp(min(nats, 700.0))


def _mean(records: Sequence[Record], value: Callable[[Record], float]) -> float:
    return sum(map(value, records)) / len(records)
