"""The plan of a model: layers, groups, bytes per request, requests that fit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsieve.core.budget import stored_tokens
from kvsieve.core.config import SieveConfig
from kvsieve.core.cost import request_cost
from kvsieve.core.errors import ConfigError
from kvsieve.core.plan import (
    MAX_GROUPS,
    Grouping,
    LayerPlan,
    group_layers,
    make_plan,
)
from kvsieve.core.tiers import LayerTier, PyramidBudgets, make_tiers
from kvsieve.planning.pruning import plan_pruning


@dataclass(frozen=True)
class ModelShape:
    """What the plan needs to know of a model.

    Attributes:
        sievable: Layers with full attention.
        untouched: Layers with a sliding window.
        num_kv_heads: KV heads per layer.
        head_size: Size of a head.
        max_model_len: Longest context of the model, in tokens.
    """

    sievable: tuple[int, ...]
    untouched: tuple[int, ...]
    num_kv_heads: int
    head_size: int
    max_model_len: int


def plan_model(
    model: str,
    config: SieveConfig,
    *,
    prompt_tokens: int,
    output_tokens: int,
    block_size: int,
    pool_bytes: int,
    kv_bytes: int,
) -> dict[str, Any]:
    """Plan a model for requests of one shape.

    Args:
        model: Folder with a config.json, or a name that `transformers` resolves.
        config: Settings of the sieve.
        prompt_tokens: Prompt length, in tokens.
        output_tokens: Answer length, in tokens.
        block_size: Block size of the cache manager, in tokens.
        pool_bytes: Memory for the KV cache, in bytes.
        kv_bytes: Bytes per cached number.

    Returns:
        JSON values, as `kvsieve plan --json` prints them.

    Raises:
        ConfigError: The model cannot be read or the settings cannot work.
    """
    shape = read_shape(model)
    layer_plan = make_plan(shape.sievable, shape.untouched, config.full_layers)
    tiers = make_tiers(config, layer_plan, block_size)
    page_bytes = block_size * shape.num_kv_heads * 2 * shape.head_size * kv_bytes
    grouping = group_layers(
        len(layer_plan.full), *(len(tier.layers) for tier in tiers), len(layer_plan.untouched)
    )
    shown = [
        _tier(tier, prompt_tokens, output_tokens, block_size, page_bytes, grouping)
        for tier in tiers
    ]
    shape_name = config.layer_budgets if isinstance(config.layer_budgets, str) else "by layers"
    pruning = plan_pruning(config, layer_plan, prompt_tokens, shown[0]["stored"])
    dropped = sum(len(tier["layers"]) * (prompt_tokens - tier["stored"]) for tier in shown)

    def cost(is_sieved: bool, prompt: int, output: int) -> int:
        return request_cost(
            layer_plan, tiers if is_sieved else None, prompt, output, block_size, page_bytes
        ).bytes

    # While a prompt is read every layer holds all of it, in the sieved grouping.
    peak_blocks = -(-prompt_tokens // block_size) * grouping.num_groups
    request = {
        "full": {
            "peak": cost(False, prompt_tokens, 0),
            "end": cost(False, prompt_tokens, output_tokens),
        },
        "sieved": {
            "peak": peak_blocks * grouping.group_size * page_bytes,
            "end": cost(True, prompt_tokens, output_tokens),
        },
    }
    return {
        "model": model,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "block_size": block_size,
        "kv_bytes": kv_bytes,
        "pool_bytes": pool_bytes,
        "layers": {
            "full": list(layer_plan.full),
            "sieved": list(layer_plan.sieved),
            "untouched": list(layer_plan.untouched),
        },
        "budget": {
            "shape": shape_name,
            "nominal": tiers[0].rule.mean_for(prompt_tokens),
            "stored": prompt_tokens - dropped // len(layer_plan.sieved),
        },
        "tiers": shown,
        "pruning": pruning,
        "groups": {
            "count": grouping.num_groups,
            "layers_each": grouping.group_size,
            "padding_percent": 100 * grouping.padding_share,
        },
        "request": request,
        "requests_that_fit": _requests_that_fit(request, pool_bytes),
        "notes": _notes(shape, layer_plan, prompt_tokens, output_tokens, shown, grouping, pruning),
    }


def _tier(
    tier: LayerTier,
    prompt_tokens: int,
    output_tokens: int,
    block_size: int,
    page_bytes: int,
    grouping: Grouping,
) -> dict[str, Any]:
    """One tier of a plan as JSON values."""
    nominal = tier.rule.tokens_for(prompt_tokens)
    per_layer = [nominal] * len(tier.layers)
    budgets = tier.rule.budgets
    if isinstance(budgets, PyramidBudgets):
        first = sum(budgets.sizes[: tier.rule.index])
        per_layer = list(budgets.per_layer(prompt_tokens)[first : first + len(tier.layers)])
    num_groups = grouping.num_groups_of(len(tier.layers))
    stored = stored_tokens(prompt_tokens, nominal, block_size)
    # What is freed is whole blocks, so the prompt's own last block holds the first answer tokens.
    blocks = -(-(prompt_tokens + output_tokens) // block_size)
    blocks -= (prompt_tokens - stored) // block_size
    return {
        "layers": list(tier.layers),
        "nominal_per_layer": per_layer,
        "nominal": nominal,
        "stored": stored,
        "groups": num_groups,
        "bytes": blocks * num_groups * grouping.group_size * page_bytes,
    }


def _requests_that_fit(request: dict[str, dict[str, int]], pool_bytes: int) -> dict[str, int]:
    """Requests that the pool holds at once when each has written its whole answer.

    The last one to arrive needs its whole prompt in every layer for a moment, so that
    much is left free for it.
    """
    full, sieved = request["full"], request["sieved"]
    spare = pool_bytes - sieved["peak"]
    return {
        "full": pool_bytes // full["end"],
        "sieved": 0 if spare < 0 else 1 + spare // sieved["end"],
    }


def _notes(
    shape: ModelShape,
    plan: LayerPlan,
    prompt_tokens: int,
    output_tokens: int,
    tiers: Sequence[Mapping[str, Any]],
    grouping: Grouping,
    pruning: Mapping[str, Any] | None,
) -> list[str]:
    notes = []
    smallest = min(tier["nominal"] for tier in tiers)
    if prompt_tokens <= smallest:
        notes.append(
            f"the prompt of {prompt_tokens} tokens fits the budget of {smallest}: nothing is sieved"
        )
    if grouping.num_groups > MAX_GROUPS:
        notes.append(
            f"{grouping.num_groups} cache groups: each costs host time in every step; more full"
            f" layers or fewer tiers make fewer (the default plan makes at most"
            f" {MAX_GROUPS})"
        )
    if prompt_tokens + output_tokens > shape.max_model_len:
        notes.append(
            f"{prompt_tokens + output_tokens} tokens are more than the model's"
            f" {shape.max_model_len}"
        )
    if plan.untouched:
        notes.append(
            "sliding-window layers are counted as if they kept everything; vLLM frees theirs too"
        )
    if pruning is not None and pruning["is_pruned"]:
        notes.append(
            "a pruned prompt needs of the pool what any sieved one needs: while it is read every"
            " layer allocates all of it"
        )
    return notes


def read_shape(model: str) -> ModelShape:
    """The shape of a model from its configuration.

    Raises:
        ConfigError: There is no readable configuration, or it lacks the attention's shape.
    """
    config = _read_config(model)
    try:
        return _shape_of(config)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            [
                f"the configuration of {model} is not that of a decoder-only Transformer:"
                f" {type(error).__name__}: {error}"
            ]
        ) from None


def _shape_of(config: dict[str, Any]) -> ModelShape:
    # Multimodal models keep the language model's settings one level down.
    config = config.get("text_config") or config
    num_layers = int(config["num_hidden_layers"])
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    head_size = int(config.get("head_dim") or config["hidden_size"] // num_heads)
    windowed = set(_windowed_layers(config, num_layers))
    layers = range(num_layers)
    return ModelShape(
        sievable=tuple(layer for layer in layers if layer not in windowed),
        untouched=tuple(layer for layer in layers if layer in windowed),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_model_len=int(config.get("max_position_embeddings") or 0) or 2**31,
    )


def _windowed_layers(config: dict[str, Any], num_layers: int) -> list[int]:
    """Layers that do not have full attention, as the configuration tells."""
    kinds = config.get("layer_types")
    if kinds:
        return [layer for layer, kind in enumerate(kinds) if kind != "full_attention"]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return []
    pattern = config.get("sliding_window_pattern")
    if pattern:
        return [layer for layer in range(num_layers) if (layer + 1) % int(pattern)]
    return list(range(int(config.get("max_window_layers", 0)), num_layers))


def _read_config(model: str) -> dict[str, Any]:
    path = Path(model).expanduser() / "config.json"
    if path.is_file():
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ConfigError([f"{path} is not a JSON object: {error}"]) from None
    if Path(model).expanduser().is_dir():
        raise ConfigError([f"the folder {model} has no config.json"])
    try:
        from transformers import PretrainedConfig

        config, _ = PretrainedConfig.get_config_dict(model)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            [f"cannot read the configuration of {model!r}: {str(error).splitlines()[0]}"]
        ) from None
    if not config:
        raise ConfigError(
            [f"no configuration found for {model!r}; give a folder or a model's name"]
        )
    return dict(config)
