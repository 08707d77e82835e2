"""What is done to one request: sieved, only scored, or left alone, and to which budget."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import ValidationError

from kvsieve.core.budget import BudgetRule
from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError
from kvsieve.core.notation import parse_share
from kvsieve.core.protection import KV_PROTECT_KEY, Spans, known_spans
from kvsieve.core.pruning import KV_PRUNE_KEY, Prune, parse_prune

Mode = Literal["sieve", "shadow", "full"]
MODES: tuple[Mode, ...] = get_args(Mode)

KV_BUDGET_KEY = "kv_budget"
"""The key of `vllm_xargs` (a client's request) and of `SamplingParams.extra_args`."""

FULL = "full"
"""The value of `kv_budget` that leaves a request's cache alone."""


@dataclass(frozen=True)
class Treatment:
    """What is done to one request, decided when it arrives and never changed.

    Attributes:
        mode: "sieve" drops what does not fit the budget, "shadow" only scores and reports
            what a budget would drop, "full" does nothing.
        budget: The request's own budget; None for the one that the layers have.
        spans: Positions of the prompt that are kept whatever their scores.
        prune: How the prompt is pruned while it is read; None if it is not.
    """

    mode: Mode
    budget: BudgetRule | None = None
    spans: Spans = ()
    prune: Prune | None = None


_REQUESTS_KEYS = (KV_BUDGET_KEY, KV_PROTECT_KEY, KV_PRUNE_KEY)

_PREFIX = "kv_"

# Other software may have a "policy" or a "mode" of its own in `vllm_xargs`.
_OURS_ALONE = frozenset(
    {
        *("budget", "min_budget", "max_budget", "layer_budgets", "full_layers", "policy_options"),
        *("observation_window", "num_recent_tokens", "num_sink_tokens", "protect_roles"),
        *("prune", "prune_options", "prune_calibration"),
    }
)

_ASKED_WITH = {
    "protect_roles": KV_PROTECT_KEY,
    **dict.fromkeys(("prune", "prune_options", "prune_calibration"), KV_PRUNE_KEY),
}
"""The key of a request that a setting belongs to; `kv_budget` for all others."""


def requested_budget(extra_args: Mapping[str, Any] | None) -> Any:
    """The `kv_budget` of a request as it was given; None if there is none.

    Raises:
        ValueError: There is a key that is nearly `kv_budget`, or one of the operator's settings
            that no other key belongs to: it would do nothing.
    """
    return _requested(extra_args, KV_BUDGET_KEY)


def requested_protection(extra_args: Mapping[str, Any] | None) -> Any:
    """The `kv_protect` of a request as it was given; None if there is none.

    Raises:
        ValueError: There is a key that is nearly `kv_protect`, or `protect_roles`: it would do
            nothing.
    """
    return _requested(extra_args, KV_PROTECT_KEY)


def requested_pruning(extra_args: Mapping[str, Any] | None) -> Any:
    """The `kv_prune` of a request as it was given; None if there is none.

    Raises:
        ValueError: There is a key that is nearly `kv_prune`, or `prune`, `prune_options` or
            `prune_calibration`: it would do nothing.
    """
    return _requested(extra_args, KV_PRUNE_KEY)


def _requested(extra_args: Mapping[str, Any] | None, wanted: str) -> Any:
    if not extra_args:
        return None
    for key in extra_args:
        # A setting that silently does nothing is worse than an error.
        if key not in _REQUESTS_KEYS and (reason := _useless(str(key), wanted)):
            raise ValueError(reason)
    return extra_args.get(wanted)


def _useless(key: str, wanted: str) -> str | None:
    """Why a request cannot have a key, if that is about what `wanted` says; else None."""
    name = key[:64].strip().lower().replace("-", "_")
    near = difflib.SequenceMatcher(None, name[: 2 * len(wanted)], wanted).ratio() > 0.8
    if near or name.startswith(wanted):
        return f"unknown setting {reprlib.repr(key)}; did you mean {wanted!r}?"
    own = name.removeprefix(_PREFIX)
    is_operators = own in SieveConfig.model_fields and (own in _OURS_ALONE or own != name)
    if not is_operators and not name.startswith("kvsieve"):
        return None
    if wanted != _ASKED_WITH.get(own, KV_BUDGET_KEY):
        return None
    *keys, last = map(repr, _REQUESTS_KEYS)
    return (
        f"{reprlib.repr(key)} does nothing in a request: settings of kvsieve are the server's, and"
        f" a request may have {', '.join(keys)} and {last}"
    )


def treat(
    mode: Mode,
    config: SieveConfig,
    kv_budget: Any,
    block_size: int,
    kv_protect: Any = None,
    prompt_tokens: int | None = None,
    kv_prune: Any = None,
) -> Treatment:
    """How a request is treated that asks for `kv_budget` under the engine's mode.

    Args:
        mode: The engine's mode when the request arrives.
        config: The operator's settings, whose bounds the request's budget must keep.
        kv_budget: What the request asks for: tokens, a share of the prompt ("10%" or a
            fraction below 1), "full", or None for the operator's budget.
        block_size: Block size of the cache manager, in tokens.
        kv_protect: The spans that the request protects; roles were resolved before.
        prompt_tokens: Length of the prompt, which spans must keep to; None if not known.
        kv_prune: How the request wants to be pruned: a method, "none", or None for the
            operator's `prune`.

    Raises:
        ValueError: The budget, the spans or the method cannot be read, or are out of bounds.
    """
    # Parsed in every mode: whether a request is valid must not depend on it.
    rule = _parse(config, kv_budget, block_size)
    spans = known_spans(kv_protect, prompt_tokens)
    prune = _wanted_pruning(config, kv_prune)
    wants_full = kv_budget is not None and rule is None
    if mode == "full" or wants_full:
        return Treatment("full")
    return Treatment(mode, rule, spans, prune if mode == "sieve" else None)


def _wanted_pruning(config: SieveConfig, kv_prune: Any) -> Prune | None:
    """How a request is pruned that gives `kv_prune`."""
    allowed = parse_prune(config.prune)
    if kv_prune is None:
        return allowed
    try:
        wanted = parse_prune(kv_prune)
    except ValueError as error:
        raise ValueError(f"{KV_PRUNE_KEY} {error}") from None
    if wanted is not None and allowed is None:
        raise ValueError(f"{KV_PRUNE_KEY} {wanted}: this server was started without prune")
    return wanted


def _parse(config: SieveConfig, kv_budget: Any, block_size: int) -> BudgetRule | None:
    """A request's budget as a rule; None for "full" and for no wish."""
    given = f"{KV_BUDGET_KEY} {reprlib.repr(kv_budget)}"
    if kv_budget is None:
        return None
    if isinstance(kv_budget, str) and kv_budget.strip().lower() == FULL:
        if config.max_budget is not None:
            raise ValueError(f"{given} is above the operator's max_budget of {config.max_budget}")
        return None
    budget: int | float
    try:
        budget = _as_budget(kv_budget)
    except ValueError as error:
        raise ValueError(
            f"{given} is not a budget ({error}); give a number of tokens, a share of the prompt"
            f" such as '10%', or {FULL!r}"
        ) from None
    smallest, largest = config.smallest_request_budget(block_size), config.max_budget
    if isinstance(budget, int):
        if budget < smallest:
            raise ValueError(
                f"{given} is too small: the smallest that this server allows is {smallest} tokens"
            )
        if largest is not None and budget > largest:
            raise ValueError(f"{given} is above the operator's max_budget of {largest}")
        return BudgetRule(tokens=budget, min_tokens=smallest, max_tokens=largest)
    # The share of a prompt is not known yet; the bounds then hold like the operator's own share.
    return BudgetRule(share=budget, min_tokens=smallest, max_tokens=largest)


def _as_budget(value: Any) -> int | float:
    """A budget as tokens (int) or as a share of the prompt (float in (0, 1])."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"it is a {type(value).__name__}")
    if isinstance(value, float):
        if value > 1 and value.is_integer():
            value = int(value)
        elif 0 < value < 1:
            return value
        else:
            raise ValueError("a fraction must lie between 0 and 1; all of it is '100%'")
    try:
        budget = SieveConfig(budget=value).budget
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    return parse_share(budget) if isinstance(budget, str) else budget


def check_mode(mode: Any) -> Mode:
    """A mode that was given as text.

    Raises:
        ConfigError: There is no such mode.
    """
    if mode not in MODES:
        raise ConfigError([f"the mode must be one of {', '.join(MODES)} (given: {mode!r})"])
    checked: Mode = mode
    return checked
