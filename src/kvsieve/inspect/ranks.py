"""Rank stability: how much the ranks of tokens still move from layer to layer.

ASL (arXiv 2601.07667) prunes a prompt at the first layer where they have settled. Layers are
counted here as the list of full-attention layers counts them; `Stability` names them by number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvsieve.core.errors import ConfigError
from kvsieve.pruning.ranks import layer_ranks, rank_variance
from kvsieve.pruning.scores import pooled_sum

# The authors' runs, all on models of 28 to 48 layers.
ASL_L_MIN_SHARE = 10 / 32
ASL_L_OBS_SHARE = 8 / 32
ASL_TAU = 0.3
ASL_POOL_SIZE = 7
DEFAULT_SELECT_SHARE = 0.05
"""Tokens propagated by default, as a share of the prompt. `tau` means little for large shares: the
authors kept 1.6%."""
MIN_RISE = 0.5
"""A peak has at least this share of the variance with which the curve begins."""
MIN_RANKED = 16
"""Ranked tokens beyond the window that the default number of selected tokens leaves at least."""


@dataclass(frozen=True)
class RankSettings:
    """ASL's parameters; None for a default that depends on model or prompt.

    Attributes:
        l_min: First layer at which the variance is judged, by its number. Default: the
            authors' 10 of 32, scaled.
        l_obs: Layers over which ranks are compared. Default: the authors' 8 of 32, scaled.
        tau: The layer is picked where the variance has fallen below this share of that at
            `l_min`.
        select_k: Tokens that would be propagated, the window included. Default: 5% of the
            prompt, and 16 more than the window at least.
        pool_size: Width of the average pooling over positions, in tokens, odd.
    """

    l_min: int | None = None
    l_obs: int | None = None
    tau: float = ASL_TAU
    select_k: int | None = None
    pool_size: int = ASL_POOL_SIZE


@dataclass(frozen=True)
class Stability:
    """Rank stability over a model's full-attention layers, for one prompt.

    Attributes:
        layers: Their numbers.
        num_ranked: Best-ranked tokens of each layer that count, `select_k` less the window.
        l_obs: Layers over which ranks are compared.
        l_min: The layer from which the variance is judged.
        tau: The threshold.
        variance: Rank variance per layer; None where fewer than `l_obs` layers lie behind.
        relative: The same divided by that at `l_min`; None before `l_min`.
        picked: The layer that ASL picks with `l_min`; None if the variance never falls enough.
        peak: The layer of the highest variance that the curve rises to: where `l_min` belongs.
        picked_from_peak: The layer that ASL picks with `l_min` at the peak; None as above.
        overlap: Share of the best-ranked tokens that the next layer has too, per layer but
            the last.
    """

    layers: tuple[int, ...]
    num_ranked: int
    l_obs: int
    l_min: int
    tau: float
    variance: tuple[float | None, ...]
    relative: tuple[float | None, ...]
    picked: int | None
    peak: int
    picked_from_peak: int | None
    overlap: tuple[float, ...]


def window_ranks(head_mass: torch.Tensor, pool_size: int) -> torch.Tensor:
    """Rank of every position by the attention of the window, for a whole layer.

    Each head's mass is pooled (average, zero padding counts) and summed over the heads.

    Args:
        head_mass: [num_heads, n], the window's attention to each position before it.
        pool_size: Width of the pooling, in tokens, odd.

    Returns:
        [n] float32 ranks, 1 for the best. Ties go to the higher position, as in the policies.
    """
    return layer_ranks(pooled_sum(head_mass.float(), "avg", pool_size))


def variance_curve(ranks: torch.Tensor, l_obs: int, num_ranked: int) -> list[float | None]:
    """Rank variance at each layer over the `l_obs` layers that end there; None before that.

    Args:
        ranks: [num_layers, n].
        l_obs: Layers compared.
        num_ranked: Best positions of each layer that count.
    """
    return [
        None if end < l_obs else float(rank_variance(ranks[end - l_obs : end], num_ranked))
        for end in range(1, len(ranks) + 1)
    ]


def pick_layer(variance: Sequence[float | None], l_min: int, tau: float) -> int | None:
    """The first layer from `l_min` on whose variance is below `tau` times that at `l_min`.

    Args:
        variance: Variance per layer, a number from `l_min` on.
        l_min: Index of the layer that sets the scale.
        tau: Threshold.

    Returns:
        An index into `variance`; None if the variance never falls that far, or is zero at
        `l_min`, which leaves nothing to fall.
    """
    scale = variance[l_min]
    if not scale:
        return None
    for index in range(l_min, len(variance)):
        value = variance[index]
        assert value is not None
        if value / scale < tau:
            return index
    return None


def top_overlap(ranks: torch.Tensor, num_ranked: int) -> list[float]:
    """Share of each layer's best positions that are among the next layer's, [num_layers - 1]."""
    best = ranks <= num_ranked
    both = (best[:-1] & best[1:]).sum(dim=1)
    return (both / best[0].sum()).tolist()


def num_ranked_tokens(settings: RankSettings, prompt_tokens: int, window: int) -> int:
    """Best positions of a layer that count: the selected tokens less the window."""
    select_k = settings.select_k
    if select_k is None:
        select_k = max(math.ceil(DEFAULT_SELECT_SHARE * prompt_tokens), window + MIN_RANKED)
    return min(max(1, select_k - window), prompt_tokens - window)


def resolve_layers(settings: RankSettings, layers: Sequence[int]) -> tuple[int, int]:
    """`l_min`, as an index into `layers`, and `l_obs`, with defaults for the model's depth.

    Args:
        settings: ASL's parameters.
        layers: Numbers of the full-attention layers, ascending.

    Raises:
        ConfigError: They do not fit the model, with every reason.
    """
    reasons = []
    l_obs = settings.l_obs
    if l_obs is None:
        l_obs = min(len(layers), max(2, round(ASL_L_OBS_SHARE * len(layers))))
    elif not 2 <= l_obs <= len(layers):
        reasons.append(
            f"l_obs must be between 2 and the model's {len(layers)} full-attention layers, got"
            f" {l_obs}"
        )
    index = max(min(l_obs, len(layers)) - 1, round(ASL_L_MIN_SHARE * len(layers)))
    if settings.l_min is not None:
        if settings.l_min not in layers:
            reasons.append(
                f"l_min must be a full-attention layer ({layers[0]} to {layers[-1]}), got"
                f" {settings.l_min}"
            )
        elif not reasons and layers.index(settings.l_min) < l_obs - 1:
            reasons.append(
                f"l_min must have {l_obs} full-attention layers up to itself (l_obs), so"
                f" {layers[l_obs - 1]} is the lowest; got {settings.l_min}"
            )
        else:
            index = layers.index(settings.l_min)
    if reasons:
        raise ConfigError(reasons)
    return index, l_obs


def stability(
    ranks: torch.Tensor, layers: Sequence[int], settings: RankSettings, window: int
) -> Stability:
    """The rank stability of one prompt.

    Args:
        ranks: [num_layers, num_tokens - window], 1 for the best, one row per layer.
        layers: Numbers of the layers, ascending.
        settings: ASL's parameters.
        window: Observation window, in tokens.

    Raises:
        ConfigError: The settings do not fit the model.
    """
    l_min, l_obs = resolve_layers(settings, layers)
    num_ranked = num_ranked_tokens(settings, ranks.shape[1] + window, window)
    variance = variance_curve(ranks, l_obs, num_ranked)
    peak = l_obs - 1 + peak_index([value or 0.0 for value in variance[l_obs - 1 :]])
    scale = variance[l_min] or 0.0

    def numbered(index: int | None) -> int | None:
        return None if index is None else layers[index]

    return Stability(
        layers=tuple(layers),
        num_ranked=num_ranked,
        l_obs=l_obs,
        l_min=layers[l_min],
        tau=settings.tau,
        variance=tuple(variance),
        relative=tuple(
            None if index < l_min or value is None or not scale else value / scale
            for index, value in enumerate(variance)
        ),
        picked=numbered(pick_layer(variance, l_min, settings.tau)),
        peak=layers[peak],
        picked_from_peak=numbered(pick_layer(variance, peak, settings.tau)),
        overlap=tuple(top_overlap(ranks, num_ranked)),
    )


def peak_index(curve: Sequence[float]) -> int:
    """Where a curve of rank variance peaks: the highest value that it rises to.

    The first values compare the lowest layers, which agree with none, so a curve may begin
    high and fall before it rises; ranks have not settled in that fall. Without a rise to at
    least `MIN_RISE` of the first value the first is the peak: the rest are ripples.

    Args:
        curve: At least one value, none negative.
    """
    start = 0
    while start + 1 < len(curve) and curve[start + 1] < curve[start]:
        start += 1
    peak = max(range(start, len(curve)), key=lambda index: curve[index])
    has_risen = start + 1 < len(curve) and curve[peak] >= MIN_RISE * curve[0]
    return peak if has_risen else 0


def mean_variance(each: Sequence[Stability]) -> dict[int, float]:
    """The curves of several prompts as one: by layer, from the first that has a variance.

    Each prompt's curve counts as a share of its own maximum, so that a long prompt, whose
    ranks are larger numbers, does not drown the others.
    """
    first = each[0]
    sums = [0.0] * len(first.layers)
    for one in each:
        largest = max((value for value in one.variance if value is not None), default=0.0) or 1.0
        for index, value in enumerate(one.variance):
            sums[index] += (value or 0.0) / largest
    lowest = first.l_obs - 1
    return {
        layer: total / len(each)
        for layer, total in zip(first.layers[lowest:], sums[lowest:], strict=True)
    }


def calibrated_l_min(each: Sequence[Stability], highest: int | None = None) -> int:
    """One `l_min` for several prompts: the layer where the variance peaks for them together.

    Args:
        each: Their curves.
        highest: The highest layer to return; None for the last.
    """
    curve = mean_variance(each)
    layers = [layer for layer in curve if highest is None or layer <= highest]
    return layers[peak_index([curve[layer] for layer in layers])]
