"""Attention back-ends of sieved layers: stock kernels, shown the sieved rows."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from kvsieve.engine.backends import BackendAdapter, adapter_for
from kvsieve.engine.step import GroupStep, shifted_metadata

if TYPE_CHECKING:
    from kvsieve.engine.sieve import Sieve

SIEVE_ATTRIBUTE = "kvsieve"
"""Attribute of a sieved `Attention` layer that holds the worker's `Sieve`."""


# A mixin's methods call those of the class beside it, which only the checker must know.
if TYPE_CHECKING:
    from typing import Any as _Base
else:
    _Base = object


class SievedBuilderMixin(_Base):
    """Builds the stock metadata of a group of sieved layers from shifted rows."""

    # The step's own cache below serves both runners; vLLM's would skip the shift.
    supports_update_block_table = False
    adapter: type[BackendAdapter]

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, *args, **kwargs)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._sieve: Sieve = getattr(layer, SIEVE_ATTRIBUTE)
        self._spec = self._sieve.join_group(layer_names)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The stock metadata, in which compacted rows start where they were sieved."""
        step = self._sieve.step
        if step is None:
            # A dummy run (profiling, warm-up, capture): no request has been sieved.
            return super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        common = common_attn_metadata
        block_size = self.kv_cache_spec.block_size
        self._sieve.enter_group(self.layer_names[0], GroupStep(self, common, block_size))
        shift = step.shift(self._spec, common, block_size)
        # Groups of one spec differ only in their blocks, so the rest is built once.
        key = (self._spec, block_size, type(self))
        built = step.metadata.get(key)
        if built is None:
            shifted = shifted_metadata(common, shift)
            built = super().build(common_prefix_len, shifted, *args, **kwargs)
            step.metadata[key] = built
            return built
        return self.adapter.with_blocks(
            built, shift.block_table(common.block_table_tensor), common.slot_mapping
        )

    def build_as_given(self, common: CommonAttentionMetadata) -> Any:
        """The stock metadata of rows that are shown as they are (`pruning/layout.py`)."""
        return super().build(0, common)


@cache
def sieved_backend(stock: type[AttentionBackend]) -> type[AttentionBackend]:
    """The back-end of a sieved layer, derived from the one that vLLM chose.

    Raises:
        KeyError: There is no adapter for the back-end; checked before, see `adapter_for`.
    """
    stock_builder: type[AttentionMetadataBuilder] = stock.get_builder_cls()
    builder = type(
        f"Sieved{stock_builder.__name__}",
        (SievedBuilderMixin, stock_builder),
        {"adapter": adapter_for(stock.get_name()), "__module__": __name__},
    )
    return type(
        f"Sieved{stock.__name__}",
        (stock,),
        {"get_builder_cls": staticmethod(lambda: builder), "__module__": __name__},
    )
