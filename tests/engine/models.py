"""Tiny random-weight models for structure, and the real one."""

from __future__ import annotations

from pathlib import Path

import torch

VOCABULARY = 512


def tiny_model(
    folder: Path,
    architecture: str = "llama",
    num_layers: int = 6,
    head_size: int = 64,
    seed: int = 0,
) -> str:
    """Save a random-weight model in a folder, once.

    Weights are scaled up so that attention is peaked and tokens differ in score;
    freshly initialised ones attend to everything alike.

    Args:
        folder: Parent folder.
        architecture: "llama", "qwen2", "qwen3", "mistral" or "gemma3".
        num_layers: Decoder layers.
        head_size: Size of a head; four query heads share two KV heads.
        seed: Seed of the weights.
    """
    import transformers

    path = folder / f"{architecture}-{num_layers}-{head_size}-{seed}"
    if path.exists():
        return str(path)
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 4 * head_size,
        "intermediate_size": 8 * head_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_size,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    extra = {
        "mistral": {"sliding_window": None},
        "gemma3": {
            "sliding_window": 64,
            "layer_types": [
                "full_attention" if layer % 3 == 2 else "sliding_attention"
                for layer in range(num_layers)
            ],
            "query_pre_attn_scalar": head_size,
        },
    }
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    }[architecture]
    torch.manual_seed(seed)
    model = model_class(config_class(**common, **extra.get(architecture, {})))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                weight.mul_(8)
            elif "proj.weight" in name:
                weight.mul_(3)
    staging = path.with_suffix(".partial")
    model.save_pretrained(staging)
    staging.rename(path)
    return str(path)


def random_prompt(length: int, seed: int) -> list[int]:
    """Random token ids that avoid the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCABULARY, (length,), generator=generator).tolist()
