"""Going on from a layer: what the layers beyond make of kept rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvsieve.core.errors import ConfigError
from kvsieve.inspect.forward import CHECK_TOKENS, run_pass
from kvsieve.inspect.model import LoadedModel
from kvsieve.inspect.sliced import LayerAttention, LayerHeads


class Silent:
    """Listens to a pass and notes nothing."""

    def on_attention(self, attention: LayerAttention, heads: LayerHeads) -> None:
        """Nothing to note."""

    def on_sliding(self, layer: int) -> None:
        """Nothing to note."""

    def on_hidden(self, layer: int, hidden: torch.Tensor) -> None:
        """Nothing to note."""


class _HiddenStates(Silent):
    """Keeps the hidden state after one layer."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self.hidden: torch.Tensor | None = None

    def on_hidden(self, layer: int, hidden: torch.Tensor) -> None:
        """Keep the one."""
        if layer == self._layer:
            self.hidden = hidden


def read(loaded: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    """The last hidden state of a whole prompt: [num_tokens, hidden_size]."""
    return run_pass(loaded, token_ids, Silent(), observation_window=1, num_sampled=1)


def go_on(
    loaded: LoadedModel,
    token_ids: list[int],
    positions: torch.Tensor,
    layer: int,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Run the layers beyond one on rows of a prompt, at their original positions.

    Args:
        loaded: The model.
        token_ids: The tokens of the rows.
        positions: [num_rows] int64, where in the prompt they stand, ascending.
        layer: The last layer that read the whole prompt.
        hidden: [num_rows, hidden_size], what it left in the rows.

    Returns:
        The last hidden state of the rows, [num_rows, hidden_size].
    """
    with _skipping(loaded, layer, hidden):
        return run_pass(
            loaded, token_ids, Silent(), observation_window=1, num_sampled=1, positions=positions
        )


def check_going_on(loaded: LoadedModel, token_ids: list[int]) -> None:
    """Find out whether a model's layers can be run on rows alone: nothing dropped, nothing changes.

    Args:
        loaded: The model.
        token_ids: A prompt; its first `CHECK_TOKENS` tokens are used.

    Raises:
        ConfigError: They cannot.
    """
    ids = token_ids[:CHECK_TOKENS]
    layer = len(loaded.layers) // 2
    kept = _HiddenStates(layer)
    whole = run_pass(loaded, ids, kept, observation_window=1, num_sampled=1).float()
    assert kept.hidden is not None, "a pass runs every layer"
    resumed = go_on(loaded, ids, torch.arange(len(ids)), layer, kept.hidden).float()
    difference = float((whole - resumed).norm() / whole.norm().clamp_min(1e-30))
    bound = 1e-3 if loaded.dtype == torch.float32 else 5e-2
    # A comparison with something that is not a number is false.
    if not difference <= bound:
        raise ConfigError(
            [
                f"{loaded.name} cannot be calibrated: run from layer {layer} on, its layers end"
                f" {difference:.2g} (relative) from where the whole model does, so they take more"
                " than positions and a hidden state"
            ]
        )


@contextmanager
def _skipping(loaded: LoadedModel, layer: int, hidden: torch.Tensor) -> Iterator[None]:
    """Let the layers up to one do nothing, and that one hand out a hidden state."""

    def standing_in(number: int) -> Callable[..., torch.Tensor]:
        def forward(hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
            return hidden[None] if number == layer else hidden_states

        return forward

    skipped = loaded.layers[: layer + 1]
    for number, module in enumerate(skipped):
        # An attribute of the instance hides the class's method, and nothing else of the layer.
        module.forward = standing_in(number)
    try:
        yield
    finally:
        for module in skipped:
            del module.forward
