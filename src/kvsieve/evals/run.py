"""Send every item under every setting, judge the answers, and write them down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvsieve.core.treatment import FULL
from kvsieve.evals.example import Example
from kvsieve.evals.fidelity import TOP, compare
from kvsieve.evals.item import Item
from kvsieve.evals.journal import Journal
from kvsieve.evals.metrics import SCORERS
from kvsieve.evals.prompts import PromptMaker
from kvsieve.evals.record import Record, proof
from kvsieve.evals.settings import Setting
from kvsieve.serving.client import Client, Completion
from kvsieve.serving.together import together


@dataclass(frozen=True)
class Run:
    """Items under the settings of one policy, on the server that has that policy.

    Attributes:
        client: The server.
        maker: What made the prompts.
        journal: Where records go, and what is known already.
        policy: The server's policy.
        settings: Settings of that policy. Full KV comes first by itself.
        concurrency: Items that are under way at once.
    """

    client: Client
    maker: PromptMaker
    journal: Journal
    policy: str
    settings: Sequence[Setting]
    concurrency: int

    async def run(self, items: Sequence[Item], on_done: Callable[[int], None]) -> None:
        """Judge every item that the journal lacks.

        Args:
            items: What to send.
            on_done: Told after each item how many requests it was.

        Raises:
            RequestError: The server refused or is gone. What was judged stays in the journal.
            ProofError: The server does not show that it did what was asked.
            ConfigError: The journal cannot be written.
        """
        gate = asyncio.Semaphore(self.concurrency)

        async def one(item: Item) -> None:
            async with gate:
                await self._judge(item)
                on_done(1 + len(self.settings))

        await together(one(item) for item in items)

    async def _judge(self, item: Item) -> None:
        full = Setting(self.policy, FULL)
        wanted = [
            setting
            for setting in (full, *self.settings)
            if self.journal.get(item, self.policy, setting.kv_budget) is None
        ]
        if not wanted:
            return
        # Full KV first: the others then find the prompt in the prefix cache. It is asked again
        # where only its distribution is missing, which the journal does not keep.
        reference = None
        records = []
        if full in wanted or item.example is None:
            reference = await self._ask(item, full)
            records.append(self._record(item, full, reference, reference))
        others = [setting for setting in wanted if not setting.is_full]
        answers = await asyncio.gather(*(self._ask(item, setting) for setting in others))
        records += [
            self._record(item, setting, answer, reference)
            for setting, answer in zip(others, answers, strict=True)
        ]
        self.journal.add(records)

    async def _ask(self, item: Item, setting: Setting) -> Completion:
        example = item.example
        is_judged_by_token = example is None
        return await self.client.complete(
            item.prompt_ids,
            max_tokens=len(item.forced_ids) + item.max_tokens,
            kv_budget=setting.kv_budget,
            # A stop text may occur in what is forced; then it is looked for here.
            stop=() if example is None or item.forced_ids else example.stop,
            ignore_eos=is_judged_by_token,
            logprobs=TOP if is_judged_by_token else None,
            forced_tokens=item.forced_ids,
        )

    def _record(
        self, item: Item, setting: Setting, answer: Completion, full: Completion | None
    ) -> Record:
        facts: dict[str, Any] = {
            "item_id": item.item_id,
            "item_sha256": item.sha256,
            "task": item.task,
            "policy": self.policy,
            "kv_budget": setting.kv_budget,
            "tags": dict(item.tags),
            **proof(answer, setting, item),
        }
        if item.example is not None:
            text = answer_text(self.maker, item, item.example, answer)
            score = SCORERS[item.example.scorer](text, item.example)
            return Record(**facts, answer=text, score=score)
        assert full is not None, "forced texts are compared with full KV"
        found = compare(full.logprobs, answer.logprobs)
        return Record(
            **facts,
            score=found.accuracy,
            nll=found.nll,
            kl=found.kl,
            agreement=found.agreement,
        )


def answer_text(maker: PromptMaker, item: Item, example: Example, answer: Completion) -> str:
    """What was said freely, up to the first stop text."""
    if not item.forced_ids:
        return answer.text
    text = maker.decode(answer.token_ids[len(item.forced_ids) :])
    for stop in example.stop:
        text = text.split(stop, 1)[0]
    return text
