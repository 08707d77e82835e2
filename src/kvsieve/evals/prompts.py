"""From an example to the tokens of its prompt, with or without a chat template."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jinja2

from kvsieve.core.errors import ConfigError
from kvsieve.evals.example import Example
from kvsieve.evals.item import Item

RAW_TEMPLATE = "{system}\n\n{context}\n\n{question}\n{answer_prefix}"
"""How a raw prompt is put together; parts that an example lacks leave no blank lines."""


class PromptMaker:
    """Makes the prompts of a run.

    Args:
        model: Folder or name of the model whose tokenizer is used.
        chat: Whether to wrap prompts in the model's chat template.

    Raises:
        ConfigError: There is no such tokenizer, or it has no chat template.
    """

    def __init__(self, model: str, chat: bool) -> None:
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        # Damaged files raise whatever the library that reads them raises.
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(" :")
            raise ConfigError([f"no tokenizer can be read from {model}: {reason}"]) from None
        # A length beyond the model's is refused where lengths are known, not warned of here.
        self.max_length: int = self.tokenizer.model_max_length
        self.tokenizer.model_max_length = int(1e30)
        if chat and not self.tokenizer.chat_template:
            raise ConfigError([f"{model} has no chat template: leave out --chat"])
        self.model = model
        self.chat = chat
        self.beginning = self._beginning()
        """Tokens that every text for the model begins with, such as BOS; often none."""
        self._takes_system = chat and self._has_system_role()

    def count_tokens(self, text: str) -> int:
        """Length of a text, without the tokens that mark its beginning or end."""
        return len(self.encode(text))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def item(self, example: Example, max_prompt_tokens: int | None = None) -> Item:
        """An example as tokens.

        Args:
            example: The example.
            max_prompt_tokens: The context of a longer prompt loses its middle, as LongBench
                does it; the item is then tagged `truncated`.

        Raises:
            ConfigError: The parts around the context alone are longer than that.
        """
        prompt_ids = self._prompt_ids(example, example.context)
        tags = dict(example.tags)
        if max_prompt_tokens is not None and len(prompt_ids) > max_prompt_tokens:
            prompt_ids = self._truncated(example, len(prompt_ids), max_prompt_tokens)
            tags["truncated"] = 1
        return Item(
            item_id=example.example_id,
            task=example.task,
            prompt_ids=tuple(prompt_ids),
            forced_ids=tuple(self.encode(example.after_sieve)) if example.after_sieve else (),
            max_tokens=example.max_tokens,
            example=example,
            tags=tags,
        )

    def _truncated(self, example: Example, length: int, limit: int) -> list[int]:
        context = self.encode(example.context)
        room = limit - (length - len(context))
        # Tokens at the cut may merge differently: try a little less until it fits.
        while room > 0:
            head = self.decode(context[: room // 2])
            tail = self.decode(context[len(context) - (room - room // 2) :])
            prompt_ids = self._prompt_ids(example, head + tail)
            if len(prompt_ids) <= limit:
                return prompt_ids
            room -= max(1, len(prompt_ids) - limit)
        raise ConfigError(
            [
                f"{example.example_id} has {length} tokens, of which at most {limit} fit, and its"
                " question alone is longer: give a larger --max-model-len"
            ]
        )

    def _prompt_ids(self, example: Example, context: str) -> list[int]:
        prefix = example.answer_prefix
        # LongBench publishes some of its sets without a template, whatever the model.
        if not self.chat or example.tags.get("chat") == "no":
            parts = [example.system, context, example.question]
            text = "\n\n".join(part for part in parts if part)
            # RULER's prefixes bring the space that they want before them.
            gap = "" if not prefix or prefix[0].isspace() else "\n"
            return [*self.beginning, *self.encode(f"{text}{gap}{prefix}")]
        parts = [context, example.question]
        messages = []
        if example.system and self._takes_system:
            messages.append({"role": "system", "content": example.system})
        elif example.system:
            parts.insert(0, example.system)
        asked = "\n\n".join(part for part in parts if part)
        messages.append({"role": "user", "content": asked})
        return self.encode(self._templated(messages) + prefix)

    def _templated(self, messages: list[dict[str, str]]) -> str:
        return str(
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )

    def _beginning(self) -> tuple[int, ...]:
        # Not `encode` with special tokens: some tokenizers end a text too, and what is to be
        # continued must not be ended.
        whole, plain = list(self.tokenizer.encode("a")), self.encode("a")
        starts = range(len(whole) - len(plain) + 1)
        at = next((at for at in starts if whole[at : at + len(plain)] == plain), 0)
        return tuple(whole[:at])

    def _has_system_role(self) -> bool:
        """Whether the template shows a system message: some refuse it, some drop it."""
        mark = "Answer in kind."
        user = {"role": "user", "content": "Hello."}
        try:
            return mark in self._templated([{"role": "system", "content": mark}, user])
        except jinja2.TemplateError:
            return False

    def provenance(self) -> dict[str, Any]:
        """The template and the tokens that end an answer, for the record of a run."""
        template = self.tokenizer.chat_template if self.chat else RAW_TEMPLATE
        return {
            "chat": self.chat,
            "template": template,
            "template_sha256": hashlib.sha256(str(template).encode()).hexdigest(),
            "tokenizer": type(self.tokenizer).__name__,
            "vocab_size": len(self.tokenizer),
            "beginning": list(self.beginning),
            "system_role": self._takes_system,
            "eos_token_ids": self._eos_token_ids(),
        }

    def _eos_token_ids(self) -> list[int]:
        """Tokens that end an answer: the tokenizer's, and what generation_config.json adds."""
        from transformers import GenerationConfig

        try:
            found = GenerationConfig.from_pretrained(self.model).eos_token_id
        except (OSError, ValueError):
            found = None
        listed = found if isinstance(found, list) else [found]
        ids = [self.tokenizer.eos_token_id, *listed]
        return sorted({token for token in ids if token is not None})
