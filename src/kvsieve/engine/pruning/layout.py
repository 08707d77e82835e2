"""Which token rows the layers of a step see once prompts were pruned.

A step begins with every row's tokens, one after the other. A layout picks some of them: all of most
rows, the kept ones of a pruned prompt, none of a row that has nothing to do. Two gathers belong to
it. A kept token has its own position, for rotary embedding; it is stored in the slots of the tail
region `[start, P)` of its prompt, in order, where decoding expects what the sieve has left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
        start: Where the tail region begins: prompt length less `num_keep`.
        is_moved: Whether rotary embedding, too, takes the positions of the tail region, because
            the tokens are read again as a text of their own.
    """

    positions: torch.Tensor
    start: int
    is_moved: bool = False


@dataclass(frozen=True)
class Layout:
    """The token rows that layers see from some layer on.

    Attributes:
        rows: Rows of the step that still have tokens, by their number in the step.
        query_lens: [len(rows)] int64, tokens of each.
        kept: What goes on of the pruned rows, by row number.
        tokens: [n] int64, token rows of the step, in the order in which the layers see them.
        slots: [n] int64, token rows of the step in whose slots their keys and values go.
        places: [n] int64, token rows of the step at whose positions they are.
    """

    rows: tuple[int, ...]
    query_lens: np.ndarray
    kept: Mapping[int, Kept]
    tokens: torch.Tensor
    slots: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(
        cls,
        step: StepRows,
        kept: Mapping[int, Kept],
        device: torch.device,
        only: frozenset[int] | None = None,
    ) -> Layout:
        """The layout of a step whose rows were pruned as said.

        Args:
            step: The step's rows.
            kept: What goes on of the pruned rows, which the step reads from their first token.
            device: Where the model's tensors are.
            only: Rows that go on at all; None for all.
        """
        tokens, slots, places, query_lens, rows = [], [], [], [], []
        for row, (begin, count) in enumerate(
            zip(step.query_starts.tolist(), step.query_lens.tolist(), strict=True)
        ):
            if not count or (only is not None and row not in only):
                continue
            rows.append(row)
            every = torch.arange(begin, begin + count, device=device)
            pruned = kept.get(row)
            if pruned is None:
                tokens.append(every)
                slots.append(every)
                places.append(every)
            else:
                own = pruned.positions + begin
                tail = every[pruned.start :]
                tokens.append(own)
                slots.append(tail)
                places.append(tail if pruned.is_moved else own)
            query_lens.append(len(tokens[-1]))
        return cls(
            rows=tuple(rows),
            query_lens=np.array(query_lens, dtype=np.int64),
            kept=dict(kept),
            tokens=torch.cat(tokens),
            slots=torch.cat(slots),
            places=torch.cat(places),
        )

    @property
    def query_starts(self) -> np.ndarray:
        """[len(rows)] int64, first token row of each row."""
        return np.cumsum(self.query_lens) - self.query_lens

    def from_earlier(self, earlier: Layout | None, num_tokens: int) -> torch.Tensor:
        """[n] int64, where an earlier layout, or the step itself, has this one's token rows.

        Args:
            earlier: The layout before; it has all rows and tokens that this one has.
            num_tokens: Token rows of the step.
        """
        if earlier is None:
            return self.tokens
        where = torch.empty(num_tokens, dtype=torch.int64, device=self.tokens.device)
        # A token that is read again appears once, so its row says which one it is.
        where[earlier.tokens] = torch.arange(len(earlier.tokens), device=where.device)
        return where[self.tokens]

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
        device = self.tokens.device
        where = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        where[self.tokens] = torch.arange(len(self.tokens), device=device)
        starts = self.query_starts.tolist()
        for row, start, count in zip(self.rows, starts, self.query_lens.tolist(), strict=True):
            if row in self.kept:
                where[self.tokens[start : start + count]] = -1
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
            positions=None if common.positions is None else common.positions[self.places],
            is_prefilling=None if common.is_prefilling is None else common.is_prefilling[cpu_rows],
            req_idx=None if common.req_idx is None else common.req_idx[list(self.rows)],
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
