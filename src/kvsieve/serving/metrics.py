"""What a server's `/metrics` says."""

from __future__ import annotations

import re
from dataclasses import dataclass

import httpx

from kvsieve.serving.server import ServerError

_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Pool:
    """The server's KV-cache pool, from `vllm:cache_config_info`.

    Attributes:
        num_blocks: Blocks that requests can hold.
        block_size: Tokens of a block.
        pool_bytes: Bytes of the pool; a block has `pool_bytes / (num_blocks + 1)` of them, or a
            little less.
    """

    num_blocks: int
    block_size: int
    pool_bytes: int


def parse_metrics(text: str) -> dict[str, tuple[float, dict[str, str]]]:
    """Prometheus text as name to (value, labels); the last sample of a name wins."""
    found: dict[str, tuple[float, dict[str, str]]] = {}
    for line in text.splitlines():
        if match := _SAMPLE.match(line):
            labels = dict(_LABEL.findall(match["labels"] or ""))
            found[match["name"]] = (float(match["value"]), labels)
    return found


def read_pool(http: httpx.Client, url: str) -> Pool:
    """The pool as the server at `url` describes it.

    Raises:
        ServerError: It does not describe it as vLLM 0.32 does.
    """
    metrics = parse_metrics(http.get(f"{url}/metrics").text)
    try:
        labels = metrics["vllm:cache_config_info"][1]
        return Pool(
            # vLLM counts its null block too, and leaves it out of the usage.
            num_blocks=int(labels["num_gpu_blocks"]) - 1,
            block_size=int(labels["block_size"]),
            pool_bytes=int(labels["kv_cache_memory_bytes"]),
        )
    except (KeyError, ValueError) as error:
        raise ServerError(
            f"{url}/metrics describes no KV-cache pool (vllm:cache_config_info: {error!r})."
            " kvsieve reads what vLLM 0.32 writes there"
        ) from error
