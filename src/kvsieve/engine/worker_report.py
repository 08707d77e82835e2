"""The channel from the worker, where rows move, to the scheduler.

Counts ride on the step's `ModelRunnerOutput` as one extra attribute. vLLM carries
that object from the worker to the engine core by reference or by pickle; both keep
instance attributes.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from kvsieve.core.pruning import PrunedPrompt
from kvsieve.core.report import LayersStored
from kvsieve.core.treatment import Mode

_ATTRIBUTE = "kvsieve_rows"


@dataclass(frozen=True)
class SievedRow:
    """What the worker did to one request in the step that finished its prompt.

    Attributes:
        mode: "sieve" if rows were moved, "shadow" if the prompt was only scored.
        prompt_tokens: Length of the original prompt, in tokens.
        stored_tokens: Prompt tokens that each of `layers` holds (or would), per KV head.
        layers: Numbers of the layers that were compacted (or scored). A sieved layer whose
            budget is beyond the prompt is not among them: it holds everything.
        scored_layers: Those whose tokens were scored after the model call. A layer beyond the one
            where a prompt was pruned never had the others.
        mass_lost: Share of the window's attention to what was dropped, per scored layer.
        seconds: Host time of scoring and compaction, in seconds.
        pruned: What pruning did while the prompt was read.
    """

    mode: Mode
    prompt_tokens: int
    stored_tokens: tuple[int, ...]
    layers: tuple[int, ...]
    scored_layers: tuple[int, ...]
    mass_lost: tuple[float, ...]
    seconds: float
    pruned: PrunedPrompt | None = None

    @property
    def stored(self) -> LayersStored:
        """The counts of the sieved layers, those that hold everything included."""
        counted = dict(zip(self.layers, self.stored_tokens, strict=True))
        return LayersStored(self.prompt_tokens, counted)


class _AsyncOutputWithRows(AsyncModelRunnerOutput):
    def __init__(self, inner: AsyncModelRunnerOutput, rows: dict[str, SievedRow]) -> None:
        self._inner = inner
        self._rows = rows

    def get_output(self) -> ModelRunnerOutput:
        output = self._inner.get_output()
        setattr(output, _ATTRIBUTE, self._rows)
        return output


def attach_rows(
    output: ModelRunnerOutput | AsyncModelRunnerOutput, rows: dict[str, SievedRow]
) -> ModelRunnerOutput | AsyncModelRunnerOutput:
    """The step's output, carrying the counts of the rows sieved in it."""
    if isinstance(output, AsyncModelRunnerOutput):
        return _AsyncOutputWithRows(output, rows)
    setattr(output, _ATTRIBUTE, rows)
    return output


def take_rows(output: ModelRunnerOutput) -> dict[str, SievedRow]:
    """The counts that the step's output carries, by request id; empty if none."""
    return getattr(output, _ATTRIBUTE, {})
