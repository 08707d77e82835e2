"""The decoder layers of a model, and the call that runs them.

Every decoder of vLLM whose layers take positions, hidden states and residual, and give back the
last two, is served by the same hooks: Llama, Qwen2, Qwen3, Mistral and most others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from kvsieve.core.errors import ConfigError
from kvsieve.engine.layers import SievedLayer


def decoder_layers(model: nn.Module, layers: list[SievedLayer]) -> list[nn.Module]:
    """The model's decoder layers, in order.

    Args:
        model: The model as the runner holds it.
        layers: Its sieved layers.

    Raises:
        ConfigError: The model is not built of layers that can be pruned between, or a layer is
            not sieved: with every reason.
    """
    container, _, rest = layers[0].name.partition(f".{layers[0].number}.")
    if not rest:
        raise ConfigError([f"prune: no list of decoder layers is known from {layers[0].name}"])
    stack = model.get_submodule(container)
    if not isinstance(stack, nn.ModuleList):
        raise ConfigError([f"prune: {container} is no list of decoder layers"])
    reasons = []
    sieved = {layer.number for layer in layers}
    if whole := sorted(set(range(len(stack))) - sieved):
        reasons.append(
            f"prune needs every layer to be sieved, and layer {whole[0]} is not: leave out"
            " full_layers; models with sliding-window layers cannot be pruned"
        )
    for layer in layers:
        names = list(inspect.signature(stack[layer.number].forward).parameters)
        if names[:3] != ["positions", "hidden_states", "residual"]:
            reasons.append(
                f"prune needs decoder layers that take positions, hidden_states and residual;"
                f" {type(stack[layer.number]).__name__} takes {', '.join(names[:3])}"
            )
    if reasons:
        raise ConfigError(list(dict.fromkeys(reasons)))
    return list(stack)


def wrap_forward(model: nn.Module, around: Callable[..., Any]) -> None:
    """Have `around(forward, kwargs)` called in place of the model's forward, by either runner.

    Both call the model with keywords only, inside vLLM's forward context.
    """
    stock = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            # No step of a runner: what else calls it, passes through.
            return stock(*args, **kwargs)
        return around(stock, kwargs)

    model.forward = forward
