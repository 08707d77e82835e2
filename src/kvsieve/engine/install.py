"""Turn a loaded model's layers into full and sieved ones, on one worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError
from kvsieve.core.notation import layer_list
from kvsieve.core.plan import LayerPlan, group_layers, make_plan
from kvsieve.core.tiers import LayerTier, make_tiers
from kvsieve.engine.backends import ADAPTED_BACKENDS, adapter_for
from kvsieve.engine.block_copies import BlockCopier
from kvsieve.engine.builder import SIEVE_ATTRIBUTE, sieved_backend
from kvsieve.engine.layers import SievedLayer, find_output_projection, find_rotary
from kvsieve.engine.observer import Observer
from kvsieve.engine.pruning.model import decoder_layers, wrap_forward
from kvsieve.engine.pruning.pruner import Pruner
from kvsieve.engine.rows import row_reader
from kvsieve.engine.settings import model_pruning, sieve_config, sieve_policy
from kvsieve.engine.sieve import Sieve
from kvsieve.engine.spec import sieved_spec
from kvsieve.engine.windows import num_ring_slots, watched_queries
from kvsieve.policies import Policy

logger = init_logger("vllm.kvsieve.install")


def install_sieve(runner: Any, vllm_config: VllmConfig, is_v2: bool) -> Sieve:
    """Make the model's planned layers sieved ones.

    Must run after the model is loaded and before vLLM asks for cache specs, so that
    the rings are allocated before the memory for the cache is measured.

    Args:
        runner: The worker's model runner.
        vllm_config: vLLM's configuration, with our settings in `additional_config`.
        is_v2: Whether the runner is Model Runner V2.

    Raises:
        ConfigError: A layer cannot be sieved, or none would be; every reason at once.
    """
    config = sieve_config(vllm_config)
    block_size = vllm_config.cache_config.block_size
    context = vllm_config.compilation_config.static_forward_context
    sievable, untouched = _classify_layers(context, vllm_config)
    plan = make_plan(
        tuple(extract_layer_index(name) for name in sievable),
        tuple(extract_layer_index(name) for name in untouched),
        config.full_layers,
    )
    tiers = make_tiers(config, plan, block_size)
    rule_of = {layer: tier.rule for tier in tiers for layer in tier.layers}
    modules = {
        name: module
        for name, (module, _) in sievable.items()
        if extract_layer_index(name) in set(plan.sieved)
    }
    _refuse(modules, context.values(), block_size)

    policy = sieve_policy(vllm_config)
    model = runner.get_model()
    needs_projection = "output_norms" in policy.looks_at
    needs_rotary = "rotary" in policy.looks_at
    layers = [
        SievedLayer(
            name,
            extract_layer_index(name),
            module,
            sieved_spec(
                sievable[name][1], rule_of[extract_layer_index(name)], watched_queries(policy)
            ),
            find_rotary(model, name) if needs_rotary else None,
            find_output_projection(model, name, module) if needs_projection else None,
        )
        for name, module in modules.items()
    ]
    _refuse_blind(policy, layers)
    first = layers[0].module
    observer = Observer(
        layer_names=modules,
        num_slots=num_ring_slots(
            config,
            policy,
            block_size,
            vllm_config.scheduler_config.max_num_batched_tokens,
            vllm_config.scheduler_config.max_num_seqs,
        ),
        window=policy.observation_window,
        num_heads=first.num_heads,
        head_size=first.head_size,
        dtype=first.dtype,
        device=runner.device,
    )
    sieve = Sieve(
        layers,
        policy,
        observer,
        row_reader(runner, is_v2),
        BlockCopier(runner),
    )
    for layer in layers:
        _install_layer(layer, sieve)
    if pruning := model_pruning(vllm_config):
        stack = decoder_layers(model, layers)
        # All that a request may ask for, not only the operator's method.
        pruning.check_calibration(len(stack))
        sieve.pruner = Pruner(sieve, stack, pruning)
        logger.info("kvsieve: prune %s", sieve.pruner.settings(pruning.prune))
        wrap_forward(model, sieve.pruner.around)
    _log_plan(plan, tiers, config, policy, observer, sieve.scratch_bytes(vllm_config))
    return sieve


def _classify_layers(
    context: dict[str, Any], vllm_config: VllmConfig
) -> tuple[dict[str, tuple[Any, FullAttentionSpec]], list[str]]:
    """Attention layers in model order: those with plain full attention, and all others.

    Decided from the cache specs, so that sliding-window, MLA and KV-sharing layers of
    any model stay as they are.
    """
    sievable: dict[str, tuple[Any, FullAttentionSpec]] = {}
    untouched: list[str] = []
    for name, module in context.items():
        if not hasattr(module, "get_kv_cache_spec"):
            continue
        spec = None
        if not getattr(module, "kv_sharing_target_layer_name", None):
            spec = module.get_kv_cache_spec(vllm_config)
        # The class itself: MLA's spec and others derive from it.
        if isinstance(module, Attention) and type(spec) is FullAttentionSpec:
            sievable[name] = (module, spec)
        else:
            untouched.append(name)
    return sievable, untouched


def _refuse(modules: dict[str, Any], all_layers: Iterable[Any], block_size: int) -> None:
    reasons: list[str] = []
    for module in modules.values():
        backend = module.attn_backend.get_name()
        if backend not in ADAPTED_BACKENDS:
            reasons.append(
                f"the attention back-end {backend} has no kvsieve adapter yet (there is one for"
                f" {', '.join(ADAPTED_BACKENDS)})"
            )
        else:
            reasons.extend(adapter_for(backend).refusals(module, block_size))
        if getattr(module.impl, "alibi_slopes", None) is not None:
            reasons.append("the model uses ALiBi, whose bias depends on where a token is stored")
        if getattr(module.impl, "sinks", None) is not None:
            reasons.append(
                "the model has learned attention sinks, which the score does not include"
            )
        if getattr(module.impl, "logits_soft_cap", 0):
            reasons.append("the model caps its attention logits, which the score does not include")
    readers = {getattr(layer, "kv_sharing_target_layer_name", None) for layer in all_layers}
    if shared := sorted(modules.keys() & readers):
        reasons.append(f"other layers read the cache of {', '.join(shared)} (KV sharing)")
    if reasons:
        raise ConfigError(list(dict.fromkeys(reasons)))


def _refuse_blind(policy: Policy, layers: Iterable[SievedLayer]) -> None:
    """Refuse a policy that looks at something that the model does not show."""
    reasons = []
    for layer in layers:
        if "output_norms" in policy.looks_at and layer.output_projection is None:
            reasons.append(
                f"the policy {policy.name} needs the output projection of {layer.name}, and there"
                " is no o_proj beside it; choose another policy"
            )
        if "rotary" in policy.looks_at and layer.rotary is None:
            reasons.append(
                f"the policy {policy.name} needs the rotary embedding of {layer.name}, and there"
                " is none that it can read; choose another policy"
            )
    if reasons:
        raise ConfigError(reasons[:3])


def _install_layer(layer: SievedLayer, sieve: Sieve) -> None:
    """Give one layer its spec, its back-end and its observer."""
    module = layer.module
    setattr(module, SIEVE_ATTRIBUTE, sieve)
    module.get_kv_cache_spec = lambda _vllm_config: layer.spec
    module.attn_backend = sieved_backend(module.attn_backend)
    stock_forward = module.impl.forward

    def forward(attention_layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sieve.observe(layer.name, query)
        output = stock_forward(attention_layer, query, *args, **kwargs)
        sieve.gather(layer.name, query)
        return output

    module.impl.forward = forward


def _log_plan(
    plan: LayerPlan,
    tiers: tuple[LayerTier, ...],
    config: SieveConfig,
    policy: Policy,
    observer: Observer,
    scratch_bytes: int,
) -> None:
    grouping = group_layers(
        len(plan.full), *(len(tier.layers) for tier in tiers), len(plan.untouched)
    )
    budgets = "; ".join(
        str(tier.rule) if len(tiers) == 1 else f"layers {layer_list(tier.layers)}: {tier.rule}"
        for tier in tiers
    )
    logger.info(
        "kvsieve: mode %s, %s over %d sieved layers, budget %s; full layers: %s; untouched layers:"
        " %s; %d cache groups of %d layers, %.1f%% padding; window %d, pooling %s %d, %d sinks;"
        " query rings %.1f MiB, scratch at most %.1f MiB",
        config.mode,
        config.policy,
        len(plan.sieved),
        budgets,
        layer_list(plan.full),
        layer_list(plan.untouched),
        grouping.num_groups,
        grouping.group_size,
        100 * grouping.padding_share,
        policy.observation_window,
        policy.pooling,
        policy.pool_size,
        policy.num_sink_tokens,
        observer.num_bytes / 2**20,
        scratch_bytes / 2**20,
    )
