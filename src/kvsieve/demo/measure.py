"""What one server says about one prompt: the answer, its timing, and the KV memory held.

Every number comes over HTTP from the server itself. Bytes are blocks (measured)
times the bytes of a block, which follow from the pool that the server reports.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from kvsieve.core.errors import KvsieveError
from kvsieve.demo.errors import DemoError
from kvsieve.serving.metrics import Pool, parse_metrics, read_pool
from kvsieve.serving.server import Server

POLL_S = 0.02
"""Between two looks at `/metrics`; the peak is visible for one decode step (0.1 s)."""

PEAK_TRIES = 3
"""Requests to spend on seeing the peak, should a busy machine make the polling miss it."""

MAX_TOKENS = 48

REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Answer:
    """A streamed answer.

    Attributes:
        text: The generated text.
        prompt_tokens: Length of the prompt with its chat template, in tokens.
        completion_tokens: Generated tokens, the end-of-turn token included.
        ttft_s: Time from sending the request to the first token, in seconds.
        tpot_s: Mean time between two tokens after the first, in seconds; 0 for one token.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class Memory:
    """Blocks held by the one running request.

    Attributes:
        blocks_before: The most held: when the prompt was finished and not yet sieved.
        blocks_after: Held at the end of the answer.
        bytes_per_block: Bytes of a block, over all layers that share it.
    """

    blocks_before: int
    blocks_after: int
    bytes_per_block: int

    @property
    def bytes_before(self) -> int:
        """`blocks_before` in bytes."""
        return self.blocks_before * self.bytes_per_block

    @property
    def bytes_after(self) -> int:
        """`blocks_after` in bytes."""
        return self.blocks_after * self.bytes_per_block


@dataclass(frozen=True)
class Measured:
    """Everything that the demonstration shows of one server.

    Attributes:
        answer: The streamed answer and its timing.
        repeated: The text of the second, unstreamed answer to the same prompt.
        memory: Blocks held during the second answer.
        proof: The sieve's own report on it; None from stock vLLM.
        start_seconds: Time that the server took to start.
    """

    answer: Answer
    repeated: str
    memory: Memory
    proof: dict[str, Any] | None
    start_seconds: float


def page_bytes(model: Path, block_size: int) -> int:
    """Bytes of one block in one layer: K and V, float32, of every KV head.

    Args:
        model: A Hugging Face folder.
        block_size: Tokens of a block.
    """
    config = json.loads((model / "config.json").read_text())
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * block_size * int(config["num_key_value_heads"]) * int(head_size) * 4


def num_layers(model: Path) -> int:
    """Number of decoder layers of the model in folder `model`."""
    return int(json.loads((model / "config.json").read_text())["num_hidden_layers"])


def measure(server: Server, model: Path, prompt: str, show: Callable[[str], None]) -> Measured:
    """Ask `server` the prompt twice: once streamed and timed, once for the proof.

    The metrics are polled during the second request only, so that reading them cannot
    disturb the timing of the first.

    Args:
        server: A healthy server.
        model: The folder that it serves.
        prompt: The user's message.
        show: Called with each piece of the streamed answer.

    Raises:
        DemoError: The server refused, or reported something unusable.
        ServerError: It died.
    """
    with (
        httpx.Client(trust_env=False, timeout=30.0) as http,
        # A client of ours, since a proxy from the environment is of no use on loopback.
        openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key="unused",
            max_retries=0,
            timeout=REQUEST_TIMEOUT_S,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        ) as client,
    ):
        try:
            # The first request of a process pays for allocations; it should not be ours.
            _create(client, server.served_name, "Hello", max_tokens=2)
            answer = _stream(client, server.served_name, prompt, show)
            pool = read_pool(http, server.url)
            block_bytes = bytes_per_block(pool, model)
            for _ in range(PEAK_TRIES):
                with _Poll(server.url) as poll:
                    response = _create(client, server.served_name, prompt)
                proof = _proof(response)
                memory = _memory(poll.usage, pool.num_blocks, block_bytes)
                freed = (proof or {}).get("blocks_freed", 0)
                if memory.blocks_before - memory.blocks_after >= freed / 2:
                    break  # Else the looks fell on either side of the peak.
        except (openai.APIError, httpx.HTTPError) as error:
            server.raise_if_dying()
            raise server.failure(f"did not answer ({type(error).__name__}: {error})") from error
        except KvsieveError:
            raise
        except Exception:
            # A stream that breaks off raises what openai's HTTP library of the day raises.
            server.raise_if_dying()
            raise
    repeated = response.choices[0].message.content or ""
    return Measured(answer, repeated, memory, proof, server.start_seconds)


def _proof(response: Any) -> dict[str, Any] | None:
    """The sieve's report in a response; vLLM carries it in a field that OpenAI's lack."""
    extra = response.model_extra or {}
    return (extra.get("kv_transfer_params") or {}).get("kvsieve")


def _memory(usage: list[float], num_blocks: int, bytes_per_block: int) -> Memory:
    """Blocks from the shares of the pool that were seen in use, oldest first."""
    if not usage:
        raise DemoError(
            "the server reported no KV cache in use while it answered: its metric"
            " vllm:kv_cache_usage_perc stayed 0 or is missing"
        )
    return Memory(
        blocks_before=round(max(usage) * num_blocks),
        blocks_after=round(usage[-1] * num_blocks),
        bytes_per_block=bytes_per_block,
    )


def _create(client: openai.OpenAI, model: str, prompt: str, max_tokens: int = MAX_TOKENS) -> Any:
    """One unstreamed chat completion, greedy."""
    return client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0.0,
        max_tokens=max_tokens,
    )


def _stream(client: openai.OpenAI, model: str, prompt: str, show: Callable[[str], None]) -> Answer:
    """One streamed chat completion, greedy, timed on this side of the connection."""
    pieces: list[str] = []
    first = last = 0.0
    usage: Any = None
    started = time.perf_counter()
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        if not chunk.choices:
            continue
        piece = chunk.choices[0].delta.content
        # The first chunk carries the role alone and comes before any token.
        if piece or chunk.choices[0].finish_reason:
            last = time.perf_counter()
            first = first or last
        if piece:
            pieces.append(piece)
            show(piece)
    if usage is None or not first:
        raise DemoError("the stream ended without a token or without its usage")
    tokens = usage.completion_tokens
    return Answer(
        text="".join(pieces).strip(),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=tokens,
        ttft_s=first - started,
        tpot_s=(last - first) / (tokens - 1) if tokens > 1 else 0.0,
    )


def bytes_per_block(pool: Pool, model: Path) -> int:
    """Bytes of a block of the pool, over all layers that share it.

    A block holds one page for each layer of a cache group; vLLM rounds the pool down to
    whole blocks, so the pages are counted.
    """
    page = page_bytes(model, pool.block_size)
    return pool.pool_bytes // ((pool.num_blocks + 1) * page) * page


class _Poll:
    """Reads the pool's usage in a thread while the block runs; `usage` holds what was seen."""

    def __init__(self, url: str) -> None:
        self.usage: list[float] = []
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvsieve-demo-poll", daemon=True)

    def __enter__(self) -> _Poll:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        with httpx.Client(trust_env=False, timeout=5.0) as http:
            while not self._stop.wait(POLL_S):
                try:
                    metrics = parse_metrics(http.get(f"{self._url}/metrics").text)
                except httpx.HTTPError:
                    continue  # The request itself will say so if the server is gone.
                usage = metrics.get("vllm:kv_cache_usage_perc", (0.0, {}))[0]
                if usage > 0:
                    self.usage.append(usage)
