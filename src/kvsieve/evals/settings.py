"""What is compared: full KV, and policies at budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError
from kvsieve.core.treatment import FULL


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


def parse_settings(policies: Sequence[str], budgets: Sequence[str]) -> list[Setting]:
    """Every policy at every budget, in the order given.

    Raises:
        ConfigError: A policy or budget is none; all that is wrong at once.
    """
    reasons: list[str] = []
    for field, values in (("policy", policies), ("budget", budgets)):
        if not values:
            reasons.append(f"give at least one {field}")
        for value in values:
            try:
                SieveConfig.parse({field: value})
            except ConfigError as error:
                reasons.extend(error.reasons)
        for value in dict.fromkeys(value for value in values if values.count(value) > 1):
            reasons.append(f"{field} {value!r} is given twice")
    if reasons:
        raise ConfigError(reasons)
    parsed = [SieveConfig.parse({"budget": budget}).budget for budget in budgets]
    return [Setting(policy, budget) for policy in policies for budget in parsed]
