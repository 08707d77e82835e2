"""SmolLM2-135M-Instruct from a GGUF file to a Hugging Face folder.

Run as a process of its own (`python -m kvsieve.demo.convert GGUF FOLDER`), so that
the demonstration itself needs no torch, and so that the readers' progress bars do
not mix with ours.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model of `gguf` to `folder`, in float32, with its tokenizer.

    The folder gets `config.json`, `generation_config.json`, `model.safetensors`, the
    tokenizer and its chat template. Weights are the dequantised ones, bit for bit.

    Args:
        gguf: A SmolLM GGUF file (Llama architecture) with its tokenizer and chat template.
        folder: An existing, empty folder.

    Raises:
        ValueError: The file lacks a chat template or an end-of-turn token.
    """
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template or tokenizer.eos_token_id is None:
        raise ValueError(f"{gguf} carries no chat template or no end-of-turn token")

    # SmolLM splits numbers into digits before anything else. Transformers' GGUF reader
    # leaves that out, which makes other tokens where a number follows several spaces.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )

    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # The model that was read refuses save_pretrained ("quantized"), so its weights go
    # into a fresh one that has never heard of GGUF.
    settings = read.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path", "transformers_version"):
        settings.pop(name, None)
    config = LlamaConfig(**settings)
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()

    tokenizer.model_max_length = config.max_position_embeddings
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name, token_id in special.items():
        setattr(model.config, name, token_id)
    # Greedy by default: the demonstration compares two servers' answers.
    model.generation_config = GenerationConfig(**special, do_sample=False)

    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
