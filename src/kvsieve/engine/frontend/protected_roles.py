"""Protected roles: the token spans of a chat's messages, found in the prompt that vLLM rendered.

A chat template may put a message anywhere and write anything around it. So the conversation
is rendered once more with marks around the text of the wanted messages: without its marks, that
rendering must give the very tokens of the prompt, and then the marks say which of them are the
messages'. vLLM's own rendering is not touched, and a request that protects no role costs nothing.

Every conversation that vLLM renders by `BaseRenderer.render_chat` or `render_chat_async` can be
looked at: `/v1/chat/completions` and its batches, `/v1/messages`, `/v1/responses`, `LLM.chat`.
Prompts of `/v1/completions` and `/inference/v1/generate` have no roles; they can name spans.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvsieve.core.config import SieveConfig
from kvsieve.core.protection import (
    KV_PROTECT_KEY,
    NOTHING,
    Protection,
    Spans,
    check_room,
    count_protected,
    merged,
    parse_protection,
    smallest_stored,
)
from kvsieve.core.treatment import KV_BUDGET_KEY, requested_budget, requested_protection, treat
from kvsieve.engine.activation import is_configured
from kvsieve.engine.frontend.marked_chat import MarkedChat, NotLocatedError
from kvsieve.engine.settings import sieve_config, sieve_policy
from kvsieve.engine.wrapping import wrap

logger = logging.getLogger("vllm.kvsieve.frontend")

_CHAT = "kvsieve_chat"
"""The key of an engine input under which the conversation that it was rendered from lies."""

_USUAL_ROLES = ("system", "developer", "user", "assistant", "tool")


def install_rendered_chats() -> None:
    """Make every prompt that vLLM renders from a conversation remember it."""
    from vllm.renderers.base import BaseRenderer

    wrap(BaseRenderer, "render_chat", _render_chat)
    wrap(BaseRenderer, "render_chat_async", _render_chat_async)


def install_early_checks() -> None:
    """Refuse chats before their response begins, where status 400 can still be given."""
    from vllm.renderers.online_renderer import OnlineRenderer

    wrap(OnlineRenderer, "preprocess_chat", _preprocess_chat)


class RenderedChat:
    """A conversation and how it was rendered.

    Args:
        renderer: vLLM's renderer.
        conversation: Its messages as the template got them.
        chat_params: How the template was applied.
        tok_params: How its text was tokenized.
        engine_input: What came of it.
    """

    def __init__(
        self,
        renderer: Any,
        conversation: Sequence[dict[str, Any]],
        chat_params: Any,
        tok_params: Any,
        engine_input: dict[str, Any],
    ) -> None:
        self._renderer = renderer
        self._conversation = conversation
        self._chat_params = chat_params
        self._tok_params = tok_params
        self._type = engine_input.get("type")
        self._token_ids = engine_input.get("prompt_token_ids")
        # What was found, or why nothing was.
        self._found: dict[tuple[str, ...], Spans | str] = {}

    def has(self, role: str) -> bool:
        """Whether a message has the role."""
        return any(message["role"] == role for message in self._conversation)

    def locate(self, roles: tuple[str, ...]) -> Spans:
        """The tokens of all messages with these roles; none if there are no such messages.

        Raises:
            NotLocatedError: Such a message cannot be found in the prompt.
        """
        if roles not in self._found:
            with self._keeping_failures(roles):
                marked = self._mark(roles)
                if marked.num_marked:
                    _, prompt = self._renderer.render_messages(marked.messages, self._chat_params)
                    marked.read(prompt)
                    text = {"prompt": marked.text}
                    tokens = self._renderer.tokenize_prompt(text, self._offsets())
                    self._found[roles] = self._spans(marked, tokens)
        found = self._found[roles]
        if isinstance(found, str):
            raise NotLocatedError(found)
        return found

    async def prepare(self, roles: tuple[str, ...]) -> None:
        """Do what `locate` needs, without holding up the event loop."""
        if roles in self._found:
            return
        with self._keeping_failures(roles):
            marked = self._mark(roles)
            if marked.num_marked:
                _, prompt = await self._renderer.render_messages_async(
                    marked.messages, self._chat_params
                )
                marked.read(prompt)
                text = {"prompt": marked.text}
                tokens = await self._renderer.tokenize_prompt_async(text, self._offsets())
                self._found[roles] = self._spans(marked, tokens)

    @contextmanager
    def _keeping_failures(self, roles: tuple[str, ...]) -> Iterator[None]:
        self._found[roles] = ()
        try:
            yield
        except NotLocatedError as error:
            self._found[roles] = str(error)
        except Exception:
            logger.exception("kvsieve: could not look for messages in a prompt")
            self._found[roles] = "the chat could not be rendered with marks"
        except BaseException:
            del self._found[roles]
            raise

    def _mark(self, roles: tuple[str, ...]) -> MarkedChat:
        if self._type != "token" and any(map(self.has, roles)):
            raise NotLocatedError("the prompt is not text alone")
        return MarkedChat(self._conversation, roles)

    def _offsets(self) -> Any:
        params = self._tok_params or self._renderer.default_chat_tok_params
        return dataclasses.replace(params, return_token_offsets=True)

    def _spans(self, marked: MarkedChat, tokens: dict[str, Any]) -> Spans:
        if tokens.get("prompt_token_ids") != self._token_ids:
            raise NotLocatedError("the chat template writes other text when it is marked")
        offsets = tokens.get("prompt_token_offsets")
        if offsets is None:
            raise NotLocatedError("the tokenizer does not say which characters a token has")
        return marked.token_spans(offsets)


def _render_chat(
    stock: Callable[..., Any], renderer: Any, conversations: Any, *args: Any, **kwargs: Any
) -> Any:
    result = stock(renderer, conversations, *args, **kwargs)
    return _remember(renderer, result, *args, **kwargs)


async def _render_chat_async(
    stock: Callable[..., Awaitable[Any]],
    renderer: Any,
    conversations: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    result = await stock(renderer, conversations, *args, **kwargs)
    return _remember(renderer, result, *args, **kwargs)


def _remember(
    renderer: Any, result: Any, chat_params: Any, tok_params: Any = None, **kwargs: Any
) -> Any:
    if is_configured(renderer.config.additional_config):
        for conversation, engine_input in zip(*result, strict=True):
            engine_input[_CHAT] = RenderedChat(
                renderer, conversation, chat_params, tok_params, engine_input
            )
    return result


async def _preprocess_chat(
    stock: Callable[..., Awaitable[Any]], online: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """`OnlineRenderer.preprocess_chat`, which then finds and checks what is protected.

    Raises:
        VLLMValidationError: The request's `kv_budget` or `kv_protect` is wrong.
    """
    result = await stock(online, request, *args, **kwargs)
    vllm_config = online.renderer.config
    # Requests that only tokenize have no such field.
    if not hasattr(request, "vllm_xargs") or not is_configured(vllm_config.additional_config):
        return result
    config = sieve_config(vllm_config)
    with refusing(KV_BUDGET_KEY):
        kv_budget = requested_budget(request.vllm_xargs)
        treat("sieve", config, kv_budget, vllm_config.cache_config.block_size)
    for engine_input in result[1]:
        with refusing(KV_PROTECT_KEY):
            wish, _ = _wish(config, request.vllm_xargs)
            chat = engine_input.get(_CHAT)
            if chat is not None and wish.roles:
                await chat.prepare(wish.roles)
            if engine_input["type"] == "token":
                num_tokens = len(engine_input["prompt_token_ids"])
                protected_spans(vllm_config, request.vllm_xargs, engine_input, num_tokens)
    return result


def protected_spans(
    vllm_config: Any, extra_args: Any, engine_input: Any, prompt_tokens: int
) -> Spans | None:
    """What is protected of one request's prompt.

    Args:
        vllm_config: vLLM's configuration, with our settings.
        extra_args: The request's `extra_args`.
        engine_input: Its prompt, as vLLM rendered it.
        prompt_tokens: Length of the prompt.

    Returns:
        The spans; None if neither the client nor the operator wishes for any.

    Raises:
        ValueError: `kv_protect` cannot be read or leaves the prompt, roles that the client named
            cannot be located, or some layer stores less than what is protected.
    """
    config = sieve_config(vllm_config)
    wish, is_clients = _wish(config, extra_args)
    chat: Any = engine_input.get(_CHAT) if isinstance(engine_input, dict) else None
    if not is_clients and (chat is None or not wish.roles):
        return None
    spans = wish.spans
    if wish.roles:
        found = (
            _clients_roles(chat, wish.roles) if is_clients else _operators_roles(chat, wish.roles)
        )
        spans = merged([*spans, *found])
    block_size = vllm_config.cache_config.block_size
    # Whether a request is valid must not depend on the mode, which may change meanwhile.
    treatment = treat(
        "sieve", config, requested_budget(extra_args), block_size, spans or None, prompt_tokens
    )
    if spans and treatment.mode != "full":
        policy = sieve_policy(vllm_config)
        check_room(
            prompt_tokens,
            count_protected(prompt_tokens, spans, policy.num_sink_tokens, policy.num_recent_tokens),
            functools.partial(smallest_stored, config, treatment.budget, prompt_tokens, block_size),
            max_budget=config.max_budget,
            operators_roles=() if is_clients else wish.roles,
        )
    return spans


def carry_spans(request: Any, spans: Spans) -> None:
    """Put resolved spans into an `EngineCoreRequest`, in the place of the client's wish."""
    # Neither the caller's parameters nor their `extra_args` are changed.
    params = copy.copy(request.sampling_params)
    carried = [list(span) for span in spans] or NOTHING
    params.extra_args = {**(params.extra_args or {}), KV_PROTECT_KEY: carried}
    request.sampling_params = params


@contextmanager
def refusing(parameter: str) -> Iterator[None]:
    """Answer a `ValueError` in here with status 400.

    Args:
        parameter: What the client gave wrongly.
    """
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter=parameter) from None


def _wish(config: SieveConfig, extra_args: Any) -> tuple[Protection, bool]:
    """What is to be protected, and whether it is the client who says so."""
    asked = requested_protection(extra_args)
    if asked is None:
        return Protection(roles=config.protect_roles), False
    return parse_protection(asked), True


def _clients_roles(chat: RenderedChat | None, roles: tuple[str, ...]) -> Spans:
    """The messages of roles that a client named: all of them, or an error."""
    if chat is None:
        raise ValueError(
            f"{KV_PROTECT_KEY} names the role {roles[0]!r}, and only a chat whose messages this"
            " server renders has roles; name token spans such as '0:120'"
        )
    for role in roles:
        if role not in _USUAL_ROLES and not chat.has(role):
            near = difflib.get_close_matches(role, _USUAL_ROLES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{KV_PROTECT_KEY}: no message has the role {role!r}{hint}")
    if not any(map(chat.has, roles)):
        raise ValueError(f"{KV_PROTECT_KEY}: no message has the role {' or '.join(roles)}")
    try:
        return chat.locate(roles)
    except NotLocatedError as error:
        raise ValueError(
            f"{KV_PROTECT_KEY}: the messages of {', '.join(roles)} cannot be found in the prompt:"
            f" {error}; name token spans such as '0:120' (/tokenize shows the tokens)"
        ) from None


def _operators_roles(chat: RenderedChat, roles: tuple[str, ...]) -> Spans:
    """The messages of the operator's roles; what cannot be found is logged and goes without."""
    try:
        return chat.locate(roles)
    except NotLocatedError as error:
        _warn_once(f"{', '.join(roles)}: {error}")
        return ()


@functools.lru_cache(maxsize=16)
def _warn_once(what: str) -> None:
    logger.warning(
        "kvsieve: protect_roles: messages cannot be found in some prompts, and are not protected"
        " there (said once): %s",
        what,
    )
