"""What is known of one item under one setting, as the journal keeps it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from kvsieve.core.errors import KvsieveError
from kvsieve.evals.item import Item
from kvsieve.evals.settings import Setting
from kvsieve.serving.client import Completion


class Record(BaseModel):
    """One judged answer.

    Attributes:
        item_id: The item.
        item_sha256: What was asked and how it was judged, see `Item.sha256`.
        task: Its task.
        policy: Policy of the server that answered.
        kv_budget: The setting's budget: tokens, a share, or "full".
        score: In [0, 1]: of an answer the scorer's, of a forced text the share of tokens
            where the most probable token is right.
        answer: What was generated freely.
        finish_reason: "stop", "length", ...
        prompt_tokens: Length of the prompt.
        cached_tokens: Prompt tokens that the prefix cache had; None if the server is silent.
        sieved: Whether the cache was sieved, as the worker reports it.
        kv_share: KV held of the prompt as a share of full KV, over all layers.
        mass_lost: Mean share of attention that went to what was dropped.
        nll: Of a forced text, the mean negative log-probability.
        kl: Of a forced text, the mean divergence from full KV.
        agreement: Of a forced text, the share of tokens with full KV's most probable one.
        tags: The item's.
    """

    model_config = ConfigDict(frozen=True)

    item_id: str
    item_sha256: str
    task: str
    policy: str
    kv_budget: int | str
    score: float
    answer: str = ""
    finish_reason: str | None = None
    prompt_tokens: int
    cached_tokens: int | None = None
    sieved: bool
    kv_share: float
    mass_lost: float | None = None
    nll: float | None = None
    kl: float | None = None
    agreement: float | None = None
    tags: dict[str, int | float | str] = {}

    @property
    def setting(self) -> Setting:
        """The setting that it was made under."""
        return Setting(self.policy, self.kv_budget)


class ProofError(KvsieveError):
    """A server's answer does not show what it would have to show if the setting had worked."""


def proof(completion: Completion, setting: Setting, item: Item) -> dict[str, Any]:
    """The fields of a record that come from the server's report.

    Raises:
        ProofError: There is no report, it is about something else, or the model did not say
            what it was made to say.
    """
    report, item_id = completion.report, item.item_id
    if report is None:
        raise ProofError(
            f"the answer to {item_id} carries no report, so nothing shows what was kept. Is the"
            " server one of kvsieve? `kvsieve doctor` tells about this machine's"
        )
    wanted = "full" if setting.is_full else "sieve"
    try:
        mode, policy, budget = report["mode"], report["policy"], report["budget"]
        length, layers, stored = report["prompt_tokens"], report["layers"], report["stored_tokens"]
        held = sum(count * stored[kind] for kind, count in layers.items())
        kv_share = held / (length * sum(layers.values()))
        lost = report["attention_mass_lost"]
        facts = {"sieved": report["sieved"], "mass_lost": lost["mean"] if lost else None}
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ProofError(
            f"the report on {item_id} is not one of this version of kvsieve"
            f" ({type(error).__name__}: {error}): is the server another version?"
        ) from None
    if policy != setting.policy:
        raise ProofError(
            f"{item_id} was asked for with policy {setting.policy}, and the server's is {policy}:"
            f" give --policies {policy}, or start a server with that policy"
        )
    if mode != wanted:
        raise ProofError(
            f"{item_id} was asked for in mode {wanted!r}, and the server reports mode {mode!r}: is"
            " the server's mode 'sieve'? (`kvsieve mode` shows and switches it)"
        )
    if isinstance(setting.kv_budget, int) and budget != setting.kv_budget:
        raise ProofError(
            f"{item_id} was asked for with a budget of {setting.kv_budget} tokens, and the server"
            f" reports one of {budget}"
        )
    if report["sieved"] and report.get("not_pruned"):
        raise ProofError(f"{item_id} was to be pruned and was not: {report['not_pruned']}")
    if length != len(item.prompt_ids) or completion.prompt_tokens != length:
        raise ProofError(
            f"{item_id} has {len(item.prompt_ids)} tokens; the server read"
            f" {completion.prompt_tokens} and reports on {length}"
        )
    if completion.token_ids[: len(item.forced_ids)] != item.forced_ids:
        raise ProofError(
            f"the server did not make the model say what {item_id} wants: is its setting"
            " forced_tokens on, and does nothing in between drop token_ids from its answers?"
        )
    return {
        **facts,
        "kv_share": kv_share,
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": completion.cached_tokens,
        "finish_reason": completion.finish_reason,
    }
