"""Sizes of the measurements, the prompts, and the arms that they use."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pairing.spec import ArmSpec

KERNEL_BYTES = 4
"""Bytes of a float32."""


POOLS = ("tight", "plentiful")
"""Pools of the throughput measurement."""


@dataclass(frozen=True)
class ModelShape:
    """What of a model's configuration the memory for its cache depends on.

    Attributes:
        num_layers: Attention layers.
        num_heads: Query heads per layer.
        num_kv_heads: KV heads per layer.
        head_size: Size of a head.
        vocab_size: Size of the vocabulary.
        hidden_size: Size of a hidden state.
        intermediate_size: Inner size of a gated MLP.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int

    @property
    def layer_weights(self) -> int:
        """Weights of all layers that a token is multiplied with: projections and gated MLP."""
        projections = 2 * (self.num_heads + self.num_kv_heads) * self.head_size
        per_layer = self.hidden_size * (projections + 3 * self.intermediate_size)
        return self.num_layers * per_layer

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, in float32."""
        return self.num_layers * self.num_kv_heads * 2 * self.head_size * KERNEL_BYTES

    def pool_bytes(self, tokens: float, block_size: int = 32) -> int:
        """Bytes of a pool for `tokens` tokens, in whole blocks, with the null block."""
        blocks = math.ceil(tokens / block_size) + 1
        return blocks * block_size * self.bytes_per_token


def read_shape(model: str) -> ModelShape:
    """The shape in a model folder's `config.json`."""
    config = json.loads((Path(model) / "config.json").read_text())
    heads = config["num_attention_heads"]
    return ModelShape(
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads", heads),
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
    )


@dataclass(frozen=True)
class Sizes:
    """How much is measured. Tokens, unless a name says otherwise.

    Attributes:
        requests: Requests in a batch of the real model.
        prompt: Range of prompt lengths.
        output: Range of output lengths (throughput).
        tight_requests: Full requests that the tight pool holds.
        decode_steps: Steps of one arm's turn (decode, host, overhead's decode).
        scoring_prompts: Prompt lengths (scoring).
        host_batches: Decoding requests (host).
        host_full_layers: Counts of full layers (host).
        prune_prompts: Prompt lengths (prune).
        prune_batch: Lengths of prompt and answer (prune-throughput).
        prune_requests: Requests of that batch.
        repeats: Repeats, by measurement.
    """

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    tight_requests: float
    decode_steps: int
    scoring_prompts: tuple[int, ...]
    host_batches: tuple[int, ...]
    host_full_layers: tuple[int, ...]
    prune_prompts: tuple[int, ...]
    prune_batch: tuple[int, int]
    prune_requests: int
    repeats: dict[str, int]


FULL = Sizes(
    requests=8,
    prompt=(3000, 3500),
    output=(128, 200),
    tight_requests=2.5,
    decode_steps=8,
    scoring_prompts=(3000, 7000),
    host_batches=(32, 256),
    host_full_layers=(0, 3, 5, 6, 10),
    prune_prompts=(4000, 7000),
    prune_batch=(4000, 500),
    prune_requests=20,
    repeats={
        "throughput": 4,
        "decode": 10,
        "scoring": 5,
        "policies": 2,
        "overhead": 3,
        "host": 8,
        "prune": 4,
        "prune-throughput": 1,
    },
)
QUICK = Sizes(
    requests=4,
    prompt=(600, 700),
    output=(16, 24),
    tight_requests=2.5,
    decode_steps=4,
    scoring_prompts=(700,),
    host_batches=(32,),
    host_full_layers=(0, 3),
    prune_prompts=(600,),
    prune_batch=(600, 16),
    prune_requests=4,
    repeats={
        "throughput": 2,
        "decode": 4,
        "scoring": 2,
        "policies": 1,
        "overhead": 2,
        "host": 3,
        "prune": 2,
        "prune-throughput": 1,
    },
)


@dataclass(frozen=True)
class Options:
    """The command line, resolved.

    Attributes:
        model: Folder of the real model.
        shape: Its shape.
        sizes: How much is measured.
        budget: `budget` of the sieved arm, in tokens.
        seed: Seed of prompts and lengths.
        profile: Whether to profile the host time too.
        pools: Pools of the throughput measurement.
        policies: Policies whose costs are measured, beside SnapKV.
        calibration: File with the layers at which methods prune; None for the authors'.
    """

    model: str
    shape: ModelShape
    sizes: Sizes
    budget: int
    seed: int
    profile: bool
    pools: tuple[str, ...] = POOLS
    policies: tuple[str, ...] = ()
    calibration: str | None = None

    def random(self, *place: object) -> random.Random:
        """A generator that depends on the seed and on where it is used, on nothing else."""
        return random.Random(f"{self.seed}/{'/'.join(map(str, place))}")

    def prompt_ids(self, length: int, *place: object) -> list[int]:
        """A prompt of random tokens; costs depend on its length alone.

        The first and last tenth of the vocabulary are left out, where special tokens are.
        """
        generator = self.random("prompt", length, *place)
        low, high = self.shape.vocab_size // 10, self.shape.vocab_size * 9 // 10
        return [generator.randrange(low, high) for _ in range(length)]

    def batch(self, *place: object) -> tuple[list[list[int]], list[int]]:
        """Prompts and output lengths of one batch."""
        generator = self.random("batch", *place)
        sizes = self.sizes
        lengths = [generator.randint(*sizes.prompt) for _ in range(sizes.requests)]
        outputs = [generator.randint(*sizes.output) for _ in range(sizes.requests)]
        prompts = [self.prompt_ids(n, index, *place) for index, n in enumerate(lengths)]
        return prompts, outputs

    @property
    def longest(self) -> int:
        """The longest request of a batch."""
        return self.sizes.prompt[1] + self.sizes.output[1]

    def plentiful_pool(self) -> int:
        """Bytes of a pool that holds every request of a batch in full."""
        # vLLM refuses a pool that could not hold one request of max_model_len.
        return self.shape.pool_bytes(max(8192, 1.1 * self.sizes.requests * self.longest) + 512)

    def tight_pool(self) -> tuple[int, int]:
        """Bytes of a pool that holds a few requests in full, and the max_model_len it allows."""
        tokens = self.sizes.tight_requests * (sum(self.sizes.prompt) + sum(self.sizes.output)) / 2
        fits = int(tokens) // 32 * 32
        return self.shape.pool_bytes(tokens), min(8192, fits)

    def stock(
        self,
        name: str,
        pool_bytes: int,
        max_model_len: int = 8192,
        max_num_batched_tokens: int | None = None,
    ) -> ArmSpec:
        """A stock arm of the real model."""
        return self._arm(name, None, pool_bytes, max_model_len, max_num_batched_tokens)

    def sieved(
        self,
        name: str,
        pool_bytes: int,
        max_model_len: int = 8192,
        budget: int | None = None,
        settings: Mapping[str, Any] | None = None,
        max_num_batched_tokens: int | None = None,
    ) -> ArmSpec:
        """A sieved arm of the real model, with the default plan unless settings say otherwise."""
        sieve = {"budget": budget or self.budget, **(settings or {})}
        return self._arm(name, sieve, pool_bytes, max_model_len, max_num_batched_tokens)

    def _arm(
        self,
        name: str,
        sieve: dict[str, Any] | None,
        pool_bytes: int,
        max_model_len: int,
        max_num_batched_tokens: int | None,
    ) -> ArmSpec:
        return ArmSpec(
            name=name,
            model=self.model,
            sieve=None if sieve is None else tuple(sieve.items()),
            pool_bytes=pool_bytes,
            max_num_seqs=self.sizes.requests,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
        )
