"""What pruning would do to a request of a plan, from the method's settings for the model."""

from __future__ import annotations

from typing import Any

from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError
from kvsieve.core.notation import layer_list
from kvsieve.core.plan import LayerPlan
from kvsieve.pruning import PruneSettings, pruning_from_config


def plan_pruning(
    config: SieveConfig, plan: LayerPlan, prompt_tokens: int, stored_tokens: int
) -> dict[str, Any] | None:
    """What the operator's `prune` does to a prompt, as JSON values; None if it is "none".

    Args:
        config: Settings of the sieve.
        plan: The layer plan.
        prompt_tokens: Length of the prompt, in tokens.
        stored_tokens: Tokens that a sieved layer stores of it.

    Raises:
        ConfigError: The settings do not fit the model, or it has layers that are not sieved.
    """
    pruning = pruning_from_config(config)
    if pruning is None:
        return None
    if whole := sorted(plan.full + plan.untouched):
        raise ConfigError(
            [
                f"prune needs every layer to be sieved, and {layer_list(tuple(whole))} of this"
                " model are not: models with sliding-window layers cannot be pruned; leave out"
                " prune"
            ]
        )
    num_layers = len(plan.sieved)
    settings = pruning.settings(pruning.prune, num_layers)
    objection = _objection(settings, prompt_tokens, stored_tokens)
    is_pruned = objection is None
    # The first judged layer only sets the scale.
    first = settings.layer + 1 if settings.method.is_adaptive else settings.layer
    last = settings.last_scored_layer
    may_stay_whole = "never" in settings.method.reasons and settings.max_layer is None
    full = prompt_tokens * num_layers
    least = most = full
    if is_pruned:
        least = _computed(settings, first, prompt_tokens, stored_tokens)
    if is_pruned and not may_stay_whole:
        most = _computed(settings, last, prompt_tokens, stored_tokens)
    is_chunked = pruning.prune.is_chunked
    return {
        "method": settings.method.name,
        "passes": settings.method.num_passes,
        "window": settings.window,
        "pooling": settings.pooling,
        "pool_size": settings.pool_size,
        "is_pruned": is_pruned,
        "not_pruned": objection,
        "first_judged_layer": settings.layer if settings.method.is_adaptive else None,
        "layers": {"first": first, "last": last},
        "may_stay_whole": may_stay_whole,
        "kept_tokens": stored_tokens,
        "token_layers": {"full": full, "least": least, "most": most},
        "read_at_once": stored_tokens if is_chunked else prompt_tokens,
        "rule": _rule(is_chunked),
    }


def _objection(settings: PruneSettings, prompt_tokens: int, stored_tokens: int) -> str | None:
    """Why a prompt would not be pruned whatever the server's steps take; None if it would."""
    if stored_tokens == prompt_tokens:
        return "the prompt fits its budget"
    protected = settings.num_recent + settings.num_sink_tokens
    if protected >= stored_tokens:
        return (
            f"{protected} tokens are sinks or belong to the method's window, and of the"
            f" {stored_tokens} that go on one at least must be chosen"
        )
    return None


def _computed(settings: PruneSettings, layer: int, prompt_tokens: int, num_keep: int) -> int:
    """Tokens that layers compute of a prompt that is pruned at a layer, summed over layers."""
    whole = layer + 1
    rest = settings.num_layers if settings.method.num_passes == 2 else settings.num_layers - whole
    return prompt_tokens * whole + num_keep * rest


def _rule(is_chunked: bool) -> str:
    """Which prompts are pruned, as far as a plan can say: it does not know the server's steps."""
    most = "max_num_batched_tokens - max_num_seqs"
    if is_chunked:
        return f"a prompt longer than its budget, of which at most {most} tokens are kept"
    return f"a prompt longer than its budget and not longer than {most}"
