"""The model that is inspected: what can be read of it, and loading it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvsieve.core.errors import ConfigError

# Kinds of layers in `layer_types`. Layers without attention have no KV cache to look at.
FULL = "full_attention"
SLIDING = "sliding_attention"
WITHOUT_ATTENTION = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent"})


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, with what inspection needs to know of it.

    Attributes:
        name: The folder or name that was given.
        model: The Transformers model (a causal language model), in eval mode.
        tokenizer: Its tokenizer.
        layers: Its decoder layers, in order.
        max_tokens: Longest context, in tokens; None if the configuration does not tell.
    """

    name: str
    model: Any
    tokenizer: Any
    layers: tuple[torch.nn.Module, ...]
    max_tokens: int | None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype


def refusals(config: Any) -> list[str]:
    """Reasons why a model cannot be inspected, from its Transformers configuration."""
    reasons = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder model; kvsieve serves decoder-only models")
    if getattr(config, "vision_config", None) or getattr(config, "audio_config", None):
        reasons.append("it takes images or sound; give a text-only model")
    if getattr(config, "kv_lora_rank", None):
        reasons.append(
            "its attention is latent (MLA, kv_lora_rank is set): it caches no keys per head that"
            " could be ranked"
        )
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        reasons.append("its attention adds ALiBi biases, which kvsieve does not serve")
    if getattr(config, "attn_logit_softcapping", None):
        reasons.append("its attention logits are capped, which kvsieve does not serve")
    if getattr(config, "num_kv_shared_layers", 0):
        reasons.append("its layers share keys and values, which kvsieve does not serve")
    known = {FULL, SLIDING, *WITHOUT_ATTENTION}
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if unknown:
        reasons.append(f"it has layers of a kind that is not known here: {', '.join(unknown)}")
    return reasons + _class_refusals(config)


def _class_refusals(config: Any) -> list[str]:
    from transformers import AutoModelForCausalLM

    if type(config) not in AutoModelForCausalLM._model_mapping:
        return [f"Transformers has no causal language model of the type {config.model_type!r}"]
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    if not getattr(model_class, "_supports_attention_backend", False):
        return [
            f"{model_class.__name__} of Transformers does not let its attention be replaced"
            " (AttentionInterface)"
        ]
    return []


def load_model(name: str, device: str = "auto") -> LoadedModel:
    """Load a model for inspection: float32 on a CPU, else in its own type.

    Args:
        name: Folder or name, as Transformers takes it.
        device: "auto" for a GPU if there is one, else a name as torch takes it.

    Raises:
        ConfigError: It cannot be loaded, or is not one that can be inspected, with every
            reason.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    path = str(Path(name).expanduser()) if name.startswith(("/", ".", "~")) else name
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError([f"cannot read the model {name!r}: {_first_line(error)}"]) from None
    if reasons := refusals(config):
        raise ConfigError([f"{name} cannot be inspected: {reason}" for reason in reasons])
    try:
        dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigError([f"cannot load the model {name!r}: {_first_line(error)}"]) from None
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        layers=decoder_layers(model),
        max_tokens=getattr(config, "max_position_embeddings", None),
    )


def decoder_layers(model: Any) -> tuple[torch.nn.Module, ...]:
    """The decoder layers of a Transformers model, in order.

    Raises:
        ConfigError: They are not found.
    """
    wanted = model.config.num_hidden_layers
    for child in model.base_model.children():
        if isinstance(child, torch.nn.ModuleList) and len(child) == wanted:
            return tuple(child)
    raise ConfigError(
        [f"{type(model).__name__} does not keep its {wanted} decoder layers in one list"]
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
