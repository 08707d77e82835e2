"""A tokenizer of words for the tiny models, so that prompts can be written as text."""

from __future__ import annotations

import transformers

from tests.engine.models import VOCABULARY

WORDS = [f"w{number}" for number in range(VOCABULARY - 20)]
TEMPLATE = "<s>{% for m in messages %}{{ m['content'] }}{% endfor %} w1"


def add_tokenizer(folder: str) -> None:
    """Words w0, w1, ..., digits, a full stop and a line feed."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokens = ["<pad>", "<s>", "</s>", "<unk>", ".", "\n", *"0123456789", *WORDS]
    backend = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
