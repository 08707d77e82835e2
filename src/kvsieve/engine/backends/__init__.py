"""Adapters, one file per attention back-end: cache layout, metadata, start-up checks."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvsieve.policies import Policy

# Imported on use: an adapter's module needs vLLM, and its back-end's package.
_ADAPTERS = {"CPU_ATTN": ("kvsieve.engine.backends.cpu", "CpuAdapter")}

ADAPTED_BACKENDS = tuple(_ADAPTERS)
"""Names of the back-ends that have an adapter."""


@dataclass(frozen=True)
class Selection:
    """What the sieve chose in one layer.

    Attributes:
        positions: [num_kv_heads, kept - window] int64, ascending: the positions before the
            window that are kept.
        mass_lost: Scalar float32 tensor, the share of the window's attention that went to
            the positions that are not kept, mean over the query heads.
    """

    positions: torch.Tensor
    mass_lost: torch.Tensor


class BackendAdapter(Protocol):
    """What the sieve must know of an attention back-end."""

    @staticmethod
    def refusals(layer: Any, block_size: int) -> list[str]:
        """Reasons why a layer of this back-end cannot be sieved; empty if it can."""
        ...

    @staticmethod
    def with_blocks(metadata: Any, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
        """A copy of the back-end's metadata for another group's blocks."""
        ...

    @staticmethod
    def sieve(
        kv_cache: torch.Tensor,
        blocks: torch.Tensor,
        query: torch.Tensor,
        scale: float,
        policy: Policy,
        prompt_tokens: int,
        start: int,
        move: bool,
    ) -> Selection:
        """Score one prompt in one layer, and move the kept rows.

        Args:
            kv_cache: The layer's cache as vLLM binds it.
            blocks: The request's blocks in order, in kernel blocks.
            query: [window, num_heads, head_size], the observation window.
            scale: Softmax scale.
            policy: How to rank and choose.
            prompt_tokens: Length of the prompt, in tokens.
            start: First position of the kept region.
            move: Whether to move rows; in shadow mode they stay.
        """
        ...

    @staticmethod
    def scratch_bytes(layer: Any, policy: Policy, prompt_tokens: int) -> int:
        """Bytes that `sieve` needs at once, beyond the cache, for a prompt of that length."""
        ...


def adapter_for(backend_name: str) -> type[BackendAdapter]:
    """The adapter of a back-end by vLLM's name for it.

    Raises:
        KeyError: kvsieve has no adapter for the back-end.
    """
    module, name = _ADAPTERS[backend_name]
    adapter: type[BackendAdapter] = getattr(importlib.import_module(module), name)
    return adapter
