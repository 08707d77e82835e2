"""One prompt in a pass that prunes it."""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.pruning import PrunedPrompt
from kvsieve.engine.pruning.carried import CarriedPrompt
from kvsieve.engine.pruning.layout import Kept
from kvsieve.engine.step import PrunedRow
from kvsieve.pruning import LayerChoice


@dataclass(eq=False)
class PromptToPrune:
    """A prompt that is to be pruned, as far as the step reads it.

    Attributes:
        row: Its row in the step.
        choice: How far its choice of layer and tokens has come.
        num_tokens: Its length, in tokens.
        num_read: Its tokens in the step.
        is_last: Whether the step reads it to its end.
        carried: What was kept of its earlier chunks, and keeps this one; None if it is read whole.
    """

    row: int
    choice: LayerChoice
    num_tokens: int
    num_read: int
    is_last: bool = True
    carried: CarriedPrompt | None = None

    @property
    def num_passes(self) -> int:
        """Passes of its method."""
        return self.choice.settings.method.num_passes

    @property
    def window(self) -> int:
        """Last queries that score, in tokens."""
        return self.choice.settings.window

    def skipped(self, kept: Kept | None, num_layers: int) -> int:
        """Tokens that layers did not compute in a pass, summed over layers; of two passes, net."""
        layer = self.choice.layer if self.is_last else self.choice.settings.layer
        if layer is None:
            return 0
        deeper = num_layers - layer - 1
        if kept is None:
            return deeper * self.num_read
        again = num_layers if kept.is_moved else deeper
        return max(0, deeper * self.num_read - again * len(kept.positions))

    def result(self, kept: Kept | None, num_layers: int, seconds_saved: float) -> PrunedRow:
        """What was done, now that the prompt was read to its end."""
        choice = self.choice
        passed = num_layers if choice.layer is None else choice.layer + 1
        again = 0
        if kept is not None:
            again = num_layers if kept.is_moved else num_layers - passed
        num_kept = self.num_tokens if kept is None else len(kept.positions)
        computed = self.num_tokens * passed + num_kept * again
        relative = {
            str(layer): round(value, 4) for layer, value in choice.relative_variance.items()
        }
        report = PrunedPrompt(
            method=choice.settings.method.name,
            layer=choice.layer,
            reason=choice.reason or "never",
            kept_tokens=num_kept,
            computed_share=round(computed / (self.num_tokens * num_layers), 4),
            seconds_saved=round(seconds_saved, 4),
            relative_variance=relative or None,
        )
        if kept is None:
            return PrunedRow(report, num_layers, None)
        return PrunedRow(report, 0 if kept.is_moved else passed, kept.positions)
