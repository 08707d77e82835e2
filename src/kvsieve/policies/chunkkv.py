"""ChunkKV (Liu et al. 2025, arXiv 2502.00299), over SnapKV."""

from __future__ import annotations

import torch

from kvsieve.core.config import SieveConfig
from kvsieve.policies.evidence import Evidence
from kvsieve.policies.method import Method
from kvsieve.policies.options import read_count
from kvsieve.policies.policy import Policy, Refine
from kvsieve.policies.snapkv import SNAPKV, window_attention

OPTIONS = {"chunk_length": 20}


def rank_by_chunk(scores: torch.Tensor, chunk_length: int) -> torch.Tensor:
    """Rank positions by the mean score of their chunk, and within it by their own.

    Args:
        scores: [n] float32. A number that is none counts in no mean and ranks last of all.
        chunk_length: Positions per chunk, from position 0; the last chunk may be shorter.

    Returns:
        [n] int64: 0 for the worst position; of equals the later one is the better.
    """
    num_positions = scores.shape[0]
    # Longer chunks than the prompt are one chunk, and would only be padded.
    chunk_length = min(chunk_length, max(1, num_positions))
    padding = -num_positions % chunk_length
    chunks = torch.nn.functional.pad(scores, (0, padding), value=float("nan"))
    means = chunks.view(-1, chunk_length).nanmean(dim=1)
    mean = means.repeat_interleave(chunk_length)[:num_positions]
    number = torch.arange(num_positions, device=scores.device) // chunk_length
    broken = scores.isnan()
    # Stable sorts from the least to the most decisive key leave equals in order of position.
    order = scores.argsort(stable=True)
    for key in (number, mean.masked_fill(broken, float("-inf")), ~broken):
        order = order[key[order].argsort(stable=True)]
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(num_positions, device=scores.device)
    return ranks


def whole_chunks(chunk_length: int) -> Refine:
    """Whole chunks, the best first, the same for all heads."""

    def refine(scores: torch.Tensor, evidence: Evidence, num_keep: int) -> torch.Tensor:
        ranks = rank_by_chunk(scores.sum(dim=0), chunk_length)
        # float64 holds every rank exactly, float32 only those of 16 million positions.
        return ranks.double().expand(scores.shape[0], -1)

    return refine


def build(config: SieveConfig) -> Policy:
    """SnapKV's scores, summed over heads; chunks of tokens are kept whole, by their mean.

    Options:
        chunk_length: Tokens per chunk, counted from the start of the prompt.

    Deviations: exactly the budget is kept (theirs keeps a number of chunks): of the last chunk
    that has room, the tokens of the highest scores. Chunks end before the recent tokens, which
    are always kept; what remains there is a chunk of its own, with its own mean (kvpress counts
    recent tokens into chunks, with a score above all others). Sinks and protected spans are
    forced token by token. With tensor parallelism each worker sums over its own heads.
    """
    chunk_length = read_count(config, OPTIONS, "chunk_length", at_least=1)
    return Policy.with_settings(config, window_attention, refine=whole_chunks(chunk_length))


CHUNKKV = Method(
    name="chunkkv",
    summary="SnapKV's scores, whole chunks of tokens, the same for all heads",
    source="arXiv 2502.00299",
    sees_question=True,
    build=build,
    defaults=SNAPKV.defaults,
    options=OPTIONS,
)
