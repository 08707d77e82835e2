"""What one prompt tells: how ranks move, and how far pruning at each layer leads astray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from kvsieve.calibrate.prompts import CalibrationPrompt
from kvsieve.calibrate.resume import Silent, go_on, read
from kvsieve.core.errors import KvsieveError
from kvsieve.core.pruning import Prune, PruneName
from kvsieve.inspect.evidence import LayerEvidence
from kvsieve.inspect.forward import run_pass
from kvsieve.inspect.model import LoadedModel
from kvsieve.inspect.ranks import RankSettings, Stability, stability
from kvsieve.inspect.sliced import LayerAttention, LayerHeads
from kvsieve.kernels import call
from kvsieve.pruning import LayerChoice, PruneOptions, PruneSettings, prune_settings
from kvsieve.pruning.ranks import layer_ranks
from kvsieve.pruning.scores import layer_scores

FIXED: tuple[PruneName, ...] = ("fastkv", "gemfilter")
"""Methods with a fixed layer."""

Done = Callable[[int], None]
"""Told how much was done, in tokens times layers."""


@dataclass(frozen=True)
class PromptCurves:
    """What one prompt tells.

    Attributes:
        name: The prompt's.
        num_tokens: Its length, in tokens.
        num_keep: Tokens that are kept of it.
        stability: How its ranks move from layer to layer, as ASL scores.
        squared_norm: Squared length of the last token's final hidden state with the full prompt.
        distances: By method and candidate layer: squared L2 distance of that state to the one
            with the prompt pruned there.
    """

    name: str
    num_tokens: int
    num_keep: int
    stability: Stability
    squared_norm: float
    distances: dict[PruneName, dict[int, float]]


@dataclass
class _WholePass(Silent):
    """Hears the pass of a whole prompt, and keeps what pruning at each candidate would keep."""

    num_layers: int
    num_keep: int
    candidates: Sequence[int]
    asl: PruneSettings
    ranks: list[torch.Tensor] = field(default_factory=list)
    positions: dict[tuple[PruneName, int], torch.Tensor] = field(default_factory=dict)
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    """What each candidate layer leaves in the rows that FastKV keeps there."""

    def on_attention(self, attention: LayerAttention, heads: LayerHeads) -> None:
        """Score the prompt as each method does."""
        layer = attention.layer
        self.ranks.append(layer_ranks(_scores(attention, heads, self.asl)).cpu())
        if layer not in self.candidates:
            return
        for method in FIXED:
            settings = prune_settings(Prune(method, layer), PruneOptions(), self.num_layers)
            choice = LayerChoice(settings, heads.key.shape[1], self.num_keep)
            choice.add(layer, _scores(attention, heads, settings))
            self.positions[method, layer] = choice.positions()

    def on_hidden(self, layer: int, hidden: torch.Tensor) -> None:
        """Keep the rows that would go deeper."""
        if layer in self.candidates:
            self.rows[layer] = hidden[self.positions["fastkv", layer]]


def measure_prompt(
    loaded: LoadedModel,
    prompt: CalibrationPrompt,
    num_keep: int,
    candidates: Sequence[int],
    done: Done = lambda _: None,
) -> PromptCurves:
    """Read a prompt once whole, and from every candidate layer on with its kept tokens.

    Args:
        loaded: A model all of whose layers have full attention.
        prompt: The prompt.
        num_keep: Tokens kept, more than ASL's window and at most the prompt.
        candidates: Layers, ascending.
        done: Told of progress; `work` says how much it will be in all.

    Raises:
        KvsieveError: The model's numbers are not finite.
    """
    num_layers, ids = len(loaded.layers), list(prompt.token_ids)
    asl = prune_settings(Prune("asl"), PruneOptions(), num_layers)
    whole = _WholePass(num_layers, num_keep, candidates, asl)
    final = run_pass(loaded, ids, whole, observation_window=asl.window, num_sampled=1)[-1]
    if not bool(final.isfinite().all()):
        raise KvsieveError(
            f"the hidden states of {loaded.name} are not finite with the prompt {prompt.name}: its"
            " weights or their type are broken, and no figure would mean anything"
        )
    done(len(ids) * num_layers)
    distances: dict[PruneName, dict[int, float]] = {method: {} for method in FIXED}
    for layer in candidates:
        positions = whole.positions["fastkv", layer].cpu()
        kept = [ids[position] for position in positions.tolist()]
        pruned = go_on(loaded, kept, positions, layer, whole.rows.pop(layer))[-1]
        distances["fastkv"][layer] = _squared(pruned - final)
        done(num_keep * (num_layers - 1 - layer))
        chosen = whole.positions["gemfilter", layer].tolist()
        again = read(loaded, [ids[position] for position in chosen])[-1]
        distances["gemfilter"][layer] = _squared(again - final)
        done(num_keep * num_layers)
    ranks = RankSettings(l_obs=asl.observed_layers, select_k=num_keep)
    return PromptCurves(
        name=prompt.name,
        num_tokens=len(ids),
        num_keep=num_keep,
        stability=stability(torch.stack(whole.ranks), range(num_layers), ranks, asl.window),
        squared_norm=_squared(final),
        distances=distances,
    )


def work(num_tokens: int, num_keep: int, candidates: Sequence[int], num_layers: int) -> int:
    """What `measure_prompt` does, in tokens times layers."""
    again = sum(2 * num_layers - 1 - layer for layer in candidates)
    return num_tokens * num_layers + num_keep * again


def _scores(attention: LayerAttention, heads: LayerHeads, settings: PruneSettings) -> torch.Tensor:
    """The scores of a prompt in the layer that has just attended."""
    if settings.num_recent and settings.window != attention.observation_window:
        window = heads.query[:, -settings.window :].transpose(0, 1)
        mass = call.window_scores(window, heads.key, heads.scale, impl="cpu")
        attention = replace(
            attention, observation_window=settings.window, window_mass=mass.flatten(0, 1)
        )
    return layer_scores(LayerEvidence(attention, heads), settings, heads.query[:, -1])


def _squared(state: torch.Tensor) -> float:
    return float(state.double().square().sum())
