"""vLLM's serving classes, each made to show the reports that it would drop.

Not here, because vLLM shows the report by itself: completions and chat that are not
streamed (of one prompt), `/v1/responses` streamed or not, `/v1/messages` not streamed,
`/inference/v1/generate` not streamed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from kvsieve.engine.activation import is_configured
from kvsieve.engine.frontend.choices import finished_reports, joined, reports_of
from kvsieve.engine.frontend.protected_roles import install_early_checks
from kvsieve.engine.frontend.stream import CarriedOver, LastChunks, Tap, amended
from kvsieve.engine.wrapping import wrap

logger = logging.getLogger("vllm.kvsieve.frontend")

Events = AsyncGenerator[str, None]


def install_doors() -> None:
    """Open the doors when vLLM makes its serving classes, if the engine is configured.

    Not before, because plugins are loaded in every process of every vLLM, and importing
    the classes takes time.
    """
    from vllm.entrypoints.generate import api_router

    wrap(api_router, "init_generate_state", _init_generate_state)


async def _init_generate_state(
    stock: Callable[..., Awaitable[None]], engine_client: Any, *args: Any, **kwargs: Any
) -> None:
    if is_configured(engine_client.vllm_config.additional_config):
        open_doors()
        install_early_checks()
    await stock(engine_client, *args, **kwargs)


def open_doors() -> None:
    """Replace the methods of the serving classes that lose reports."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    wrap(OpenAIServingCompletion, "completion_stream_generator", _completion_stream)
    wrap(OpenAIServingCompletion, "request_output_to_completion_response", _completion_response)
    wrap(OpenAIServingChat, "chat_completion_stream_generator", _one_prompt_stream)
    wrap(OpenAIServingChatBatch, "chat_completion_full_generator_batch", _chat_batch_response)
    wrap(AnthropicServingMessages, "message_stream_converter", _message_stream)
    wrap(ServingTokens, "serve_tokens_stream_generator", _one_prompt_stream)


def _is_served(serving: Any) -> bool:
    """Whether the engine behind a serving class is configured for kvsieve."""
    return is_configured(serving.engine_client.vllm_config.additional_config)


def _completion_stream(
    stock: Callable[..., Events],
    serving: Any,
    request: Any,
    engine_inputs: Any,
    result_generator: AsyncIterator[tuple[int, Any]],
    *args: Any,
    **kwargs: Any,
) -> Events:
    if not _is_served(serving):
        return stock(serving, request, engine_inputs, result_generator, *args, **kwargs)
    chunks = LastChunks()
    num_choices = request.n or 1

    def observe(item: tuple[int, Any]) -> None:
        prompt_index, output = item
        chunks.add(finished_reports(output, first=prompt_index * num_choices))

    tapped = Tap(result_generator, observe)
    return amended(stock(serving, request, engine_inputs, tapped, *args, **kwargs), chunks)


def _one_prompt_stream(
    stock: Callable[..., Events],
    serving: Any,
    request: Any,
    result_generator: AsyncIterator[Any],
    *args: Any,
    **kwargs: Any,
) -> Events:
    if not _is_served(serving):
        return stock(serving, request, result_generator, *args, **kwargs)
    chunks = LastChunks()
    tapped = Tap(result_generator, lambda output: chunks.add(finished_reports(output)))
    return amended(stock(serving, request, tapped, *args, **kwargs), chunks)


def _message_stream(stock: Callable[..., Events], serving: Any, generator: Events) -> Events:
    """Anthropic's stream is a translated chat stream, and the translation drops our field."""
    if not _is_served(serving):
        return stock(serving, generator)
    carried = CarriedOver("message_delta")
    return amended(stock(serving, Tap(generator, carried.read)), carried)


def _completion_response(
    stock: Callable[..., Any], serving: Any, final_res_batch: Sequence[Any], *args: Any, **kw: Any
) -> Any:
    """Of several prompts, vLLM shows the report of the first."""
    response = stock(serving, final_res_batch, *args, **kw)
    if len(final_res_batch) > 1 and _is_served(serving):
        _show_all(response, final_res_batch)
    return response


async def _chat_batch_response(
    stock: Callable[..., Awaitable[Any]],
    serving: Any,
    request: Any,
    generators: Sequence[AsyncIterator[Any]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Of several conversations, vLLM shows no report."""
    if not _is_served(serving):
        return await stock(serving, request, generators, *args, **kwargs)
    last: dict[int, Any] = {}
    tapped = [Tap(source, partial(last.__setitem__, i)) for i, source in enumerate(generators)]
    response = await stock(serving, request, tapped, *args, **kwargs)
    # An ErrorResponse has no choices.
    if hasattr(response, "choices"):
        _show_all(response, [last[i] for i in sorted(last)])
    return response


def _show_all(response: Any, outputs: Sequence[Any]) -> None:
    """Put the reports of all choices of all prompts into a response."""
    try:
        reports = [report for output in outputs for report in reports_of(output)]
        if any(reports):
            response.kv_transfer_params = joined(response.kv_transfer_params, reports)
    except Exception:
        logger.exception("kvsieve: could not put the reports of several prompts into a response")
