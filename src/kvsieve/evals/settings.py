"""What is compared: full KV, and policies at budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsieve.core.errors import ConfigError
from kvsieve.core.treatment import FULL
from kvsieve.policies import parse_settings


@dataclass(frozen=True)
class Setting:
    """One way to keep the cache.

    Attributes:
        policy: Name of the policy; of full KV, that of the server that ran it.
        kv_budget: What the request asks for: tokens, a share such as "25%", or "full".
    """

    policy: str
    kv_budget: int | str

    @property
    def is_full(self) -> bool:
        """Whether everything is kept."""
        return self.kv_budget == FULL

    @property
    def name(self) -> str:
        """Name in tables and figures."""
        return "full" if self.is_full else f"{self.policy} {self.kv_budget}"


def every_setting(policies: Sequence[str], budgets: Sequence[str]) -> list[Setting]:
    """Every policy at every budget, in the order given.

    Raises:
        ConfigError: A policy or budget is none; all that is wrong at once.
    """
    reasons: list[str] = []
    parsed: dict[str, list[int | str]] = {}
    for field, values in (("policy", policies), ("budget", budgets)):
        if not values:
            reasons.append(f"give at least one {field}")
        known: list[int | str] = []
        for value in values:
            if field == "budget" and value.lower() == FULL:
                reasons.append(f"full KV is always asked: leave {value!r} out of the budgets")
                continue
            try:
                found = getattr(parse_settings({field: value}), field)
            except ConfigError as error:
                reasons.extend(error.reasons)
                continue
            if found in known:
                reasons.append(f"{field} {value!r} is given twice")
            known.append(found)
        parsed[field] = known
    if reasons:
        raise ConfigError(list(dict.fromkeys(reasons)))
    return [
        Setting(str(policy), budget) for policy in parsed["policy"] for budget in parsed["budget"]
    ]
