"""Requests with `n > 1`: vLLM runs `n` children and keeps the last one's report only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvsieve.core.config import CONFIG_KEY
from kvsieve.engine.frontend.choices import joined
from kvsieve.engine.wrapping import wrap

logger = logging.getLogger("vllm.kvsieve.frontend")

_REPORTS = "_kvsieve_reports"


def install_parallel_reports() -> None:
    """Make an `n > 1` request carry the reports of all its choices, in order of index."""
    from vllm.v1.engine.output_processor import RequestState

    wrap(RequestState, "make_request_output", _make_request_output)


def _make_request_output(
    stock: Callable[..., Any],
    state: Any,
    new_token_ids: Any,
    pooling_output: Any,
    finish_reason: Any,
    stop_reason: Any,
    kv_transfer_params: dict[str, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if state.parent_req is not None:
        try:
            kv_transfer_params = with_siblings(
                state.parent_req, state.request_index, kv_transfer_params
            )
        except Exception:
            logger.exception("kvsieve: could not collect the reports of a request with n > 1")
    return stock(
        state,
        new_token_ids,
        pooling_output,
        finish_reason,
        stop_reason,
        kv_transfer_params,
        *args,
        **kwargs,
    )


def with_siblings(
    parent: Any, index: int, kv_transfer_params: dict[str, Any] | None
) -> dict[str, Any] | None:
    """A child's parameters with the reports of all children known so far.

    All of them on every output, because vLLM merges outputs that the client has not fetched
    yet and then keeps the parameters of the newest.

    Args:
        parent: The `ParentRequest`, which also holds what is known so far.
        index: The child's index among its siblings.
        kv_transfer_params: The child's own. Without a report of ours, from any child, they
            are returned as they are.
    """
    report = (kv_transfer_params or {}).get(CONFIG_KEY)
    reports = getattr(parent, _REPORTS, None)
    if report is None and reports is None:
        return kv_transfer_params
    if reports is None:
        reports = [None] * parent.n
        setattr(parent, _REPORTS, reports)
    if report is not None:
        reports[index] = report
    return joined(kv_transfer_params, reports)
