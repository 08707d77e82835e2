"""vLLM's plugin entry point. Loading it changes nothing until it is configured."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from kvsieve.core.config import CONFIG_KEY, SieveConfig
from kvsieve.core.errors import ConfigError
from kvsieve.core.forcing import FORCED_TOKENS_KEY, check_forced_tokens
from kvsieve.core.protection import KV_PROTECT_KEY
from kvsieve.core.pruning import KV_PRUNE_KEY
from kvsieve.core.treatment import KV_BUDGET_KEY, requested_budget, requested_pruning, treat
from kvsieve.engine.activation import is_configured
from kvsieve.engine.frontend.protected_roles import (
    carry_spans,
    install_rendered_chats,
    protected_spans,
    refusing,
)
from kvsieve.engine.settings import model_pruning, sieve_config
from kvsieve.engine.wrapping import wrap
from kvsieve.policies import parse_settings

CPU_BLOCK_SIZE = 32
"""Block size on CPUs unless the user chose one, in tokens. vLLM's 128 there would turn a
budget of 256 into up to 383 stored tokens."""


def register() -> None:
    """Hook vLLM's configuration, its intake of requests and its front end.

    vLLM calls this in every process, any number of times. Whatever is wrapped passes
    through unless `additional_config` has a `kvsieve` key.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.input_processor import InputProcessor

    from kvsieve.engine.frontend.doors import install_doors
    from kvsieve.engine.frontend.metrics import install_metrics
    from kvsieve.engine.frontend.mode_call import install_mode_call
    from kvsieve.engine.frontend.mode_route import install_mode_route
    from kvsieve.engine.frontend.parallel import install_parallel_reports

    wrap(EngineArgs, "create_engine_config", _create_engine_config)
    wrap(InputProcessor, "process_inputs", _process_inputs)
    install_rendered_chats()
    install_mode_call()
    install_mode_route()
    install_doors()
    install_parallel_reports()
    install_metrics()


def _create_engine_config(
    stock: Callable[..., Any], engine_args: Any, *args: Any, **kwargs: Any
) -> Any:
    """`EngineArgs.create_engine_config`, with the sieve switched on where it is configured."""
    additional = engine_args.additional_config
    if not is_configured(additional):
        if isinstance(additional, dict) and CONFIG_KEY in additional:
            logging.getLogger("vllm.kvsieve").warning(
                "kvsieve: KVSIEVE_DISABLE is set, so this is stock vLLM with the full KV cache"
            )
        return stock(engine_args, *args, **kwargs)
    from vllm.platforms import current_platform

    config = parse_settings(additional[CONFIG_KEY])
    if current_platform.is_cpu() and engine_args.block_size is None:
        engine_args.block_size = CPU_BLOCK_SIZE
    vllm_config = stock(engine_args, *args, **kwargs)
    activate(vllm_config, config)
    return vllm_config


def _process_inputs(stock: Callable[..., Any], processor: Any, *args: Any, **kwargs: Any) -> Any:
    """`InputProcessor.process_inputs`, refusing requests that the sieve cannot serve.

    Every door of vLLM passes here in the process that talks to the client, and answers
    this kind of error with status 400.

    Raises:
        VLLMValidationError: The request cannot be served, or its `kv_budget`, `kv_protect` or
            `forced_tokens` are wrong.
    """
    vllm_config = processor.vllm_config
    if not is_configured(vllm_config.additional_config):
        return stock(processor, *args, **kwargs)
    from vllm.exceptions import VLLMValidationError

    call = inspect.signature(stock).bind_partial(processor, *args, **kwargs).arguments
    if call.get("resumable"):
        raise VLLMValidationError(
            "streaming input is not served together with kvsieve: a prompt that grows would move"
            " the start of what is kept; send the whole prompt in one request"
        )
    config = sieve_config(vllm_config)
    params = call.get("params")
    extra_args = getattr(params, "extra_args", None)
    block_size = vllm_config.cache_config.block_size
    with refusing(KV_BUDGET_KEY):
        treat(config.mode, config, requested_budget(extra_args), block_size)
    with refusing(KV_PRUNE_KEY):
        _check_pruning(vllm_config, config, requested_pruning(extra_args))
    with refusing(FORCED_TOKENS_KEY):
        forces = check_forced_tokens(
            extra_args,
            is_allowed=config.forced_tokens,
            vocab_size=vllm_config.model_config.get_vocab_size(),
            max_len=vllm_config.model_config.max_model_len,
        )
        if forces and getattr(params, "structured_outputs", None) is not None:
            raise ValueError(f"{FORCED_TOKENS_KEY} cannot follow a grammar: leave out one of them")
    request = stock(processor, *args, **kwargs)
    if request.sampling_params is not None:
        # What vLLM made of the prompt says how long it is, in whatever form it came.
        ids, embeds = request.prompt_token_ids, request.prompt_embeds
        num_tokens = len(ids if ids is not None else embeds)
        with refusing(KV_PROTECT_KEY):
            spans = protected_spans(vllm_config, extra_args, call.get("prompt"), num_tokens)
        if spans is not None:
            carry_spans(request, spans)
    return request


def _check_pruning(vllm_config: Any, config: SieveConfig, kv_prune: Any) -> None:
    """Refuse a request's `kv_prune` that the model or the server cannot serve."""
    if kv_prune is None:
        return
    block_size = vllm_config.cache_config.block_size
    # In whatever mode the server is: a request that is valid in one is valid in all.
    wanted = treat("sieve", config, None, block_size, kv_prune=kv_prune).prune
    pruning = model_pruning(vllm_config)
    if wanted is not None and pruning is not None:
        try:
            pruning.settings(wanted, vllm_config.model_config.get_total_num_hidden_layers())
        except ConfigError as error:
            raise ValueError(f"{KV_PRUNE_KEY} {'; '.join(error.reasons)}") from None


def activate(vllm_config: Any, config: SieveConfig) -> None:
    """Point a finished vLLM configuration at our scheduler and worker.

    Raises:
        ConfigError: The configuration asks for something that kvsieve does not serve.
    """
    from kvsieve.engine.checks import refuse_unsupported
    from kvsieve.engine.support import WORKERS

    refuse_unsupported(vllm_config)
    config.budget_rule(vllm_config.cache_config.block_size)
    if pruning := model_pruning(vllm_config):
        pruning.settings(pruning.prune, vllm_config.model_config.get_total_num_hidden_layers())
    if config.forced_tokens:
        from kvsieve.engine.forcing import install_forcing

        install_forcing(vllm_config)
    scheduler = vllm_config.scheduler_config
    name = "SieveAsyncScheduler" if scheduler.async_scheduling else "SieveScheduler"
    scheduler.scheduler_cls = f"kvsieve.engine.scheduler.{name}"
    parallel = vllm_config.parallel_config
    parallel.worker_cls = WORKERS[parallel.worker_cls]
