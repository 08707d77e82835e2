"""One forward pass in which prompts are pruned.

Hooks on the decoder layers, there for this pass only, change what a layer is given: positions of
the token rows that are left, and attention metadata that shows as many. No model's forward is
replaced. The result is spread out again to all rows of the step, so that the runner's own indices
for sampling hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context

from kvsieve.core.pruning import PrunedPrompt
from kvsieve.engine.pruning.layout import Kept, Layout
from kvsieve.engine.step import PrunedRow, SeenRows, Step
from kvsieve.pruning import LayerChoice
from kvsieve.pruning.scores import layer_scores

if TYPE_CHECKING:
    from kvsieve.engine.sieve import Sieve

_CHANGED = ("attn_metadata", "slot_mapping", "skip_compiled", "cudagraph_runtime_mode")
"""What the pass changes of vLLM's forward context, and puts back."""

_INPUTS = ("input_ids", "positions", "inputs_embeds")
"""Arguments of a model that have a row for each token."""


class _FirstPassEnds(Exception):  # noqa: N818, it is no error
    """Every prompt of a first pass has its tokens: the layers beyond need not run."""


@dataclass
class PromptToPrune:
    """A prompt that the step reads from its first token to its last.

    Attributes:
        row: Its row in the step.
        choice: How far its choice of layer and tokens has come.
        start: First position of its tail region, in tokens.
        num_tokens: Its length, in tokens.
    """

    row: int
    choice: LayerChoice
    start: int
    num_tokens: int

    @property
    def num_passes(self) -> int:
        """Passes of its method."""
        return self.choice.settings.method.num_passes


@dataclass
class _Clock:
    """Time that layers took, and how much of it while nothing was pruned yet."""

    begin: float = 0.0
    _seconds: float = 0.0
    _whole_seconds: float = 0.0
    _whole_tokens: int = 0

    def add(self, num_tokens: int, *, is_whole: bool) -> None:
        """Count a layer that has just run on so many tokens."""
        seconds = time.perf_counter() - self.begin
        self._seconds += seconds
        if is_whole:
            self._whole_seconds += seconds
            self._whole_tokens += num_tokens

    def saved(self, token_layers: int) -> float:
        """Seconds by which so many tokens times layers would have taken longer, unpruned."""
        if not self._whole_tokens:
            return 0.0
        unpruned = self._whole_seconds / self._whole_tokens * token_layers
        return max(0.0, unpruned - self._seconds)


@dataclass
class PrefillPass:
    """The pass.

    Args:
        sieve: The worker's sieve, in a step whose rows are known.
        layers: The model's decoder layers.
        prompts: The prompts to prune.
    """

    sieve: Sieve
    layers: Sequence[nn.Module]
    prompts: Sequence[PromptToPrune]
    query: torch.Tensor | None = None
    """[num_tokens, num_heads, head_size], the queries of the layer that runs."""
    _layout: Layout | None = None
    _kept: dict[int, Kept] = field(default_factory=dict)
    _active: list[PromptToPrune] = field(default_factory=list)
    _is_first_pass: bool = False
    _clock: _Clock = field(default_factory=_Clock)

    def run(self, forward: Callable[..., Any], inputs: Mapping[str, Any]) -> torch.Tensor:
        """Run the model on the step and prune on the way.

        Args:
            forward: The model's forward, which takes keywords.
            inputs: The runner's arguments.

        Returns:
            [num_tokens, hidden_size], as the runner expects it. Rows of dropped tokens are zero.
        """
        context = get_forward_context()
        before = {name: getattr(context, name) for name in _CHANGED}
        step = self._step
        assert step.rows is not None
        self._num_tokens = int(step.rows.query_lens.sum())
        self._num_rows = len(inputs["positions"])
        self._all_positions = inputs["positions"]
        handles = [
            handle
            for number, layer in enumerate(self.layers)
            for handle in (
                layer.register_forward_pre_hook(self._before_layer, with_kwargs=True),
                layer.register_forward_hook(self._hook_after(number)),
            )
        ]
        context.skip_compiled = True
        context.cudagraph_runtime_mode = CUDAGraphMode.NONE
        self.sieve.prefill = self
        try:
            twice = [prompt for prompt in self.prompts if prompt.num_passes == 2]
            if twice:
                self._read_first(forward, inputs, twice)
                self._kept = {
                    p.row: Kept(p.choice.positions(), p.start, is_moved=True) for p in twice
                }
                context.attn_metadata = before["attn_metadata"]
                context.slot_mapping = before["slot_mapping"]
            self._active = [prompt for prompt in self.prompts if prompt.num_passes == 1]
            if self._kept:
                self._enter(self._layout_of(self._kept))
            else:
                self._layout, step.pruned_rows = None, None
            return forward(**self._picked(inputs))
        finally:
            self.sieve.prefill = None
            step.pruned_rows = None
            for handle in handles:
                handle.remove()
            for name, value in before.items():
                setattr(context, name, value)

    def _read_first(
        self, forward: Callable[..., Any], inputs: Mapping[str, Any], prompts: list[PromptToPrune]
    ) -> None:
        """The first of two passes: only these prompts, only as far as their choice goes."""
        self._is_first_pass = True
        self._active = list(prompts)
        self._enter(self._layout_of({}))
        try:
            forward(**self._picked(inputs))
        except _FirstPassEnds:
            pass
        finally:
            self._is_first_pass = False

    @property
    def _step(self) -> Step:
        step = self.sieve.step
        assert step is not None, "a pass belongs to a step"
        return step

    def _layout_of(self, kept: Mapping[int, Kept]) -> Layout:
        rows = self._step.rows
        assert rows is not None
        only = frozenset(prompt.row for prompt in self._active) if self._is_first_pass else None
        return Layout.of(rows, kept, self._all_positions.device, only)

    def _enter(self, layout: Layout) -> None:
        """Show the layers that run from now on the rows of a layout."""
        step = self._step
        assert step.rows is not None
        self._layout = layout
        self._positions = self._all_positions[layout.places]
        observation = None
        being_read: list[tuple[int, int]] = []
        if not self._is_first_pass:
            observation = layout.observation(step.observation, self._num_tokens)
            being_read = [(row, n) for row, n in step.being_read if row not in layout.kept]
        step.pruned_rows = SeenRows(layout.step_rows(step.rows), observation, being_read)
        context = get_forward_context()
        metadata, slots = self.sieve.layout_metadata(layout)
        context.attn_metadata = {**context.attn_metadata, **metadata}
        context.slot_mapping = {**context.slot_mapping, **slots}

    def _picked(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A model's arguments for the rows of the layout."""
        picked = dict(inputs)
        if self._layout is None:
            return picked
        for name in _INPUTS:
            if (rows := picked.get(name)) is not None:
                index = self._layout.places if name == "positions" else self._layout.tokens
                picked[name] = rows[index]
        return picked

    def _before_layer(
        self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Give a layer the positions of the token rows that are left: the model has its own."""
        self._clock.begin = time.perf_counter()
        if self._layout is None:
            return None
        if "positions" in kwargs:
            return args, {**kwargs, "positions": self._positions}
        return (self._positions, *args[1:]), kwargs

    def _hook_after(self, number: int) -> Callable[..., Any]:
        def after_layer(_layer: nn.Module, _args: Any, output: Any) -> Any:
            return self._after_layer(number, *output)

        return after_layer

    def _after_layer(
        self, number: int, hidden_states: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prune what is decided after a layer, and carry on with what is left."""
        self._clock.add(len(hidden_states), is_whole=not self._kept)
        decided = self._decide(number)
        self.query = None
        if decided:
            earlier = self._layout
            for prompt in decided:
                self._active.remove(prompt)
                if not self._is_first_pass:
                    self._kept[prompt.row] = Kept(prompt.choice.positions(), prompt.start)
            if self._is_first_pass and not self._active:
                raise _FirstPassEnds
            layout = self._layout_of(self._kept)
            self._enter(layout)
            index = layout.from_earlier(earlier, self._num_tokens)
            hidden_states, residual = hidden_states[index], residual[index]
        if self._layout is not None and number == len(self.layers) - 1:
            return self._spread(hidden_states), self._spread(residual)
        return hidden_states, residual

    def _decide(self, number: int) -> list[PromptToPrune]:
        """The prompts whose layer this is. One transfer from the device for all of them."""
        wanted = [prompt for prompt in self._active if prompt.choice.wants(number)]
        variances: list[tuple[PromptToPrune, torch.Tensor]] = []
        for prompt in wanted:
            variance = prompt.choice.add(number, self._scores(number, prompt))
            if variance is not None:
                variances.append((prompt, variance))
        if variances:
            numbers = torch.stack([variance for _, variance in variances]).tolist()
            for (prompt, _), value in zip(variances, numbers, strict=True):
                prompt.choice.judge(number, value)
        return [prompt for prompt in wanted if prompt.choice.is_decided]

    def _scores(self, number: int, prompt: PromptToPrune) -> torch.Tensor:
        """The scores of a prompt in the layer that has just run."""
        assert self.query is not None, "a sieved layer shows its queries"
        end = int(self._step.seen.rows.query_starts[prompt.row]) + prompt.num_tokens
        settings = prompt.choice.settings
        window = self.query[max(end - settings.window, end - prompt.num_tokens) : end]
        evidence = self.sieve.evidence(number, prompt.row, window)
        return layer_scores(evidence, settings, window[-1])

    def _spread(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the layout, put back to where the runner expects them."""
        assert self._layout is not None
        spread = rows.new_zeros((self._num_rows, *rows.shape[1:]))
        spread[self._layout.slots] = rows
        return spread

    def results(self) -> dict[int, PrunedRow]:
        """What was done to each prompt, by its row; after the pass."""
        num_layers = len(self.layers)
        full = {prompt.row: prompt.num_tokens * num_layers for prompt in self.prompts}
        computed = {prompt.row: self._computed(prompt) for prompt in self.prompts}
        skipped = {row: max(0, full[row] - computed[row]) for row in full}
        saved = self._clock.saved(self._num_tokens * num_layers)
        results = {}
        for prompt in self.prompts:
            row, choice = prompt.row, prompt.choice
            kept = self._kept.get(row)
            report = PrunedPrompt(
                method=choice.settings.method.name,
                layer=choice.layer,
                reason=choice.reason or "never",
                kept_tokens=prompt.num_tokens if kept is None else len(kept.positions),
                computed_share=computed[row] / full[row],
                seconds_saved=saved * skipped[row] / max(1, sum(skipped.values())),
                relative_variance={
                    str(layer): value for layer, value in choice.relative_variance.items()
                }
                or None,
            )
            first = num_layers
            if kept is not None and choice.layer is not None:
                first = 0 if kept.is_moved else choice.layer + 1
            results[row] = PrunedRow(report, first, None if kept is None else kept.positions)
        return results

    def _computed(self, prompt: PromptToPrune) -> int:
        """Tokens that the layers computed of a prompt, summed over layers and passes."""
        choice, num_layers = prompt.choice, len(self.layers)
        if choice.layer is None:
            return prompt.num_tokens * num_layers
        whole = choice.layer + 1
        rest = num_layers - (whole if prompt.num_passes == 1 else 0)
        return prompt.num_tokens * whole + choice.num_keep * rest
