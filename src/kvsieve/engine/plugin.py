"""vLLM's plugin entry point. Loading it changes nothing until it is configured."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from kvsieve.core.config import CONFIG_KEY, SieveConfig

CPU_BLOCK_SIZE = 32
"""Block size on CPUs unless the user chose one, in tokens. vLLM's 128 there would turn a
budget of 256 into up to 383 stored tokens."""

_PATCHED = "_kvsieve_patched"


def is_disabled() -> bool:
    """Whether `KVSIEVE_DISABLE` switches kvsieve off."""
    return os.environ.get("KVSIEVE_DISABLE", "0") not in ("", "0")


def register() -> None:
    """Hook vLLM's configuration. Called by vLLM in every process, any number of times.

    The only thing that is replaced is `EngineArgs.create_engine_config`, and the
    replacement passes through unless `additional_config` has a `kvsieve` key.
    """
    from vllm.engine.arg_utils import EngineArgs

    if getattr(EngineArgs.create_engine_config, _PATCHED, False):
        return
    stock = EngineArgs.create_engine_config

    @functools.wraps(stock)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        additional = self.additional_config
        if not isinstance(additional, dict) or CONFIG_KEY not in additional:
            return stock(self, *args, **kwargs)
        if is_disabled():
            logging.getLogger("vllm.kvsieve").warning(
                "kvsieve: KVSIEVE_DISABLE is set, so this is stock vLLM with the full KV cache"
            )
            return stock(self, *args, **kwargs)
        config = SieveConfig.parse(additional[CONFIG_KEY])
        _set_block_size(self)
        vllm_config = stock(self, *args, **kwargs)
        activate(vllm_config, config)
        return vllm_config

    setattr(create_engine_config, _PATCHED, True)
    EngineArgs.create_engine_config = create_engine_config


def _set_block_size(engine_args: Any) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and engine_args.block_size is None:
        engine_args.block_size = CPU_BLOCK_SIZE


def activate(vllm_config: Any, config: SieveConfig) -> None:
    """Point a finished vLLM configuration at our scheduler and worker.

    Raises:
        ConfigError: The configuration asks for something that kvsieve does not serve.
    """
    from kvsieve.engine.checks import WORKERS, refuse_unsupported

    refuse_unsupported(vllm_config)
    config.budget_rule(vllm_config.cache_config.block_size)
    scheduler = vllm_config.scheduler_config
    name = "SieveAsyncScheduler" if scheduler.async_scheduling else "SieveScheduler"
    scheduler.scheduler_cls = f"kvsieve.engine.scheduler.{name}"
    parallel = vllm_config.parallel_config
    parallel.worker_cls = WORKERS[parallel.worker_cls]
