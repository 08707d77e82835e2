"""StreamingLLM (Xiao et al. 2023, arXiv 2309.17453) as a sieve of prompts, and chance."""

from __future__ import annotations

from kvsieve.policies.baseline import Ranking
from kvsieve.policies.policy import Policy


def streaming_llm(observation_window: int = 32, num_sink_tokens: int = 4) -> Policy:
    """The first tokens and the last ones.

    Deviations: keys keep their positions in the prompt (the authors number them anew
    within the cache), and what was decoded is never dropped.
    """
    return _without_scores("streaming_llm", "recency", observation_window, num_sink_tokens)


def random_baseline(observation_window: int = 32, num_sink_tokens: int = 4) -> Policy:
    """The first tokens, the window, and chance: what a method must beat."""
    return _without_scores("random", "random", observation_window, num_sink_tokens)


def _without_scores(
    name: str, ranking: Ranking, observation_window: int, num_sink_tokens: int
) -> Policy:
    return Policy(
        name=name,
        score="window_sum",
        observation_window=observation_window,
        head_reduction="mean",
        pooling="max",
        pool_size=1,
        num_sink_tokens=num_sink_tokens,
        ranking=ranking,
    )
