"""Prompts as token ids, and what kind of token each is."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kvsieve.core.errors import ConfigError

TokenKind = Literal["first", "special", "newline", "delimiter", "digit", "space", "word"]
TOKEN_KINDS: tuple[TokenKind, ...] = get_args(TokenKind)


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        name: What messages and figures call it.
        token_ids: Its tokens.
        texts: The text of each token, as the tokenizer decodes it alone.
        kinds: The kind of each token.
    """

    name: str
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    kinds: tuple[TokenKind, ...]


def token_kind(position: int, text: str, is_special: bool) -> TokenKind:
    """What kind of token this is, the first that fits in the order of `TOKEN_KINDS`.

    Args:
        position: Its position in the prompt.
        text: Its text.
        is_special: Whether the tokenizer reserves it (begin of text, turn markers).
    """
    if position == 0:
        return "first"
    if is_special:
        return "special"
    if "\n" in text or "\r" in text:
        return "newline"
    stripped = text.strip()
    if not stripped:
        return "space"
    if all(unicodedata.category(character)[0] in "PS" for character in stripped):
        return "delimiter"
    if all(character.isdigit() for character in stripped):
        return "digit"
    return "word"


def make_prompt(name: str, text: str, tokenizer: Any, *, chat: bool) -> Prompt:
    """A text as the tokens that vLLM would make of it.

    Args:
        name: What messages and figures call it.
        text: The prompt, or the user's message.
        tokenizer: The model's.
        chat: Whether to wrap the text in the chat template, as one user's message.

    Raises:
        ConfigError: There is no chat template.
    """
    if chat:
        if not tokenizer.chat_template:
            raise ConfigError(["the model has no chat template; leave out --chat"])
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    # A template writes the special tokens itself.
    token_ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
    special = set(tokenizer.all_special_ids)
    special.update(
        number for number, token in tokenizer.added_tokens_decoder.items() if token.special
    )
    known = {token: tokenizer.decode([token]) for token in set(token_ids)}
    texts = tuple(known[token] for token in token_ids)
    return Prompt(
        name=name,
        token_ids=tuple(token_ids),
        texts=texts,
        kinds=tuple(
            token_kind(position, texts[position], token in special)
            for position, token in enumerate(token_ids)
        ),
    )


def read_prompts(
    paths: list[Path], tokenizer: Any, *, chat: bool, window: int, max_tokens: int | None
) -> list[Prompt]:
    """The prompts of files, one per file.

    Args:
        paths: UTF-8 text files.
        tokenizer: The model's.
        chat: Whether to apply the chat template.
        window: Observation window, in tokens.
        max_tokens: Longest context of the model, in tokens.

    Raises:
        ConfigError: A file cannot be read, or its prompt is too short or too long, with
            every reason.
    """
    prompts, reasons = [], []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            reasons.append(f"cannot read {path}: {error.strerror}")
            continue
        except UnicodeDecodeError as error:
            reasons.append(f"{path} is not UTF-8 text: {error.reason}")
            continue
        prompt = make_prompt(path.name, text, tokenizer, chat=chat)
        num_tokens = len(prompt.token_ids)
        if num_tokens <= window:
            reasons.append(
                f"{path} has {num_tokens} tokens, and what its last {window} (observation_window)"
                f" attend to before them is looked at: give a prompt of at least {window + 1}"
                " tokens, and some hundred for figures that say something"
            )
        if max_tokens is not None and num_tokens > max_tokens:
            reasons.append(
                f"{path} has {num_tokens} tokens, more than the model's {max_tokens}; shorten it"
            )
        prompts.append(prompt)
    if reasons:
        raise ConfigError(reasons)
    return prompts


def printable(text: str) -> str:
    """A token's text on one line, with blanks that can be seen."""
    shown = "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )
    return shown.replace(" ", "\u2423") if not shown.strip() else shown.strip()
