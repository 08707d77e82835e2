"""Proof that a sieved arm sieved, from its responses; without it there is no ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsieve.bench.errors import BenchError
from kvsieve.bench.schema import SieveProof
from kvsieve.core.budget import sieve_start
from kvsieve.policies import parse_settings

UNKNOWN_BLOCK_SIZE = 128
"""Taken where the server does not tell: the largest in use, so that no alarm is false."""


def prove(
    settings: Mapping[str, Any] | None,
    block_size: int | None,
    answers: Sequence[tuple[int, Mapping[str, Any] | None]],
) -> SieveProof | None:
    """Check what the responses of one run say, and sum it up.

    What should have been sieved is computed from the arm's settings and the prompts' lengths,
    and not read from the responses.

    Args:
        settings: Settings of the arm; None for stock vLLM.
        block_size: Tokens of a block of its server; None if not known.
        answers: Prompt length in tokens and report of each response.

    Returns:
        The sums; None for stock vLLM.

    Raises:
        BenchError: A response of stock has a report, or one of a sieved arm has none; or
            prompts are longer than their budget, and none of them was sieved; or sieved prompts
            were to be pruned, and none was.
    """
    with_report = sum(report is not None for _, report in answers)
    if settings is None:
        if with_report:
            raise BenchError(
                f"{with_report} responses of the stock server carry a report of the sieve, so it"
                " is not stock: is there an --additional-config in a file given with --config?"
            )
        return None
    if with_report < len(answers):
        raise BenchError(
            f"{len(answers) - with_report} of {len(answers)} responses carry no report of the"
            " sieve, so nothing shows that it ran"
        )
    config = parse_settings(settings)
    size = block_size or UNKNOWN_BLOCK_SIZE
    rule = config.budget_rule(block_size) if block_size else config.budget_rule(1)
    expected = sum(sieve_start(length, rule.tokens_for(length), size) > 0 for length, _ in answers)
    if config.mode != "sieve":
        expected = 0
    sieved = [report for _, report in answers if report is not None and report["sieved"]]
    if expected and not sieved:
        raise BenchError(
            f"{expected} of {len(answers)} prompts are longer than the budget of {rule}, and none"
            " was sieved: what was measured is not the sieve, so there is no ratio"
        )
    unpruned = [report["not_pruned"] for report in sieved if report.get("not_pruned")]
    if unpruned and not any(report["pruned"] for report in sieved):
        raise BenchError(
            f"{len(unpruned)} of {len(answers)} prompts were to be pruned ({config.prune}), and"
            f" none was: {unpruned[0]}; what was measured is not pruning, so there is no ratio"
        )
    return SieveProof(
        requests=len(answers),
        expected=expected,
        sieved=len(sieved),
        prompt_tokens=sum(report["prompt_tokens"] for report in sieved),
        kept_tokens=sum(report["stored_tokens"]["sieved"] for report in sieved),
        blocks_freed=sum(report["blocks_freed"] for report in sieved),
    )
