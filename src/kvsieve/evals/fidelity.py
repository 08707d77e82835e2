"""How far a distribution is from that of full KV, token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvsieve.serving.client import TokenLogprobs

TOP = 20
"""Most probable tokens that are asked for; vLLM's default for `max_logprobs`."""

_VLLMS_MINUS_INFINITY = -9999.0
"""What vLLM's API says instead of minus infinity, which JSON cannot carry."""

_ROUNDING = 1e-3


@dataclass(frozen=True)
class Fidelity:
    """A forced text under one setting, against full KV.

    Attributes:
        nll: Mean negative log-probability of the text's tokens, natural; its exp is the
            perplexity.
        kl: Mean Kullback-Leibler divergence from full KV, in nats: a lower bound, see `kl`.
        agreement: Share of tokens where both settings have the same most probable token.
        accuracy: Share of tokens where the most probable token is the text's.
    """

    nll: float
    kl: float
    agreement: float
    accuracy: float


def compare(full: Sequence[TokenLogprobs], other: Sequence[TokenLogprobs]) -> Fidelity:
    """Compare two runs over the same forced text.

    Raises:
        ValueError: They are not over the same text.
    """
    if [step.token_id for step in full] != [step.token_id for step in other] or not full:
        raise ValueError("the two runs did not say the same tokens")
    count = len(full)
    return Fidelity(
        nll=-sum(step.logprob for step in other) / count,
        kl=sum(kl(p.top, q.top) for p, q in zip(full, other, strict=True)) / count,
        agreement=sum(best(p) == best(q) for p, q in zip(full, other, strict=True)) / count,
        accuracy=sum(best(step) == step.token_id for step in other) / count,
    )


def is_the_models_own(step: TokenLogprobs) -> bool:
    """Whether these are the log-probabilities of the model's distribution, whole.

    With another `logprobs_mode` than vLLM's default the server reports scores that are no
    log-probabilities, or what the forcing has made of them: nothing but the forced token.
    """
    values = step.top.values()
    return max(values) <= _ROUNDING < sum(map(math.exp, values)) <= 1 + _ROUNDING and (
        len(values) == 1 or min(values) > _VLLMS_MINUS_INFINITY
    )


def best(step: TokenLogprobs) -> int:
    """The most probable token; of equals, the one with the lower id."""
    return min(step.top, key=lambda token: (-step.top[token], token))


def kl(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """A lower bound of KL(p || q) from the most probable tokens of both, in nats.

    Tokens that both list are compared one by one, and all others as one event. Merging
    outcomes cannot raise the divergence (data-processing inequality), so the true one is at
    least this; and it is close, because 20 tokens hold nearly all of the mass.

    Args:
        p: Log-probabilities by token, of the distribution that is right.
        q: Those of the other.
    """
    common = p.keys() & q.keys()
    divergence = sum(math.exp(p[token]) * (p[token] - q[token]) for token in common)
    rest_p = max(0.0, 1.0 - sum(math.exp(p[token]) for token in common))
    rest_q = max(0.0, 1.0 - sum(math.exp(q[token]) for token in common))
    if rest_p > 0:
        # The rest of q cannot be 0 where q is a softmax; rounding may make it so.
        divergence += rest_p * math.log(rest_p / max(rest_q, 1e-9))
    return max(0.0, divergence)
