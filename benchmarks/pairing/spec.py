"""What an arm is: an engine to compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ArmSpec:
    """An engine to compare.

    Attributes:
        name: Name in tables and results.
        model: Folder of the model.
        sieve: Settings of `additional_config["kvsieve"]` as pairs, or None for stock vLLM.
        pool_bytes: `kv_cache_memory_bytes`.
        max_num_seqs: Requests in one step.
        max_model_len: Longest request, in tokens.
        dummy_weights: Random weights instead of the folder's, and no tokenizer.
        prefix_caching: vLLM's prefix cache, which is on in a server unless switched off.
        max_num_batched_tokens: Tokens of one step; None for vLLM's default.
    """

    name: str
    model: str
    sieve: tuple[tuple[str, Any], ...] | None
    pool_bytes: int
    max_num_seqs: int
    max_model_len: int = 8192
    dummy_weights: bool = False
    prefix_caching: bool = False
    max_num_batched_tokens: int | None = None

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`, the same for all arms but for the sieve."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_memory_bytes": self.pool_bytes,
            "enable_prefix_caching": self.prefix_caching,
        }
        if self.max_num_batched_tokens is not None:
            arguments["max_num_batched_tokens"] = self.max_num_batched_tokens
        if self.dummy_weights:
            arguments |= {"load_format": "dummy", "skip_tokenizer_init": True}
        if self.sieve is not None:
            arguments["additional_config"] = {"kvsieve": dict(self.sieve)}
        return arguments
