"""Forced tokens are checked before an engine sees them."""

from __future__ import annotations

from typing import Any

import pytest

from kvsieve.core.forcing import check_forced_tokens

LIMITS = {"vocab_size": 100, "max_len": 8}


@pytest.mark.parametrize("extra_args", [None, {}, {"kv_budget": 64}, {"forced_tokens": None}])
@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_request_that_forces_nothing_passes(extra_args: Any, is_allowed: bool) -> None:
    assert check_forced_tokens(extra_args, is_allowed=is_allowed, **LIMITS) is False


def test_tokens_of_the_vocabulary_pass() -> None:
    assert check_forced_tokens({"forced_tokens": [0, 99]}, is_allowed=True, **LIMITS) is True


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([100], "whole numbers from 0 to 99"),
        ([1] * 9, "has 9 tokens, and a sequence at most 8"),
        ("12", "must be a list"),
        ([], "must be a list"),
        ([None], "whole numbers"),
    ],
)
def test_everything_else_is_refused(tokens: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_forced_tokens({"forced_tokens": tokens}, is_allowed=True, **LIMITS)


def test_a_server_for_users_does_not_take_them() -> None:
    with pytest.raises(ValueError, match="--forced-tokens"):
        check_forced_tokens({"forced_tokens": [1]}, is_allowed=False, **LIMITS)
