"""Protected tokens: what a request wants kept whatever the scores say.

Eviction drops instructions first (arXiv 2510.00231): what is asked for last
decides the scores, and a system message far before it gets few of them.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvsieve.core.budget import BudgetRule, stored_tokens
from kvsieve.core.config import SieveConfig
from kvsieve.core.notation import ROLE
from kvsieve.core.plan import LayerPlan
from kvsieve.core.tiers import make_tiers, pyramid

KV_PROTECT_KEY = "kv_protect"
"""The key of `vllm_xargs` (a client's request) and of `SamplingParams.extra_args`."""

NOTHING = "none"
"""The value of `kv_protect` that protects nothing, also where the operator protects roles."""

MAX_SPANS = 256
"""Spans and roles that one request may name; each span costs a little in every layer."""

Span: TypeAlias = tuple[int, int]
"""Positions in the prompt as (begin, end), end excluded."""

Spans: TypeAlias = tuple[Span, ...]
"""Spans that are ascending, apart from each other and not empty."""

# A position has at most 10 digits, so that it fits into 64 bits between processes.
_SPAN = re.compile(r"([0-9]{1,10}) *: *([0-9]{1,10})", re.ASCII)
_LONGEST_TEXT = 32 * MAX_SPANS


@dataclass(frozen=True)
class Protection:
    """What one request wants protected.

    Attributes:
        spans: Positions in the prompt.
        roles: Roles of a chat whose messages are protected.
    """

    spans: Spans = ()
    roles: tuple[str, ...] = ()


def parse_protection(value: Any) -> Protection:
    """A request's `kv_protect`.

    Args:
        value: Spans as `begin:end` and roles, separated by commas (`"0:120,300:340"`,
            `"system"`); a list of such texts, or of pairs `[begin, end]`; or `"none"`.

    Raises:
        ValueError: It is nothing of that.
    """
    spans: list[Span] = []
    roles: list[str] = []
    items = _items(value)
    if items == [NOTHING]:
        return Protection()
    if not items:
        raise _unreadable(value, f"it is empty; {NOTHING!r} protects nothing")
    if len(items) > MAX_SPANS:
        raise ValueError(f"{KV_PROTECT_KEY} has {len(items)} spans, and may have {MAX_SPANS}")
    for item in items:
        if isinstance(item, str) and (match := _SPAN.fullmatch(item)):
            spans.append((int(match[1]), int(match[2])))
        elif isinstance(item, str) and item.lower() == NOTHING:
            raise _unreadable(value, f"{NOTHING!r} stands alone")
        elif isinstance(item, str) and ROLE.fullmatch(item):
            roles.append(item)
        elif _is_pair(item):
            spans.append((item[0], item[1]))
        else:
            raise _unreadable(value, f"{reprlib.repr(item)} is neither a span nor a role")
    for begin, end in spans:
        if not 0 <= begin < end:
            raise _unreadable(value, f"{begin}:{end} holds no position")
    return Protection(merged(spans), tuple(dict.fromkeys(roles)))


def _items(value: Any) -> list[Any]:
    given = value if isinstance(value, list | tuple) else [value]
    items: list[Any] = []
    for part in given:
        if not isinstance(part, str):
            items.append(part)
        elif len(part) > _LONGEST_TEXT:
            raise _unreadable(value, f"it has {len(part)} characters")
        else:
            items.extend(item.strip() for item in part.split(","))
    return [NOTHING] if items in ([NOTHING], [NOTHING.upper()], [NOTHING.title()]) else items


def _is_pair(item: Any) -> bool:
    return (
        isinstance(item, list | tuple)
        and len(item) == 2
        and all(type(position) is int and position < 10**10 for position in item)
    )


def _unreadable(value: Any, reason: str) -> ValueError:
    return ValueError(
        f"{KV_PROTECT_KEY} {reprlib.repr(value)} cannot be read ({reason}); give token spans such"
        " as '0:120,300:340' (ends excluded), roles of a chat such as 'system', or"
        f" {NOTHING!r}"
    )


def known_spans(kv_protect: Any, prompt_tokens: int | None = None) -> Spans:
    """The spans of a request whose roles were resolved; none for no wish.

    Args:
        kv_protect: As in the request.
        prompt_tokens: Length of the prompt, which the spans must keep to; None if not known.

    Raises:
        ValueError: It cannot be read, names roles, or leaves the prompt.
    """
    if kv_protect is None:
        return ()
    protection = parse_protection(kv_protect)
    if protection.roles:
        raise ValueError(
            f"{KV_PROTECT_KEY} names the role {protection.roles[0]!r}, and only a chat whose"
            " messages this server renders has roles; name token spans such as '0:120'"
        )
    check_within(protection.spans, prompt_tokens)
    return protection.spans


def check_within(spans: Spans, prompt_tokens: int | None) -> None:
    """Refuse spans that leave the prompt; None is a length that is not known.

    Raises:
        ValueError: One does.
    """
    if spans and prompt_tokens is not None and spans[-1][1] > prompt_tokens:
        begin, end = spans[-1]
        raise ValueError(
            f"{KV_PROTECT_KEY} {begin}:{end} leaves the prompt, which has {prompt_tokens} tokens"
        )


def merged(spans: Iterable[Span]) -> Spans:
    """The union of spans: ascending, and no two that overlap or touch."""
    union: list[Span] = []
    for begin, end in sorted(spans):
        if begin >= end:
            continue
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return tuple(union)


def count_protected(
    prompt_tokens: int, spans: Spans, num_sink_tokens: int, num_recent_tokens: int
) -> int:
    """Positions of a prompt that are always kept: spans, first and last ones, each once.

    Args:
        prompt_tokens: Length of the prompt.
        spans: Protected positions.
        num_sink_tokens: First positions that are kept.
        num_recent_tokens: Last positions that are kept.
    """
    recent = (max(0, prompt_tokens - num_recent_tokens), prompt_tokens)
    always = merged([*spans, (0, min(num_sink_tokens, prompt_tokens)), recent])
    return sum(end - begin for begin, end in always)


def check_room(
    prompt_tokens: int,
    num_protected: int,
    smallest_stored: Callable[[int | None], int],
    *,
    max_budget: int | None = None,
    operators_roles: tuple[str, ...] = (),
) -> None:
    """Refuse to protect more of a prompt than what some layer stores of it.

    Args:
        prompt_tokens: Length of the prompt.
        num_protected: Positions that are always kept (`count_protected`).
        smallest_stored: Tokens per KV head of the prompt that the layers of the smallest budget
            store, for a `kv_budget` in tokens or, with None, for the budget that the request
            has. Must not fall as the budget rises.
        max_budget: The operator's upper bound on a request's budget.
        operators_roles: The roles that the operator protects, if it was not the client.

    Raises:
        ValueError: There is no room, with the budget that would do.
    """
    stored = smallest_stored(None)
    if num_protected <= min(stored, prompt_tokens):
        return
    low, high = 1, prompt_tokens
    while low < high:
        middle = (low + high) // 2
        if smallest_stored(middle) >= num_protected:
            high = middle
        else:
            low = middle + 1
    least = "protect fewer tokens"
    if smallest_stored(low) < num_protected:
        least += " (no kv_budget is enough)"
    elif max_budget is None or low <= max_budget:
        least = f"raise kv_budget to at least {low}, or {least}"
    else:
        least += f" (the operator's max_budget of {max_budget} is below the {low} needed)"
    cause = ""
    if operators_roles:
        cause = f"this server protects messages of {', '.join(operators_roles)} (protect_roles): "
        least += f" ({KV_PROTECT_KEY}: {NOTHING!r} protects none)"
    raise ValueError(
        f"{cause}{num_protected} of the prompt's {prompt_tokens} tokens are protected (the first"
        f" and the last ones among them), and the smallest layer stores {stored} at this budget:"
        f" {least}"
    )


def smallest_stored(
    config: SieveConfig,
    budget: BudgetRule | None,
    prompt_tokens: int,
    block_size: int,
    kv_budget: int | None = None,
) -> int:
    """Tokens per KV head that the layers of the smallest budget store of a prompt.

    Known without the model's layers: of a pyramid it is a lower bound, the last layer's budget
    before layers are brought into steps.

    Args:
        config: The operator's settings.
        budget: The request's own budget, if it has one.
        prompt_tokens: Length of the prompt.
        block_size: Block size of the cache manager, in tokens.
        kv_budget: A budget in tokens that takes the place of the request's.
    """
    requested = budget if kv_budget is None else BudgetRule(tokens=kv_budget)
    if config.layer_budgets == "pyramid":
        mean = (requested or config.budget_rule(block_size)).tokens_for(prompt_tokens)
        smallest = config.smallest_legal_budget(block_size)
        # The ends of a pyramid are the same whatever the number of its layers.
        budgets = pyramid(prompt_tokens, mean, config.recent_tokens, smallest, 2)
    else:
        named = [layer for layers, _ in config.layer_rules(block_size) for layer in layers]
        tiers = make_tiers(config, LayerPlan((), tuple(sorted(named) or [0])), block_size)
        budgets = tuple(tier.rule.tokens_for(prompt_tokens, requested) for tier in tiers)
    return min(stored_tokens(prompt_tokens, each, block_size) for each in budgets)
