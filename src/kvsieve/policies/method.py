"""A method: one row of the table of policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsieve.core.config import SieveConfig
from kvsieve.policies.policy import Policy


@dataclass(frozen=True)
class Method:
    """A published method under its name: what it needs to be configured, shown and built.

    Attributes:
        name: The value of the setting `policy`.
        summary: What it keeps, in a few words.
        source: Where it was published.
        sees_question: Whether the prompt's last queries alone decide what is kept. Such a method
            serves prompts that end with the question; to the others it is a part of the prompt
            like any other, or nothing.
        build: The policy with a configuration's parameters.
        defaults: The authors' values of settings, by field of `SieveConfig`; they hold where
            the user gave none.
        options: Parameters that no other method has, with the authors' values: what
            `policy_options` may contain.
    """

    name: str
    summary: str
    source: str
    sees_question: bool
    build: Callable[[SieveConfig], Policy]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
