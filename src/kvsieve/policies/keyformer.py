"""Keyformer (Adnan et al. 2024, arXiv 2403.09054), for prompts."""

from __future__ import annotations

from functools import lru_cache

import torch

from kvsieve.core.config import SieveConfig
from kvsieve.policies.attention_sums import AttentionSums, accumulated_attention
from kvsieve.policies.evidence import Chunk
from kvsieve.policies.method import Method
from kvsieve.policies.options import read_count, read_number
from kvsieve.policies.policy import Policy
from kvsieve.policies.reduce import sum_of_group

OPTIONS = {"temperature": 1.0, "seed": 0}

RECENT_SHARE = 0.3
"""Share of the budget that goes to the last tokens. In the authors' runs the cache is 60 % of the
prompt, and 30 % of the cache are its last tokens."""

NOISE_BLOCK = 1024
"""Positions whose noise comes from one generator."""

MAX_BLOCKS = 2**20
"""More blocks than any prompt has."""

MAX_SEED = 2**12 - 1

COLDEST = 0.1
"""A logit that is 9 below a query's best already counts for nothing in float32; below, ever fewer
tokens have a score, and in the end logits leave the range."""

HOTTEST = 1e9
"""All tokens then have the same weight in float32, and more would change nothing."""

SMALLEST_UNIFORM = 2.0**-25
"""Half of the smallest float32 step of torch's uniform numbers: a 0 has no finite noise."""


@lru_cache(maxsize=256)
def _noise_block(seed: int, block: int, num_heads: int) -> torch.Tensor:
    """Noise of a block of positions, [num_heads, NOISE_BLOCK] float32 on the CPU; not to change."""
    # Below 2**32: torch's generator for the CPU ignores the other bits.
    generator = torch.Generator().manual_seed(seed * MAX_BLOCKS + block)
    uniform = torch.rand((num_heads, NOISE_BLOCK), generator=generator)
    return -(-uniform.clamp_(min=SMALLEST_UNIFORM).log()).log()


def gumbel_noise(seed: int, num_heads: int, num_positions: int) -> torch.Tensor:
    """Gumbel(0, 1) noise of the first positions, one number per query head and position.

    A position's noise depends on seed, head and position alone: not on how the prompt is cut
    into chunks, on its length, on the layer or the run.

    Returns:
        [num_heads, num_positions] float32, on the CPU.
    """
    blocks = -(-num_positions // NOISE_BLOCK)
    noise = [_noise_block(seed, block, num_heads) for block in range(blocks)]
    return torch.cat(noise, dim=1)[:, :num_positions]


def build(config: SieveConfig) -> Policy:
    """H2O with noise on the logits: tokens that were nearly seen get their chance.

    Options:
        temperature: What noisy logits are divided by. The authors begin at 1.0, the value
            for the prompt, and raise it to 2.0 over the answer. In [0.1, 1e9].
        seed: Of the noise, at most 4095.

    Deviations: the authors draw new noise for every query and in every run; ours is fixed per
    query head and position, so that a prompt's result can be repeated and does not depend on how
    the prompt is scheduled. The choice is made once, when the prompt was read. The heads of a
    group are summed (their models have no query groups).
    """
    temperature = read_number(config, OPTIONS, "temperature", at_least=COLDEST, at_most=HOTTEST)
    seed = read_count(config, OPTIONS, "seed", at_most=MAX_SEED)

    def noise(chunk: Chunk) -> torch.Tensor:
        heads = (chunk.num_kv_heads, chunk.num_queries_per_kv)
        flat = gumbel_noise(seed, heads[0] * heads[1], chunk.first + chunk.num_queries)
        return flat.view(*heads, -1).to(chunk.queries().device)

    return Policy.with_settings(
        config,
        accumulated_attention,
        recent_share=RECENT_SHARE,
        reduce=sum_of_group,
        accumulator=AttentionSums(temperature, noise),
    )


KEYFORMER = Method(
    name="keyformer",
    summary="H2O with Gumbel noise on the logits",
    source="arXiv 2403.09054",
    sees_question=False,
    build=build,
    defaults={"num_recent_tokens": 1, "num_sink_tokens": 0, "pool_size": 1},
    options=OPTIONS,
)
