"""Pruning during prefill: which prompts, by which method, and the proof that it happened.

From a layer on, a pruned prompt goes on with its kept tokens only. How many that is, is the
budget's business: the layers beyond hold exactly what the sieve leaves in the layers before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

PruneName = Literal["asl", "fastkv", "gemfilter", "asl-two-pass"]
PRUNE_NAMES: tuple[PruneName, ...] = get_args(PruneName)

KV_PRUNE_KEY = "kv_prune"
"""The key of `vllm_xargs` (a client's request) and of `SamplingParams.extra_args`."""

NO_PRUNING = "none"
"""The value of `kv_prune` and of the setting `prune` that prunes nothing."""

PruneReason = Literal["fixed", "threshold", "deepest", "last", "never"]
"""Why a prompt was pruned at its layer: the method has a fixed one; ranks had settled there; the
operator's deepest layer was reached; it was the last one that a first pass looked at. "never":
ranks did not settle, so that no token was pruned."""

_WISH = re.compile(r"(?P<method>[a-z-]+)(@(?P<layer>[0-9]{1,4}))?")


@dataclass(frozen=True)
class Prune:
    """How one request is pruned.

    Attributes:
        method: The method.
        layer: The selection layer of a fixed method, or where ASL begins to judge, in place of
            the operator's; None for the operator's.
    """

    method: PruneName
    layer: int | None = None

    @property
    def is_chunked(self) -> bool:
        """Whether the prompt may be read in chunks with the same result: its layer is known."""
        return self.method == "fastkv"

    def __str__(self) -> str:
        return self.method if self.layer is None else f"{self.method}@{self.layer}"


def parse_prune(value: Any) -> Prune | None:
    """A wish such as `asl`, `fastkv@12` or `none`.

    Returns:
        None for `none`.

    Raises:
        ValueError: It names no method.
    """
    wish = _WISH.fullmatch(value.strip()) if isinstance(value, str) else None
    methods: dict[str, PruneName] = {name: name for name in PRUNE_NAMES}
    if wish is None or wish["method"] not in (*methods, NO_PRUNING):
        raise ValueError(
            f"must be {NO_PRUNING} or one of {', '.join(PRUNE_NAMES)}, with a layer if wanted, such"
            f" as fastkv@12; got {str(value)[:40]!r}"
        )
    layer = None if wish["layer"] is None else int(wish["layer"])
    if wish["method"] == NO_PRUNING:
        if layer is not None:
            raise ValueError(f"{NO_PRUNING} has no layer, got {value!r}")
        return None
    return Prune(methods[wish["method"]], layer)


@dataclass(frozen=True)
class PrunedPrompt:
    """What pruning did to one prompt, as counted on the worker.

    Attributes:
        method: The method.
        layer: The last layer that read the whole prompt; None if no token was pruned.
        reason: Why there.
        kept_tokens: Prompt tokens that the layers beyond compute and hold.
        computed_share: Tokens that the layers computed, over prompt length times layers. A
            second pass counts, so it may exceed 1.
        seconds_saved: Time that the step's layers would have taken longer without pruning, as far
            as it falls on this prompt: each pruned layer would have taken the mean time per token
            of the layers that read everything.
        relative_variance: ASL's rank variance by layer, over that at its first judged layer.
    """

    method: PruneName
    layer: int | None
    reason: PruneReason
    kept_tokens: int
    computed_share: float
    seconds_saved: float
    relative_variance: dict[str, float] | None = None
