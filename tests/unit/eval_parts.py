"""What tests of an evaluation's core are made of: tokenizers, items, records, results."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvsieve.evals.example import Example
from kvsieve.evals.item import Item
from kvsieve.evals.passages import DOCUMENT
from kvsieve.evals.record import Record
from kvsieve.evals.results import EvalResults, summarise

CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)
DROPS_SYSTEM = (
    "{% for message in messages %}{% if message.role != 'system' %}<|user|>{{ message.content }}"
    "{% endif %}{% endfor %}<|assistant|>"
)


def save_tokenizer(
    folder: Path, *, marks: str = "", chat_template: str | None = CHAT, vocabulary: int = 700
) -> str:
    """A byte-level BPE tokenizer, trained on the report that comes with kvsieve.

    Args:
        folder: Where to save it.
        marks: "", "begin" or "both": what it adds to a text, as Llama's does and some others.
        chat_template: Its chat template.
        vocabulary: Number of tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(DOCUMENT.read_text().splitlines(), trainer)
    if marks:
        single = "<s> $A </s>" if marks == "both" else "<s> $A"
        ids = [("<s>", 0), ("</s>", 1)]
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(folder)
    return str(folder)


def make_example(**changes: Any) -> Example:
    fields = {
        "example_id": "niah/64/0.50/0",
        "task": "niah",
        "context": "The code is 71. " * 4,
        "question": "What is the code?",
        "references": ("71",),
        "scorer": "contains_all",
        "max_tokens": 8,
        "answer_prefix": "The code is",
    }
    return Example(**{**fields, **changes})


def make_item(item_id: str = "niah/64/0.50/0", **changes: Any) -> Item:
    fields = {
        "task": "niah",
        "prompt_ids": (5, 6, 7),
        "max_tokens": 8,
        "example": make_example(example_id=item_id),
    }
    return Item(item_id, **{**fields, **changes})


def make_record(item: Item | str = "niah/64/0.50/0", **changes: Any) -> Record:
    item = make_item(item) if isinstance(item, str) else item
    fields = {
        "item_id": item.item_id,
        "item_sha256": item.sha256,
        "task": item.task,
        "policy": "snapkv",
        "kv_budget": "full",
        "score": 1.0,
        "prompt_tokens": 100,
        "sieved": False,
        "kv_share": 1.0,
        "tags": dict(item.tags),
    }
    return Record(**{**fields, **changes})


def answers(
    task: str,
    scores: dict[int | str, list[float]],
    *,
    policy: str = "snapkv",
    tags: Iterable[dict[str, Any]] = (),
    forced: bool = False,
    **changes: Any,
) -> list[Record]:
    """Records of one task: scores by budget, full KV first."""
    shown = list(tags)
    records = []
    for kv_budget, found in scores.items():
        is_full = kv_budget == "full"
        share = 1.0 if is_full else 0.1 + 0.9 * float(str(kv_budget).rstrip("%")) / 100
        for index, score in enumerate(found):
            facts: dict[str, Any] = {"tags": shown[index]} if shown else {}
            if forced:
                facts |= {"agreement": 1.0 if is_full else score, "nll": 2.5 + (not is_full)}
                facts |= {"kl": 0.0 if is_full else 0.1 * (index + 1)}
            if not is_full:
                facts |= {"sieved": True, "mass_lost": 0.05}
            facts |= {"kv_share": share, "kv_budget": kv_budget, "score": score, "policy": policy}
            item = make_item(f"{task}/{index}", task=task)
            records.append(make_record(item, **{**facts, **changes}))
    return records


def results_of(records: list[Record], **changes: Any) -> EvalResults:
    fields: dict[str, Any] = {
        "provenance": {"commit": "ab", "machine": {"cpu": "A"}, "versions": {"torch": "2"}},
        "run": {"model": "/models/m", "prompts": {"chat": False}, "seed": 0, "sieve": {}},
        "tolerance": 0.05,
        "floors": {},
        "seed": 0,
    }
    return summarise(records, **{**fields, **changes})
