"""No number without a green gate: the sieved arm sieves, and equals stock where it must."""

from __future__ import annotations

from typing import Any

from pairing.arm import Arm, BenchmarkError
from pairing.records import RequestRecord
from pairing.workload import Options


def pass_gate(options: Options, stock: Arm, sieved: Arm, budget: int) -> dict[str, Any]:
    """Check a pair of arms before they are timed.

    1. Prompts that fit the budget: token ids equal stock's, and the report says not sieved.
    2. A prompt beyond the budget: the worker stored fewer tokens, and blocks were freed.
    3. Stock reports nothing. No arm leaks a block.

    Returns:
        What was checked, for the record.

    Raises:
        BenchmarkError: A check failed; nothing may be reported of this pair.
    """
    longest = min(budget, 256)
    fits = [options.prompt_ids(length, "gate") for length in (11, longest // 2, longest)]
    beyond = options.prompt_ids(budget + 4 * 32 + 5, "gate")
    outputs = []
    for arm in (stock, sieved):
        arm.call("submit", [*fits, beyond], [16] * 4)
        arm.call("steps")
        outputs.append(arm.call("take_finished"))
        if leaked := arm.call("num_blocks_out"):
            raise BenchmarkError(f"arm {arm.name!r} leaks {leaked} blocks")
    of_stock, of_sieved = outputs
    for one, other in zip(of_stock[:3], of_sieved[:3], strict=True):
        if one.token_ids != other.token_ids:
            raise BenchmarkError(
                f"arm {sieved.name!r} writes other tokens than stock although the prompt fits its"
                f" budget of {budget}: {other.token_ids} instead of {one.token_ids}"
            )
    if any(record.report is not None for record in of_stock):
        raise BenchmarkError(f"arm {stock.name!r} reports a sieve: it is not stock vLLM")
    require_not_sieved(sieved, of_sieved[:3])
    require_sieved(sieved, of_sieved[3:])
    return {"pair": [stock.name, sieved.name], "report": of_sieved[3].report}


def require_sieved(arm: Arm, records: list[RequestRecord]) -> None:
    """Refuse to go on unless every request was sieved.

    Raises:
        BenchmarkError: A request was not.
    """
    for record in records:
        report = record.report
        if (
            report is None
            or not report["sieved"]
            or report["stored_tokens"]["sieved"] >= report["prompt_tokens"]
            or report["dropped_tokens"] <= 0
            or report["blocks_freed"] <= 0
        ):
            raise BenchmarkError(f"arm {arm.name!r} did not sieve {record.request_id}: {report}")


def require_not_sieved(arm: Arm, records: list[RequestRecord]) -> None:
    """Refuse to go on if a request that fits its budget was sieved.

    Raises:
        BenchmarkError: A request was, or there is no report.
    """
    for record in records:
        if record.report is None or record.report["sieved"]:
            raise BenchmarkError(
                f"arm {arm.name!r} should have left {record.request_id} alone: {record.report}"
            )


def require_equal(stock: list[RequestRecord], other: list[RequestRecord], arm: Arm) -> None:
    """Refuse to go on unless both arms wrote the same tokens.

    Raises:
        BenchmarkError: They did not.
    """
    for one, two in zip(stock, other, strict=True):
        if one.token_ids != two.token_ids:
            raise BenchmarkError(
                f"arm {arm.name!r} wrote other tokens than stock in {two.request_id}"
            )
