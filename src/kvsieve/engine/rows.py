"""Per-row facts of a step, read from either model runner.

A row is a request's place in the batch of one step. vLLM's two runners keep the same
facts in different places; nothing else in kvsieve knows which runner is at work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from vllm.v1.attention.backend import CommonAttentionMetadata


@dataclass(frozen=True)
class StepRows:
    """The rows of one step, without padding.

    Attributes:
        request_ids: Request of each row.
        prompt_lens: [num_rows] int64, *original* prompt length, also after a preemption.
        num_computed: [num_rows] int64, tokens in the cache before the step.
        query_lens: [num_rows] int64, tokens of the step.
        query_starts: [num_rows] int64, first token of each row in the step's batch.
    """

    request_ids: list[str]
    prompt_lens: np.ndarray
    num_computed: np.ndarray
    query_lens: np.ndarray
    query_starts: np.ndarray


class RowReader(Protocol):
    """Reads the rows of the step whose metadata is being built."""

    def read(self, common: CommonAttentionMetadata) -> StepRows:
        """The rows that `common` describes."""
        ...


def _query_lens(common: CommonAttentionMetadata, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    offsets = common.query_start_loc_cpu[: num_rows + 1].numpy().astype(np.int64)
    return offsets[:-1], np.diff(offsets)


class V1RowReader:
    """Rows of `vllm.v1.worker.gpu_model_runner.GPUModelRunner` and its subclasses."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def read(self, common: CommonAttentionMetadata) -> StepRows:
        """The rows, in the order of the runner's input batch."""
        batch = self.runner.input_batch
        num_rows = batch.num_reqs
        query_starts, query_lens = _query_lens(common, num_rows)
        return StepRows(
            request_ids=batch.req_ids[:num_rows],
            prompt_lens=batch.num_prompt_tokens_cpu_tensor[:num_rows].numpy().astype(np.int64),
            num_computed=batch.num_computed_tokens_cpu_tensor[:num_rows].numpy().astype(np.int64),
            query_lens=query_lens,
            query_starts=query_starts,
        )


class V2RowReader:
    """Rows of `vllm.v1.worker.gpu.model_runner.GPUModelRunner` and its subclasses."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def read(self, common: CommonAttentionMetadata) -> StepRows:
        """The rows, in the order of the step's metadata."""
        states = self.runner.req_states
        index = common.req_idx
        assert index is not None, "Model Runner V2 always names the request of each row"
        num_rows = len(index)
        query_starts, query_lens = _query_lens(common, num_rows)
        assert common.seq_lens_cpu_upper_bound is not None
        # Exact without speculative decoding, which is refused at start.
        seq_lens = common.seq_lens_cpu_upper_bound[:num_rows].numpy().astype(np.int64)
        return StepRows(
            request_ids=[states.index_to_req_id[i] for i in index.tolist()],
            # `prefill_len` would count output tokens after a preemption.
            prompt_lens=states.prompt_len.np[index].astype(np.int64),
            num_computed=seq_lens - query_lens,
            query_lens=query_lens,
            query_starts=query_starts,
        )


def row_reader(runner: Any, is_v2: bool) -> RowReader:
    """The reader for the worker's model runner."""
    return V2RowReader(runner) if is_v2 else V1RowReader(runner)
