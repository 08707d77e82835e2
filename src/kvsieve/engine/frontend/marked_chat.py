"""Marks around the text of a chat's messages, and the tokens that lie between them."""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsieve.core.protection import Span, Spans, merged


class NotLocatedError(ValueError):
    """Messages could not be found in the prompt."""


class MarkedChat:
    """A conversation with marks around the text of the messages of some roles.

    Attributes:
        messages: The messages, to be rendered.
        num_marked: Messages that carry marks.
        text: The rendering without its marks, once it was read.

    Args:
        conversation: The messages; not changed.
        roles: Whose messages are marked.

    Raises:
        NotLocatedError: A message with such a role has something else than text.
    """

    def __init__(self, conversation: Sequence[dict[str, Any]], roles: tuple[str, ...]) -> None:
        # Letters and digits pass through any template, and no text can have guessed them.
        self._name = f"kv{secrets.token_hex(8)}"
        self._mark = re.compile(rf"{self._name}([be])([0-9]+)x")
        self._roles: list[str] = []
        self._characters: list[list[Span]] = []
        self.text = ""
        self.messages = [
            self._marked(message) if message["role"] in roles else _parsable(message)
            for message in conversation
        ]

    @property
    def num_marked(self) -> int:
        """Messages that carry marks."""
        return len(self._roles)

    def _marked(self, message: dict[str, Any]) -> dict[str, Any]:
        role, content = message["role"], message.get("content")
        if message.get("tool_calls"):
            raise NotLocatedError(f"a message of {role} calls tools, which is no text")
        parts = [content] if isinstance(content, str) else list(content or ())
        texts = [_text_of(role, part) for part in parts]
        filled = [index for index, text in enumerate(texts) if text.strip()]
        if not filled:
            return message
        number = len(self._roles)
        self._roles.append(role)
        for index, kind in ((filled[0], "b"), (filled[-1], "e")):
            # Inside the white space around the text, which a template may trim.
            text, mark = texts[index], f"{self._name}{kind}{number}x"
            at = len(text) - len(text.lstrip()) if kind == "b" else len(text.rstrip())
            texts[index] = text[:at] + mark + text[at:]
        if isinstance(content, str):
            return {**message, "content": texts[0]}
        parts = [
            text if isinstance(part, str) else {**part, "text": text}
            for part, text in zip(parts, texts, strict=True)
        ]
        return {**message, "content": parts}

    def read(self, prompt: dict[str, Any]) -> None:
        """Find the marks in what was rendered, and take them out.

        Raises:
            NotLocatedError: They are not where they should be.
        """
        rendered = prompt.get("prompt")
        if not isinstance(rendered, str):
            raise NotLocatedError("the chat template does not give text")
        self._characters = [[] for _ in self._roles]
        begins: dict[int, int] = {}
        pieces: list[str] = []
        length = end = 0
        for match in self._mark.finditer(rendered):
            pieces.append(rendered[end : match.start()])
            length += match.start() - end
            end = match.end()
            number = int(match[2])
            if match[1] == "b":
                begins[number] = length
            elif number in begins:
                self._characters[number].append((begins.pop(number), length))
        self.text = "".join([*pieces, rendered[end:]])
        for number, role in enumerate(self._roles):
            if number in begins or not self._characters[number]:
                raise NotLocatedError(f"the chat template leaves out text of a message of {role}")

    def token_spans(self, offsets: Sequence[tuple[int, int]]) -> Spans:
        """The tokens that hold a character of a marked message.

        Args:
            offsets: Of each token of the prompt, its characters in `text` as (begin, end).

        Raises:
            NotLocatedError: A message has no token, because the prompt was truncated.
        """
        begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
        found: list[Span] = []
        for role, places in zip(self._roles, self._characters, strict=True):
            for begin, end in places:
                tokens = np.nonzero((begins < end) & (ends > begin))[0]
                if not len(tokens):
                    raise NotLocatedError(f"a message of {role} was truncated away")
                found.append((int(tokens[0]), int(tokens[-1]) + 1))
        return merged(found)


def _text_of(role: str, part: Any) -> str:
    text = part if isinstance(part, str) else part.get("text")
    if not isinstance(text, str):
        raise NotLocatedError(f"a message of {role} has something else than text")
    return text


def _parsable(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the API would give it: vLLM has turned the arguments of tools into objects."""
    if not message.get("tool_calls"):
        return message
    calls = copy.deepcopy(message["tool_calls"])
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**message, "tool_calls": calls}
