"""One forward pass in which prompts are pruned.

Hooks on the decoder layers, there for this pass only, change what a layer is given: positions of
the token rows that are left, and attention metadata that shows as many. No model's forward is
replaced. The result is spread out again to all rows of the step, so that the runner's own indices
for sampling hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context

from kvsieve.engine.pruning.clock import LayerClock
from kvsieve.engine.pruning.host import PruningHost
from kvsieve.engine.pruning.layout import Kept, Layout
from kvsieve.engine.pruning.prompt import PromptToPrune
from kvsieve.engine.step import PrunedRow, SeenRows, Step
from kvsieve.pruning.scores import layer_scores

_CHANGED = ("attn_metadata", "slot_mapping", "skip_compiled", "cudagraph_runtime_mode")
"""What the pass changes of vLLM's forward context, and puts back."""


class _NothingLeft(Exception):  # noqa: N818, it is no error
    """No row has anything to do in the layers beyond: they need not run."""


@dataclass
class PrefillPass:
    """The pass.

    Args:
        sieve: The worker's sieve, in a step whose rows are known.
        layers: The model's decoder layers.
        prompts: The prompts to prune.
        inputs: The runner's arguments of the model's forward.
    """

    sieve: PruningHost
    layers: Sequence[nn.Module]
    prompts: Sequence[PromptToPrune]
    inputs: Mapping[str, Any]
    query: torch.Tensor | None = None
    """[num_tokens, num_heads, head_size], the queries of the layer that runs."""
    _layout: Layout | None = None
    _kept: dict[int, Kept] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)
    _active: list[PromptToPrune] = field(default_factory=list)
    _is_first_pass: bool = False
    _last_states: torch.Tensor | None = None
    _clock: LayerClock = field(default_factory=LayerClock)

    def run(self, forward: Callable[..., Any]) -> torch.Tensor:
        """Run the model on the step and prune on the way.

        Args:
            forward: The model's forward, which takes the inputs as keywords.

        Returns:
            [num_tokens, hidden_size], as the runner expects it. Rows of dropped tokens are zero.
        """
        context = get_forward_context()
        before = {name: getattr(context, name) for name in _CHANGED}
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
            if twice := [prompt for prompt in self.prompts if prompt.num_passes == 2]:
                self._read_first(forward, twice)
                context.attn_metadata = before["attn_metadata"]
                context.slot_mapping = before["slot_mapping"]
            self._active = [prompt for prompt in self.prompts if prompt.num_passes == 1]
            if self._kept:
                self._enter(self._next_layout())
            output: torch.Tensor = forward(**self._picked())
            return output
        except _NothingLeft:
            assert self._last_states is not None, "a layer ran before all rows were gone"
            return self._last_states.new_zeros((self._num_rows, self._last_states.shape[1]))
        finally:
            self.sieve.prefill = None
            self._step.pruned_rows = None
            for handle in handles:
                handle.remove()
            for name, value in before.items():
                setattr(context, name, value)

    def _read_first(self, forward: Callable[..., Any], prompts: list[PromptToPrune]) -> None:
        """The first of two passes: only these prompts, only as far as their choice goes."""
        self._is_first_pass = True
        self._active = list(prompts)
        self._gone = self._all_rows - {prompt.row for prompt in prompts}
        self._enter(self._next_layout())
        try:
            forward(**self._picked())
        except _NothingLeft:
            pass
        finally:
            self._is_first_pass = False
            self._gone = set()
            self._layout, self._step.pruned_rows = None, None
        for prompt in prompts:
            self._kept[prompt.row] = Kept(prompt.choice.positions(), is_moved=True)

    @property
    def _step(self) -> Step:
        step = self.sieve.step
        assert step is not None, "a pass belongs to a step"
        return step

    @property
    def _all_rows(self) -> set[int]:
        assert self._step.rows is not None
        return set(range(len(self._step.rows.request_ids)))

    @property
    def _positions(self) -> torch.Tensor:
        positions: torch.Tensor = self.inputs["positions"]
        return positions

    @property
    def _num_rows(self) -> int:
        """Token rows of the step, with the runner's padding."""
        return len(self._positions)

    def _next_layout(self) -> Layout:
        """What is left now.

        Raises:
            _NothingLeft: Nothing is.
        """
        assert self._step.rows is not None
        layout = Layout.of(self._step.rows, self._positions, self._kept, self._gone)
        if layout is None:
            raise _NothingLeft
        return layout

    def _enter(self, layout: Layout) -> None:
        """Show the layers that run from now on the rows of a layout."""
        step = self._step
        assert step.rows is not None
        self._layout = layout
        observation = None
        being_read: list[tuple[int, int]] = []
        if not self._is_first_pass:
            num_tokens = int(step.rows.query_lens.sum())
            observation = layout.observation(step.observation, num_tokens)
            whole = set(layout.rows) - layout.kept.keys()
            being_read = [(row, count) for row, count in step.being_read if row in whole]
        step.pruned_rows = SeenRows(layout.step_rows(step.rows), observation, being_read)
        context = get_forward_context()
        metadata, slots = self.sieve.layout_metadata(layout)
        context.attn_metadata = {**context.attn_metadata, **metadata}
        context.slot_mapping = {**context.slot_mapping, **slots}

    def _picked(self) -> dict[str, Any]:
        """The model's arguments for the rows of the layout that it begins with."""
        picked = dict(self.inputs)
        if self._layout is None:
            return picked
        picked["positions"] = self._layout.positions
        for name in ("input_ids", "inputs_embeds"):
            if (rows := picked.get(name)) is not None:
                picked[name] = self._carry_on(rows, None, self._layout.kept)
        return picked

    def _carry_on(
        self,
        rows: torch.Tensor,
        earlier: Layout | None,
        pruned: Collection[int],
        carried: Mapping[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Token rows of the layout, from those of an earlier one.

        Args:
            rows: [n, ...] in the earlier layout; None is the step itself.
            earlier: That layout.
            pruned: Rows that were pruned in between.
            carried: All token rows of the prompts that came in chunks, by row.
        """
        layout, step = self._layout, self._step
        assert layout is not None
        assert step.rows is not None
        pieces = []
        for row in layout.rows:
            if earlier is None:
                begin = int(step.rows.query_starts[row])
                end = begin + int(step.rows.query_lens[row])
            else:
                begin, end = earlier.range_of(row)
            piece = (carried or {}).get(row, rows[begin:end])
            pieces.append(piece[layout.kept[row].positions] if row in pruned else piece)
        return torch.cat(pieces)

    def _before_layer(
        self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Give a layer the positions of the token rows that are left: the model has its own."""
        self._clock.start()
        if self._layout is None:
            return None
        if "positions" in kwargs:
            return args, {**kwargs, "positions": self._layout.positions}
        return (self._layout.positions, *args[1:]), kwargs

    def _hook_after(self, number: int) -> Callable[..., Any]:
        def after_layer(_layer: nn.Module, _args: Any, output: Any) -> Any:
            return self._after_layer(number, *output)

        return after_layer

    def _after_layer(
        self, number: int, hidden_states: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prune what is decided after a layer, and carry on with what is left."""
        self._clock.stop(len(hidden_states), is_whole=not (self._kept or self._leaves_rows))
        self._last_states = hidden_states
        leaving = self._keep_chunks(number, hidden_states, residual)
        decided = self._decide(number)
        self.query = None
        if leaving or decided:
            earlier = self._layout
            hidden_of = {}
            residual_of = {}
            for prompt in (*leaving, *decided):
                self._active.remove(prompt)
            for prompt in decided:
                if self._is_first_pass:
                    self._gone.add(prompt.row)
                    continue
                self._kept[prompt.row] = Kept(prompt.choice.positions())
                if prompt.carried is not None:
                    hidden_of[prompt.row] = torch.cat(prompt.carried.hidden_states)
                    residual_of[prompt.row] = torch.cat(prompt.carried.residual)
            self._gone.update(prompt.row for prompt in leaving)
            self._enter(self._next_layout())
            pruned = {prompt.row for prompt in decided}
            hidden_states = self._carry_on(hidden_states, earlier, pruned, hidden_of)
            residual = self._carry_on(residual, earlier, pruned, residual_of)
        if self._layout is not None and number == len(self.layers) - 1:
            return self._spread(hidden_states), self._spread(residual)
        return hidden_states, residual

    @property
    def _leaves_rows(self) -> bool:
        return bool(self._gone) and not self._is_first_pass

    def _keep_chunks(
        self, number: int, hidden_states: torch.Tensor, residual: torch.Tensor
    ) -> list[PromptToPrune]:
        """Keep what the selection layer makes of chunks.

        Returns:
            The prompts whose end is still to come: nothing of them goes on in this step.
        """
        leaving = []
        for prompt in self._active:
            if prompt.carried is None or not prompt.choice.wants(number):
                continue
            begin, end = self._range_of(prompt)
            assert self.query is not None, "a sieved layer shows its queries"
            queries = self.query[begin:end]
            prompt.carried.add(
                hidden_states[begin:end], residual[begin:end], queries, prompt.window
            )
            if not prompt.is_last:
                leaving.append(prompt)
        return leaving

    def _range_of(self, prompt: PromptToPrune) -> tuple[int, int]:
        """First and last (excluded) token row of a prompt that was not pruned yet."""
        rows = self._step.seen.rows
        begin = int(rows.query_starts[prompt.row])
        return begin, begin + int(rows.query_lens[prompt.row])

    def _decide(self, number: int) -> list[PromptToPrune]:
        """The prompts whose layer this is. One transfer from the device for all of them."""
        wanted = [
            prompt for prompt in self._active if prompt.is_last and prompt.choice.wants(number)
        ]
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
        if prompt.carried is not None:
            window = prompt.carried.queries
            assert window is not None, "its last chunk was kept"
        else:
            assert self.query is not None, "a sieved layer shows its queries"
            begin, end = self._range_of(prompt)
            window = self.query[max(begin, end - prompt.window) : end]
        evidence = self.sieve.evidence(number, prompt.row, window)
        return layer_scores(evidence, prompt.choice.settings, window[-1])

    def _spread(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the layout, put back to where the runner expects them."""
        assert self._layout is not None
        spread = rows.new_zeros((self._num_rows, *rows.shape[1:]))
        spread[self._layout.slots] = rows
        return spread

    def results(self) -> dict[int, PrunedRow]:
        """What was done to each prompt that ended, by its row; once the pass is over."""
        assert self._step.rows is not None
        num_layers = len(self.layers)
        skipped = {
            prompt.row: prompt.skipped(self._kept.get(prompt.row), num_layers)
            for prompt in self.prompts
        }
        token_layers = int(self._step.rows.query_lens.sum()) * num_layers
        saved = self._clock.saved(token_layers) / max(1, sum(skipped.values()))
        results = {}
        for prompt in self.prompts:
            seconds = saved * skipped[prompt.row]
            if prompt.carried is not None:
                seconds = prompt.carried.seconds_saved = prompt.carried.seconds_saved + seconds
            if prompt.is_last:
                kept = self._kept.get(prompt.row)
                results[prompt.row] = prompt.result(kept, num_layers, seconds)
        return results
