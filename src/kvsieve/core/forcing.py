"""Forced tokens: what a request makes the model say, so that its distribution can be compared."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

FORCED_TOKENS_KEY = "forced_tokens"
"""The key of `vllm_xargs` (a client's request) and of `SamplingParams.extra_args`."""


def forced_tokens(extra_args: Mapping[str, Any] | None) -> list[int] | None:
    """The tokens that a request forces, as they were given; None if it forces none."""
    tokens: list[int] | None = (extra_args or {}).get(FORCED_TOKENS_KEY)
    return tokens


def check_forced_tokens(
    extra_args: Mapping[str, Any] | None, *, is_allowed: bool, vocab_size: int, max_len: int
) -> bool:
    """Check the forced tokens of a request before an engine sees them.

    Args:
        extra_args: The request's `extra_args`.
        is_allowed: The operator's setting `forced_tokens`.
        vocab_size: Tokens that the model knows.
        max_len: Longest sequence that the engine takes.

    Returns:
        Whether the request forces tokens.

    Raises:
        ValueError: It does, and the server does not allow it or the tokens are no tokens.
    """
    tokens = forced_tokens(extra_args)
    if tokens is None:
        return False
    if not is_allowed:
        raise ValueError(
            f"this server does not take {FORCED_TOKENS_KEY}: they are for evaluation, and allowed"
            " by the setting forced_tokens (--forced-tokens)"
        )
    given = f"(given: {reprlib.repr(tokens)})"
    if not isinstance(tokens, list) or not tokens:
        raise ValueError(f"{FORCED_TOKENS_KEY} must be a list of token ids {given}")
    if len(tokens) > max_len:
        raise ValueError(
            f"{FORCED_TOKENS_KEY} has {len(tokens)} tokens, and a sequence at most {max_len}"
        )
    if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        raise ValueError(
            f"{FORCED_TOKENS_KEY} must be whole numbers from 0 to {vocab_size - 1} {given}"
        )
    return True
