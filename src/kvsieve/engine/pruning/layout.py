"""Which token rows the layers of a step see once prompts were pruned.

A step begins with every row's tokens, one after the other. A layout has all tokens of most rows,
the kept ones of a pruned prompt, none of a row that has nothing to do. A kept token has its own
position for rotary embedding, and is stored in the slots of the tail region `[start, P)` of its
prompt, in order, where decoding expects what the sieve has left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvsieve.engine.observer import Observation
from kvsieve.engine.rows import StepRows


@dataclass(frozen=True)
class Kept:
    """The tokens of a pruned row that go on.

    Attributes:
        positions: [num_keep] int64, their positions in the prompt, ascending.
        is_moved: Whether rotary embedding, too, takes the positions of the tail region, because
            the tokens are read again as a text of their own.
    """

    positions: torch.Tensor
    is_moved: bool = False


@dataclass(frozen=True)
class Layout:
    """The token rows that layers see from some layer on.

    Attributes:
        rows: Rows of the step that still have tokens, by their number in the step.
        query_lens: [len(rows)] int64, tokens of each.
        kept: What goes on of the pruned rows, by row number.
        slots: [n] int64, for each token row the one of the step in whose slot its key and value
            go. Rows that are not pruned keep their own.
        positions: [n] int64, for rotary embedding.
    """

    rows: tuple[int, ...]
    query_lens: np.ndarray
    kept: Mapping[int, Kept]
    slots: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(
        cls,
        step: StepRows,
        positions: torch.Tensor,
        kept: Mapping[int, Kept],
        gone: Set[int] = frozenset(),
    ) -> Layout | None:
        """The layout of a step whose rows were pruned as said.

        Args:
            step: The step's rows.
            positions: [num_tokens] int64, positions of the step's token rows.
            kept: What goes on of the pruned rows. Their prompts end in the step, of which each
                has at least as many tokens as go on.
            gone: Rows of which nothing goes on.

        Returns:
            The layout; None if nothing is left.
        """
        slots, places, query_lens, rows = [], [], [], []
        for row, (begin, count) in enumerate(
            zip(step.query_starts.tolist(), step.query_lens.tolist(), strict=True)
        ):
            if not count or row in gone:
                continue
            rows.append(row)
            pruned = kept.get(row)
            end = begin + count
            if pruned is not None:
                begin = end - len(pruned.positions)
            slots.append(torch.arange(begin, end, device=positions.device))
            own = positions[begin:end]
            places.append(own if pruned is None or pruned.is_moved else pruned.positions)
            query_lens.append(end - begin)
        if not rows:
            return None
        return cls(
            rows=tuple(rows),
            query_lens=np.array(query_lens, dtype=np.int64),
            kept=dict(kept),
            slots=torch.cat(slots),
            positions=torch.cat(places),
        )

    def range_of(self, row: int) -> tuple[int, int]:
        """First and last (excluded) token row that a row of the step has here."""
        index = self.rows.index(row)
        begin = int(self.query_starts[index])
        return begin, begin + int(self.query_lens[index])

    @property
    def query_starts(self) -> np.ndarray:
        """[len(rows)] int64, first token row of each row."""
        return np.cumsum(self.query_lens) - self.query_lens

    def step_rows(self, step: StepRows) -> StepRows:
        """A step's rows, numbered as before, with the token rows that they have here."""
        query_lens = np.zeros_like(step.query_lens)
        query_starts = np.zeros_like(step.query_starts)
        query_lens[list(self.rows)] = self.query_lens
        query_starts[list(self.rows)] = self.query_starts
        return dataclasses.replace(step, query_lens=query_lens, query_starts=query_starts)

    def observation(self, whole: Observation | None, num_tokens: int) -> Observation | None:
        """What is left to observe of a step's windows, in token rows of this layout.

        Pruned rows are not observed: their window was, in the layers before.

        Args:
            whole: The step's observation.
            num_tokens: Token rows of the step.
        """
        if whole is None:
            return None
        device = self.slots.device
        where = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        where[self.slots] = torch.arange(len(self.slots), device=device)
        starts = self.query_starts.tolist()
        for row, start, count in zip(self.rows, starts, self.query_lens.tolist(), strict=True):
            if row in self.kept:
                where[self.slots[start : start + count]] = -1
        source = where[whole.source]
        is_there = source >= 0
        if not is_there.any():
            return None
        return Observation(source=source[is_there], target=whole.target[is_there])

    def metadata(
        self, common: CommonAttentionMetadata, starts: np.ndarray, block_size: int
    ) -> CommonAttentionMetadata:
        """The step's metadata as the attention of a group must see it under this layout.

        Args:
            common: The group's metadata for the whole step.
            starts: [num_rows of the step] int64, the first position that each row's table still
                holds, a multiple of the block size; of pruned rows their tail region's.
            block_size: Block size of the kernel's block tables, in tokens.
        """
        device = common.query_start_loc.device
        rows = torch.tensor(self.rows, device=device)
        dtype = common.query_start_loc_cpu.dtype
        bounds = np.concatenate([[0], np.cumsum(self.query_lens)])
        query_start_loc_cpu = torch.from_numpy(bounds).to(dtype)
        shift = torch.from_numpy(starts[list(self.rows)]).to(torch.int32)
        seq_lens = common.seq_lens[rows] - shift.to(device)
        upper = common.seq_lens_cpu_upper_bound
        cpu_rows = torch.tensor(self.rows)
        if upper is not None:
            upper = upper[cpu_rows] - shift
        max_seq_len = int(upper.max()) if upper is not None else common.max_seq_len
        width = common.block_table_tensor.shape[1]
        columns = torch.arange(min(-(-max_seq_len // block_size), width), device=device)
        columns = (columns + (shift.to(device) // block_size)[:, None]).clamp_(max=width - 1)
        return common.replace(
            query_start_loc=query_start_loc_cpu.to(device),
            query_start_loc_cpu=query_start_loc_cpu,
            seq_lens=seq_lens,
            num_reqs=len(self.rows),
            num_actual_tokens=int(bounds[-1]),
            max_query_len=int(self.query_lens.max()),
            max_seq_len=max_seq_len,
            block_table_tensor=common.block_table_tensor[rows].gather(1, columns),
            slot_mapping=common.slot_mapping[self.slots],
            seq_lens_cpu_upper_bound=upper,
            positions=None if common.positions is None else self.positions,
            is_prefilling=None if common.is_prefilling is None else common.is_prefilling[cpu_rows],
            req_idx=None if common.req_idx is None else common.req_idx[list(self.rows)],
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
