"""One prompt on its way through the layers: when to prune it, and to which tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvsieve.core.pruning import PruneReason
from kvsieve.policies.select import select_positions
from kvsieve.pruning.ranks import layer_ranks, rank_variance
from kvsieve.pruning.settings import PruneSettings

_LARGEST = torch.finfo(torch.float32).max


class LayerChoice:
    """The choice of layer and tokens for one prompt.

    A layer's scores are added (`add`), which may give a number to be judged (`judge`). The two are
    apart so that one transfer from the device can bring the numbers of all prompts of a step.

    Args:
        settings: The method's parameters.
        prompt_tokens: Length of the prompt, in tokens.
        num_keep: Tokens that go deeper, fewer than the prompt has.
        spans: Positions `[begin, end)` that are kept whatever their scores.
    """

    def __init__(
        self,
        settings: PruneSettings,
        prompt_tokens: int,
        num_keep: int,
        spans: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.settings = settings
        self.num_keep = num_keep
        self.layer: int | None = None
        self.reason: PruneReason | None = None
        self.relative_variance: dict[int, float] = {}
        self._prompt_tokens = prompt_tokens
        self._spans = ((0, settings.num_sink_tokens), *spans)
        self._scores: torch.Tensor | None = None
        self._ranks: list[torch.Tensor] = []
        self._scale: float | None = None

    @property
    def is_decided(self) -> bool:
        """Whether the layer is chosen."""
        return self.layer is not None

    def wants(self, layer: int) -> bool:
        """Whether the scores of a layer are needed."""
        first, last = self.settings.first_scored_layer, self.settings.last_scored_layer
        return not self.is_decided and first <= layer <= last

    def add(self, layer: int, scores: torch.Tensor) -> torch.Tensor | None:
        """Look at the scores of a layer; of every wanted one, in order.

        Args:
            layer: Its number.
            scores: [num_candidates] float32 from `layer_scores`.

        Returns:
            The scalar to be judged, on the device; None if there is none: then the layer is chosen
            or passed already.
        """
        self._scores = scores
        if not self.settings.method.is_adaptive:
            self.layer, self.reason = layer, "fixed"
            return None
        self._ranks = [*self._ranks[1 - self.settings.observed_layers :], layer_ranks(scores)]
        if layer < self.settings.layer:
            return None
        return rank_variance(torch.stack(self._ranks), self._num_ranked)

    def judge(self, layer: int, variance: float) -> None:
        """Choose the layer if ranks have settled there, or if it is the deepest.

        At the first judged layer the variance only sets the scale; a scale of zero leaves nothing
        to settle.
        """
        if layer == self.settings.layer:
            self._scale = variance
        scale = self._scale
        relative = variance / scale if scale else 1.0
        self.relative_variance[layer] = relative
        if layer > self.settings.layer and relative < self.settings.threshold:
            self.layer, self.reason = layer, "threshold"
        elif layer == self.settings.last_scored_layer:
            if self.settings.max_layer is not None:
                self.layer, self.reason = layer, "deepest"
            elif self.settings.method.num_passes == 2:
                self.layer, self.reason = layer, "last"
            else:
                self.reason = "never"

    @property
    def _num_ranked(self) -> int:
        """Best positions of each layer that count, as many as are chosen by score."""
        assert self._scores is not None
        return max(1, min(self.num_keep - self.settings.num_recent, len(self._scores)))

    def positions(self) -> torch.Tensor:
        """The kept positions by the scores of the chosen layer: [num_keep] int64, ascending."""
        assert self._scores is not None
        # Protected tokens come first, then the last ones, then the best.
        recent = self._scores.new_full((self._prompt_tokens - len(self._scores),), _LARGEST)
        scores = torch.cat([self._scores.clamp(max=_LARGEST), recent])
        for begin, end in self._spans:
            scores[begin:end] = torch.inf
        return select_positions(scores[None], self.num_keep)[0]
