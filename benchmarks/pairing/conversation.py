"""Prompts of real text that share prefixes, for the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import kvsieve

TEXT = Path(kvsieve.__file__).with_name("demo") / "document.txt"

SYSTEM = "You are a careful librarian. Answer from the report that the user reads to you."
QUESTION = "In a few sentences: what does this part say, and how does it go with what came before?"


class Text:
    """The report that comes with kvsieve, cut to measure.

    Args:
        model: Folder of the model whose tokens are counted.
    """

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._words = TEXT.read_text().split()

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, no special ones added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, ids: list[int]) -> str:
        """The text of an answer."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """The prompt of a conversation, as the chat endpoint makes it from its messages."""
        prompt = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.ids(prompt)

    def slices(self, lengths: list[int], first_word: int) -> Iterator[list[int]]:
        """Consecutive slices of the report, endlessly, of exactly so many tokens each.

        Args:
            lengths: Tokens of the slices.
            first_word: Where the first one begins, so that repeats read other text.
        """
        position = first_word
        for length in lengths:
            words: list[str] = []
            ids: list[int] = []
            while len(ids) < length:
                missing = max(1, (length - len(ids)) // 2)
                words += [self._words[(position + i) % len(self._words)] for i in range(missing)]
                position += missing
                ids = self.ids(" ".join(words))
            yield ids[:length]


class Conversation:
    """A chat that grows by a piece of text and a question per turn, and by the model's answers.

    Args:
        text: Where the text comes from.
        new_tokens: Tokens of text that a turn adds, by turn.
        first_word: Where the text begins.
    """

    def __init__(self, text: Text, new_tokens: list[int], first_word: int) -> None:
        self._text = text
        self._pieces = [text.text(ids) for ids in text.slices(new_tokens, first_word)]
        self._messages = [{"role": "system", "content": SYSTEM}]
        self._turn = 0

    def ask(self) -> list[int]:
        """The prompt of the next turn."""
        content = f"{self._pieces[self._turn]}\n\n{QUESTION}"
        self._turn += 1
        self._messages.append({"role": "user", "content": content})
        return self._text.chat_ids(self._messages)

    def answered(self, token_ids: list[int]) -> None:
        """Add the model's answer to the history, as text: clients send text."""
        self._messages.append({"role": "assistant", "content": self._text.text(token_ids)})
