"""One step, seen by the sieve: which rows are sieved, finish their prompt, or are observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvsieve.core.pruning import PrunedPrompt
from kvsieve.engine.observer import Observation, Observer
from kvsieve.engine.requests import PlannedRequests, Tier
from kvsieve.engine.rows import StepRows


@dataclass(frozen=True)
class SievedView:
    """How the rows of a step look to the attention kernel of a sieved group.

    Attributes:
        start: [num_rows] int64, first position that the row still holds: the sieve's
            start for rows past their prompt, 0 for rows still in it.
        finishing: Indices of the rows whose prompt ends in this step and is scored.
        planned: [num_rows] int64, where each row's kept region starts or would start.
    """

    start: np.ndarray
    finishing: np.ndarray
    planned: np.ndarray

    @property
    def is_stock(self) -> bool:
        """Whether no row is shifted, so that the kernel sees what stock shows it."""
        return not self.start.any()


def sieved_view(spec: Tier, rows: StepRows, requests: PlannedRequests) -> SievedView:
    """The view of a sieved spec on the rows of a step.

    The rule has no state: a row is compacted exactly if its whole prompt was in the
    cache before the step. It therefore survives preemption and moves between rows.
    """
    tier = requests.tiers.index(spec)
    plans = [requests[request_id] for request_id in rows.request_ids]
    starts = np.array([plan.starts[tier] for plan in plans], dtype=np.int64)
    planned = np.array([plan.planned[tier] for plan in plans], dtype=np.int64)
    past_prompt = rows.num_computed >= rows.prompt_lens
    ends_prompt = ~past_prompt & (rows.num_computed + rows.query_lens >= rows.prompt_lens)
    return SievedView(
        start=np.where(past_prompt, starts, 0),
        finishing=np.nonzero(ends_prompt & (planned > 0))[0],
        planned=planned,
    )


@dataclass(frozen=True)
class Shift:
    """What the rows of a step lose in the groups of a spec.

    Attributes:
        columns: [num_rows, num_columns] int64, the columns of a block table that are left
            of each row (past a row's end: any valid one); None if no row loses anything.
        seq_lens: [num_rows] int32, what is left of each row's length, on the device.
        seq_lens_cpu_upper_bound: The same on the host, if the runner gives it.
        max_seq_len: The longest row that is left.
    """

    columns: torch.Tensor | None
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None
    max_seq_len: int

    def block_table(self, block_table: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_columns] int32, each row of a block table without its first blocks."""
        if self.columns is None:
            return block_table
        return block_table.gather(1, self.columns)


@dataclass(frozen=True)
class SeenRows:
    """What the layers see of a step, in the token rows that they are given.

    Attributes:
        rows: The rows, numbered as in the step; one without tokens is not there.
        observation: Which query rows the layers copy; None if there are none.
        being_read: The observed rows that have tokens of their prompt here, and how many.
    """

    rows: StepRows
    observation: Observation | None
    being_read: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class GroupStep:
    """What a cache group's metadata is built from in a step.

    Attributes:
        builder: The group's metadata builder.
        common: The step's metadata for the group, unshifted.
        block_size: Block size of the kernel's block tables, in tokens.
    """

    builder: Any
    common: CommonAttentionMetadata
    block_size: int


@dataclass(frozen=True)
class PrunedRow:
    """A prompt that was pruned in the step.

    Attributes:
        report: What was done.
        first_layer: The first layer that holds the kept tokens only.
        positions: [num_keep] int64, the kept positions; None if none was pruned.
    """

    report: PrunedPrompt
    first_layer: int
    positions: torch.Tensor | None


@dataclass
class Step:
    """What is computed once per step and shared by all groups of sieved layers.

    Attributes:
        requests: The worker's plans.
        rows: The step's rows; None until the first metadata is built.
        views: View per sieved spec.
        observation: Which query rows the layers copy; None if there are none.
        groups: Per cache group (keyed by its first layer), what its metadata is built from.
        pruned_rows: What the layers see once prompts were pruned; None before.
        pruned: What was done to the prompts that the step pruned, by row.
        shifts: What the rows lose, by spec and kernel block size.
        metadata: Attention metadata already built in this step, by spec and builder.
    """

    requests: PlannedRequests
    rows: StepRows | None = None
    views: dict[Tier, SievedView] = field(default_factory=dict)
    observation: Observation | None = None
    groups: dict[str, GroupStep] = field(default_factory=dict)
    pruned_rows: SeenRows | None = None
    pruned: dict[int, PrunedRow] = field(default_factory=dict)
    shifts: dict[tuple[Tier, int], Shift] = field(default_factory=dict)
    metadata: dict[Any, Any] = field(default_factory=dict)

    def view(self, spec: Tier) -> SievedView:
        """The view of a spec, made on first use."""
        view = self.views.get(spec)
        if view is None:
            assert self.rows is not None
            view = self.views[spec] = sieved_view(spec, self.rows, self.requests)
        return view

    def shift(self, spec: Tier, common: CommonAttentionMetadata, block_size: int) -> Shift:
        """What the rows lose in the groups of a spec, made on first use."""
        key = (spec, block_size)
        shift = self.shifts.get(key)
        if shift is None:
            shift = self.shifts[key] = row_shift(self.view(spec), common, block_size)
        return shift

    def observe(self, observer: Observer) -> None:
        """Decide which of the step's queries belong to an observation window."""
        assert self.rows is not None
        self.observation = observer.plan(self.rows, self.observed)

    @cached_property
    def observed(self) -> np.ndarray:
        """[num_rows] bool, whether the row's prompt is (or was) scored when it ends."""
        planned = [self.view(spec).planned > 0 for spec in self.requests.tiers]
        return np.asarray(np.logical_or.reduce(planned))

    @property
    def seen(self) -> SeenRows:
        """What the layers that run now see of the step."""
        return self.pruned_rows or self._all_rows

    @cached_property
    def _all_rows(self) -> SeenRows:
        assert self.rows is not None
        return SeenRows(self.rows, self.observation, self.being_read)

    @cached_property
    def being_read(self) -> list[tuple[int, int]]:
        """The observed rows that have tokens of their prompt in the step, and how many."""
        assert self.rows is not None
        rows = self.rows
        in_prompt = np.minimum(rows.query_lens, rows.prompt_lens - rows.num_computed)
        return [
            (row, int(in_prompt[row]))
            for row in np.nonzero(self.observed & (in_prompt > 0))[0].tolist()
        ]


def row_shift(view: SievedView, common: CommonAttentionMetadata, block_size: int) -> Shift:
    """What the rows of a step lose in the groups of a view.

    Args:
        view: The view; rows of padding are not in it and lose nothing.
        common: The step's metadata; only lengths are read.
        block_size: Block size of the kernel's block tables, in tokens.
    """
    upper_bound = common.seq_lens_cpu_upper_bound
    if view.is_stock:
        return Shift(None, common.seq_lens, upper_bound, common.max_seq_len)
    tokens = torch.zeros(common.num_reqs, dtype=torch.int32)
    tokens[: len(view.start)] = torch.from_numpy(view.start)
    max_seq_len = common.max_seq_len
    if upper_bound is not None:
        upper_bound = upper_bound - tokens
        max_seq_len = int(upper_bound.max())
    tokens = tokens.to(common.seq_lens.device)
    width = common.block_table_tensor.shape[1]
    num_columns = min(-(-max_seq_len // block_size), width)
    columns = torch.arange(num_columns, device=tokens.device)
    return Shift(
        columns=(columns + (tokens // block_size)[:, None]).clamp_(max=width - 1),
        seq_lens=common.seq_lens - tokens,
        seq_lens_cpu_upper_bound=upper_bound,
        max_seq_len=max_seq_len,
    )


def shifted_metadata(common: CommonAttentionMetadata, shift: Shift) -> CommonAttentionMetadata:
    """The step's metadata as the attention kernel of a sieved group must see it.

    A compacted row loses its leading blocks and as many tokens of its length; nothing
    else changes, because what is left lies at its own positions.
    """
    if shift.columns is None:
        return common
    return common.replace(
        seq_lens=shift.seq_lens,
        seq_lens_cpu_upper_bound=shift.seq_lens_cpu_upper_bound,
        max_seq_len=shift.max_seq_len,
        block_table_tensor=shift.block_table(common.block_table_tensor),
        _num_computed_tokens_cache=None,
    )
