"""H2O, heavy-hitter oracle (Zhang et al. 2023, arXiv 2306.14048), for prompts."""

from __future__ import annotations

from kvsieve.core.config import SieveConfig
from kvsieve.policies.attention_sums import AttentionSums, accumulated_attention
from kvsieve.policies.method import Method
from kvsieve.policies.policy import Policy
from kvsieve.policies.reduce import sum_of_group

RECENT_SHARE = 0.5
"""Share of the budget that goes to the last tokens: theirs are equal halves."""


def build(config: SieveConfig) -> Policy:
    """The attention of all of the prompt's queries, summed; half of what is kept is the end.

    Deviations: the choice is made once, when the prompt was read (theirs evicts a token in every
    step of decoding). The heads of a group are summed (their code has no query groups). As with
    theirs, early tokens gain from being seen by more queries.
    """
    return Policy.with_settings(
        config,
        accumulated_attention,
        recent_share=RECENT_SHARE,
        reduce=sum_of_group,
        accumulator=AttentionSums(),
    )


H2O = Method(
    name="h2o",
    summary="Attention of all queries, and half of the budget for the last tokens",
    source="arXiv 2306.14048",
    sees_question=False,
    build=build,
    defaults={"num_recent_tokens": 1, "num_sink_tokens": 0, "pool_size": 1},
)
