"""One step, seen by the sieve: which rows are sieved, finish their prompt, or are observed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvsieve.engine.observer import Observation, Observer
from kvsieve.engine.rows import StepRows
from kvsieve.engine.spec import SievedAttentionSpec


@dataclass(frozen=True)
class SievedView:
    """How the rows of a step look to the attention kernel of a sieved group.

    Attributes:
        start: [num_rows] int64, first position that the row still holds: the sieve's
            start for rows past their prompt, 0 for rows still in it.
        finishing: Indices of the rows whose prompt ends in this step and is sieved.
        prompt_starts: [num_rows] int64, the sieve's start of each row's prompt.
    """

    start: np.ndarray
    finishing: np.ndarray
    prompt_starts: np.ndarray

    @property
    def is_stock(self) -> bool:
        """Whether no row is shifted, so that the kernel sees what stock shows it."""
        return not self.start.any()


def sieved_view(spec: SievedAttentionSpec, rows: StepRows) -> SievedView:
    """The view of a sieved spec on the rows of a step.

    The rule has no state: a row is compacted exactly if its whole prompt was in the
    cache before the step. It therefore survives preemption and moves between rows.
    """
    starts = np.fromiter(
        (spec.start(prompt) for prompt in rows.prompt_lens.tolist()),
        dtype=np.int64,
        count=len(rows.prompt_lens),
    )
    past_prompt = rows.num_computed >= rows.prompt_lens
    ends_prompt = ~past_prompt & (rows.num_computed + rows.query_lens >= rows.prompt_lens)
    return SievedView(
        start=np.where(past_prompt, starts, 0),
        finishing=np.nonzero(ends_prompt & (starts > 0))[0],
        prompt_starts=starts,
    )


@dataclass
class Step:
    """What is computed once per step and shared by all groups of sieved layers.

    Attributes:
        rows: The step's rows; None until the first metadata is built.
        views: View per sieved spec.
        observation: Which query rows the layers copy; None if there are none.
        block_tables: Per cache group (keyed by its first layer), the unshifted block
            table of the step, [num_rows, max_blocks] int32, and the kernel's block size.
        metadata: Attention metadata already built in this step, by view and builder.
    """

    rows: StepRows | None = None
    views: dict[SievedAttentionSpec, SievedView] = field(default_factory=dict)
    observation: Observation | None = None
    block_tables: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    metadata: dict[Any, Any] = field(default_factory=dict)

    def view(self, spec: SievedAttentionSpec) -> SievedView:
        """The view of a spec, made on first use."""
        view = self.views.get(spec)
        if view is None:
            assert self.rows is not None
            view = self.views[spec] = sieved_view(spec, self.rows)
        return view

    def observe(self, observer: Observer, specs: tuple[SievedAttentionSpec, ...]) -> None:
        """Decide which of the step's queries belong to an observation window."""
        assert self.rows is not None
        sieved = np.logical_or.reduce([self.view(spec).prompt_starts > 0 for spec in specs])
        self.observation = observer.plan(self.rows, sieved)


def shifted_metadata(
    common: CommonAttentionMetadata, view: SievedView, block_size: int
) -> CommonAttentionMetadata:
    """The step's metadata as the attention kernel of a sieved group must see it.

    A compacted row loses its leading blocks and as many tokens of its length; nothing
    else changes, because what is left lies at its own positions.

    Args:
        common: The step's metadata with the group's own block table.
        view: The group's view; rows of padding are not in it and stay as they are.
        block_size: Block size of `common.block_table_tensor`, in tokens.
    """
    if view.is_stock:
        return common
    device = common.seq_lens.device
    num_rows = len(view.start)
    shift = torch.zeros(common.num_reqs, dtype=torch.int64)
    shift[:num_rows] = torch.from_numpy(view.start)
    upper_bound = common.seq_lens_cpu_upper_bound
    if upper_bound is not None:
        upper_bound = upper_bound - shift.to(upper_bound.dtype)
        max_seq_len = int(upper_bound.max())
    else:
        max_seq_len = common.max_seq_len
    shift = shift.to(device)
    return common.replace(
        seq_lens=common.seq_lens - shift.to(common.seq_lens.dtype),
        seq_lens_cpu_upper_bound=upper_bound,
        max_seq_len=max_seq_len,
        block_table_tensor=shifted_block_table(
            common.block_table_tensor, shift // block_size, -(-max_seq_len // block_size)
        ),
        _num_computed_tokens_cache=None,
    )


def shifted_block_table(
    block_table: torch.Tensor, shift: torch.Tensor, num_columns: int
) -> torch.Tensor:
    """Each row of a block table without its first blocks.

    Args:
        block_table: [num_rows, max_blocks] int32.
        shift: [num_rows] int64, blocks to leave out.
        num_columns: Columns that the longest row needs.

    Returns:
        [num_rows, num_columns] int32; entries past a row's end are arbitrary valid ones.
    """
    width = block_table.shape[1]
    columns = torch.arange(min(num_columns, width), device=block_table.device)
    return block_table.gather(1, (columns + shift[:, None]).clamp_(max=width - 1))
