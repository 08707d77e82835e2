"""The KV-cache spec of a sieved layer.

Importing this module registers the spec with vLLM. A spec object that is unpickled
in another process imports its module, so wherever a spec arrives it is registered.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvsieve.core.budget import BudgetRule, sieve_start
from kvsieve.core.tiers import TierRule
from kvsieve.engine.manager import SievedManager


@dataclass(frozen=True, kw_only=True)
class SievedAttentionSpec(AttentionSpec):
    """Cache format of a sieved layer: full attention's, freed from the front.

    It does not derive from `FullAttentionSpec`: vLLM would merge such a class into
    one group with the full layers.

    Attributes:
        budget: Nominal budget of the layer's tier, as a function of prompt length and request.
            The rules of two tiers are never equal, so vLLM makes groups of them separately.
        observation_window: Last prompt tokens that a prefix-cache hit must leave to
            compute, because their queries score the prompt.
        manager_block_size: Block size of the cache manager, in tokens. `block_size`
            is replaced by the kernel's block size in the copy that a metadata
            builder gets; the start of the kept region follows the manager's.
    """

    budget: TierRule
    observation_window: int
    manager_block_size: int

    def start(self, prompt_tokens: int, requested: BudgetRule | None = None) -> int:
        """First position that the layer holds once a prompt of this length is sieved.

        Args:
            prompt_tokens: The original prompt length.
            requested: A request's own budget, for the mean over all sieved layers; None for
                the operator's.
        """
        tokens = self.budget.tokens_for(prompt_tokens, requested)
        return sieve_start(prompt_tokens, tokens, self.manager_block_size)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of the longest request, which holds its whole prompt until it is sieved."""
        max_model_len = vllm_config.model_config.max_model_len
        return cdiv(max_model_len, self.block_size) * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether all layers may share one group: only layers with the same budget may."""
        return all(
            isinstance(spec, SievedAttentionSpec)
            and spec.budget == self.budget
            and spec.manager_block_size == self.manager_block_size
            for spec in kv_cache_specs.values()
        )


def sieved_spec(
    stock: FullAttentionSpec, budget: TierRule, observation_window: int
) -> SievedAttentionSpec:
    """The sieved spec of a layer whose stock spec is full attention."""
    common = {field.name: getattr(stock, field.name) for field in fields(AttentionSpec)}
    return SievedAttentionSpec(
        **common,
        budget=budget,
        observation_window=observation_window,
        manager_block_size=stock.block_size,
    )


# The registry fills itself with the built-in specs only while it is empty: register
# those first, or vLLM would not know them in this process.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(
    SievedAttentionSpec,
    SievedManager,
    uniform_type_base_spec=SievedAttentionSpec,
)
