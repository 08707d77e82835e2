"""Adapters, one file per attention back-end: cache layout, metadata, start-up checks."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvsieve.engine.layers import SievedLayer
from kvsieve.policies import Chunk, Evidence, Policy

# Imported on use: an adapter's module needs vLLM, and its back-end's package.
_ADAPTERS = {"CPU_ATTN": ("kvsieve.engine.backends.cpu", "CpuAdapter")}

ADAPTED_BACKENDS = tuple(_ADAPTERS)
"""Names of the back-ends that have an adapter."""


class CachedEvidence(Evidence, Protocol):
    """A prompt in one layer's cache: evidence for the policy, and rows to move."""

    def compact(self, positions: torch.Tensor, start: int) -> None:
        """Move the kept K/V rows, in place, to `[start, start + num_keep)`.

        Args:
            positions: [num_kv_heads, num_keep] int64, ascending.
            start: First position of the kept region.
        """
        ...


@dataclass(frozen=True)
class CachedPrompt:
    """Where a prompt lies in one layer's cache.

    Attributes:
        layer: The layer; its module holds the cache.
        blocks: The prompt's blocks in order, in kernel blocks.
        num_tokens: Length of the prompt, in tokens.
    """

    layer: SievedLayer
    blocks: torch.Tensor
    num_tokens: int


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
    def evidence(prompt: CachedPrompt, window: torch.Tensor, accumulated: Any) -> CachedEvidence:
        """What a policy may look at of one prompt in one layer.

        Args:
            prompt: Where it lies.
            window: [window, num_heads, head_size], the observation window's queries.
            accumulated: What the policy's accumulator gathered; None if it has none.
        """
        ...

    @staticmethod
    def chunk(prompt: CachedPrompt, queries: torch.Tensor, first: int) -> Chunk:
        """Some queries of a prompt, with the keys before them.

        Args:
            prompt: Where the prompt lies; the blocks of the chunk and before are filled.
            queries: [num_queries, num_heads, head_size].
            first: Position of the first query.
        """
        ...

    @staticmethod
    def scratch_bytes(layer: Any, policy: Policy, prompt_tokens: int) -> int:
        """Bytes that scoring and compacting one prompt of that length need at once.

        What a policy gathers while prompts are read is not among them (`Sieve.scratch_bytes`).
        """
        ...


def adapter_for(backend_name: str) -> type[BackendAdapter]:
    """The adapter of a back-end by vLLM's name for it.

    Raises:
        KeyError: kvsieve has no adapter for the back-end.
    """
    module, name = _ADAPTERS[backend_name]
    adapter: type[BackendAdapter] = getattr(importlib.import_module(module), name)
    return adapter
