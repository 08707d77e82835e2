"""Asks a server once for all that it may refuse or leave undone, before hours are spent on it."""

from __future__ import annotations

from collections.abc import Sequence

from kvsieve.core.errors import ConfigError
from kvsieve.core.treatment import FULL
from kvsieve.evals.fidelity import TOP, is_the_models_own
from kvsieve.evals.item import Item
from kvsieve.evals.record import Record, proof
from kvsieve.evals.run import Run
from kvsieve.evals.settings import Setting
from kvsieve.serving.client import RequestError


async def check_server(run: Run, items: Sequence[Item], missing: Sequence[Item]) -> None:
    """Find out whether a server can and will do what a run is going to ask.

    Args:
        run: The run.
        items: All of its items.
        missing: Those that the journal lacks; at least one.

    Raises:
        ConfigError: Every refusal.
        ProofError: It does not do what it is asked, or no longer does it as it did.
        RequestError: It cannot be reached.
    """
    reasons = await _model_and_length(run, missing)
    if not reasons:
        reasons = await _budgets(run, missing)
    if not reasons:
        reasons = await _changes(run, items)
    if reasons:
        raise ConfigError(reasons)


async def _model_and_length(run: Run, items: Sequence[Item]) -> list[str]:
    try:
        served = await run.client.models()
    except RequestError as error:
        if error.status is None:
            raise
        # Something between us and the server may let nothing through but completions.
        return []
    name = run.client.model
    if name not in served:
        names = ", ".join(map(repr, served)) or "none"
        return [f"the server has no model {name!r}, but {names}: name one (--served-model-name)"]
    longest, limit = max(items, key=lambda item: item.length), served[name]
    if limit is None or longest.length <= limit:
        return []
    return [
        f"{longest.item_id} needs {longest.length} tokens, answer included, and the server takes"
        f" {limit}: give shorter --lengths, cut prompts from files (--max-prompt-tokens), or start"
        " it with a larger --max-model-len"
    ]


async def _budgets(run: Run, items: Sequence[Item]) -> list[str]:
    """The shortest prompt once per setting."""
    shortest = min(items, key=lambda item: item.length)
    forced = shortest.prompt_ids[-1:] if any(item.forced_ids for item in items) else ()
    probe = Item("the first prompt", shortest.task, shortest.prompt_ids, forced)
    needs_logprobs = any(item.example is None for item in items)
    refusals: dict[str, list[str]] = {}
    for setting in (Setting(run.policy, FULL), *run.settings):
        try:
            answer = await run.client.complete(
                probe.prompt_ids,
                max_tokens=min(2, shortest.length - len(shortest.prompt_ids)),
                kv_budget=setting.kv_budget,
                logprobs=TOP if needs_logprobs else None,
                forced_tokens=probe.forced_ids,
            )
        except RequestError as error:
            if error.status is None:
                raise
            refusals.setdefault(str(error), []).append(str(setting.kv_budget))
            continue
        proof(answer, setting, probe)
        if needs_logprobs and not all(map(is_the_models_own, answer.logprobs)):
            return [
                "the server's log-probabilities are not those of the model: start it with"
                " --logprobs-mode raw_logprobs, vLLM's default"
            ]
    return [f"{said} (kv_budget {', '.join(budgets)})" for said, budgets in refusals.items()]


async def _changes(run: Run, items: Sequence[Item]) -> list[str]:
    """Whether the server still keeps what it kept when the journal's records were made.

    A server that runs already may have been started anew with other settings, which nothing
    but what it keeps can show.
    """
    known = [
        (record, item)
        for item in items
        for setting in run.settings
        if (record := run.journal.get(item, run.policy, setting.kv_budget)) and record.sieved
    ]
    if not known:
        return []
    before, item = min(known, key=lambda pair: pair[1].length)
    answer = await run.client.complete(
        item.prompt_ids,
        max_tokens=min(2, item.length - len(item.prompt_ids)),
        kv_budget=before.kv_budget,
    )
    facts = proof(answer, before.setting, Item(item.item_id, item.task, item.prompt_ids))
    if _is_alike(before, facts["kv_share"], facts["mass_lost"]):
        return []
    return [
        f"the server does not keep what it kept when {run.journal.path} was written: of"
        f" {item.item_id} at {before.setting.name} it held {before.kv_share:.4f} of the KV and lost"
        f" {before.mass_lost} of the attention, and now {facts['kv_share']:.4f} and"
        f" {facts['mass_lost']}. Were its settings changed? Name another folder (--out)"
    ]


def _is_alike(before: Record, kv_share: float, mass_lost: float | None) -> bool:
    if abs(before.kv_share - kv_share) > 1e-9 or before.mass_lost is None or mass_lost is None:
        return before.kv_share == kv_share and before.mass_lost == mass_lost
    # What is computed in other batches differs in rounding, which may swap tokens of equal score.
    return abs(before.mass_lost - mass_lost) <= 1e-3 + 0.02 * before.mass_lost
