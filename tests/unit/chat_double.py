"""Chats, templates and a renderer in the shape of vLLM's, for tests without an engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jinja2

from kvsieve.engine.frontend import protected_roles

# A token is a word, a space or another character.
TOKEN = re.compile(r"\w+|\s|[^\w\s]")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
TRIMMING = (
    "<s>{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n\n{% endfor %}[assistant]"
)
# The system message goes into the first message of the user, as Mistral's and Gemma's does.
MERGING = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{{ '[INST]' if m.role == 'user' else '[OUT]' }}"
    "{% if loop.first and s %}{{ s }}\n\n{% endif %}{{ m.content }}[/INST]{% endfor %}"
)
# System messages come last, and as JSON; the text of others stands before them.
LATE = (
    "{% for m in messages if m.role != 'system' %}{{ m.content }}|{% endfor %}"
    "{% for m in messages if m.role == 'system' %}{{ m.content | tojson }}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "trimming": TRIMMING, "merging": MERGING, "parts": PARTS}


@dataclass(frozen=True)
class TokenizeParams:
    """As much of vLLM's as is looked at."""

    return_token_offsets: bool = False
    keep: int | None = None


class Renderer:
    """Renders as vLLM's: a template, then a tokenizer that knows where its tokens lie."""

    default_chat_tok_params = TokenizeParams()

    def __init__(self, template: str, settings: dict[str, Any] | None = None) -> None:
        self.template = jinja2.Environment().from_string(template)
        self.config = SimpleNamespace(
            additional_config={} if settings is None else {"kvsieve": settings},
            cache_config=SimpleNamespace(block_size=32),
        )
        self.has_offsets = True
        self.num_renderings = 0

    def render_messages(self, messages: Any, params: Any) -> Any:
        self.num_renderings += 1
        return messages, {"prompt": self.template.render(messages=messages)}

    async def render_messages_async(self, messages: Any, params: Any) -> Any:
        return self.render_messages(messages, params)

    def tokenize_prompt(self, prompt: Any, params: TokenizeParams) -> dict[str, Any]:
        matches = list(TOKEN.finditer(prompt["prompt"]))[: params.keep]
        tokens: dict[str, Any] = {"prompt_token_ids": [hash(match[0]) for match in matches]}
        if params.return_token_offsets and self.has_offsets:
            tokens["prompt_token_offsets"] = [match.span() for match in matches]
        return tokens

    async def tokenize_prompt_async(self, prompt: Any, params: TokenizeParams) -> dict[str, Any]:
        return self.tokenize_prompt(prompt, params)

    def stock_render_chat(self, conversations: Any, chat_params: Any, tok_params: Any) -> Any:
        inputs = []
        for conversation in conversations:
            text = self.template.render(messages=conversation)
            inputs.append({"type": "token", **self.tokenize_prompt({"prompt": text}, tok_params)})
        return conversations, inputs

    def words(self, messages: Any) -> list[str]:
        return TOKEN.findall(self.template.render(messages=messages))


def chat(*messages: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in messages]


def rendered(
    renderer: Renderer, messages: Any, tok_params: TokenizeParams | None = None
) -> dict[str, Any]:
    """An engine input, as it comes from our hook."""
    _, (engine_input,) = protected_roles._render_chat(
        Renderer.stock_render_chat, renderer, [messages], None, tok_params or TokenizeParams()
    )
    return engine_input
