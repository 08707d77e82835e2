"""Kept sets of a third party's implementation, and how another kept set differs from one.

The files `kvpress_<tokens>.npz` are written by `make_fixtures.py`, which says how. Each holds one
prompt: an array `about` (JSON in bytes: versions, token ids, the parameters of every case), norms
of keys to recognise the model by, and per case the kept positions and the near ties of its choice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).parent

PROMPTS = (301, 703)
"""Tokens of the prompts."""

NORM_STRIDE = 50
"""The keys of every so many tokens have their norm in a file."""

NEAR = 1e-4
"""Scores that differ by less, relative to the larger, may change places: float32 rounds hidden
states, and what is computed from them, otherwise in another version of Transformers."""


@dataclass(frozen=True)
class KeptCase:
    """What one press with one set of parameters kept of a prompt.

    Attributes:
        name: Unique in its prompt.
        press: The press' class in kvpress.
        parameters: The press' parameters by kvpress' names, without the compression ratio.
        inner: Parameters of the press that it wraps; empty if there is none.
        nominal: Tokens per layer and KV head that the compression ratio stands for.
        kept: [num_layers, num_kv_heads, n] bool.
        gaps: By (layer, head), by position: how far the position's score is from changing sides,
            relative to the score. Positions that are missing are further away than `NEAR`.
    """

    name: str
    press: str
    parameters: Mapping[str, Any]
    inner: Mapping[str, Any]
    nominal: int
    kept: npt.NDArray[np.bool_] = field(repr=False)
    gaps: Mapping[tuple[int, int], Mapping[int, float]] = field(repr=False)

    def num_kept(self, layer: int) -> int:
        """Tokens that a layer stores, per KV head."""
        return int(self.kept[layer, 0].sum())


@dataclass(frozen=True)
class KeptPrompt:
    """A prompt and every case's kept sets.

    Attributes:
        token_ids: The prompt.
        key_norms: [num_layers, num_kv_heads, ceil(n / NORM_STRIDE)] float32, L2 norms of the keys
            of every `NORM_STRIDE`-th token.
        cases: By name.
    """

    token_ids: tuple[int, ...] = field(repr=False)
    key_norms: npt.NDArray[np.float32] = field(repr=False)
    cases: Mapping[str, KeptCase]


@dataclass(frozen=True)
class KeptDifference:
    """How another kept set of one layer differs from a case's.

    Attributes:
        differing: Positions that one has and the other has not, over all KV heads.
        unexplained: (head, position) of those that are no near tie.
    """

    differing: int
    unexplained: tuple[tuple[int, int], ...]


def load_prompt(num_tokens: int) -> KeptPrompt:
    """The fixture of the prompt with so many tokens, one of `PROMPTS`."""
    with np.load(HERE / f"kvpress_{num_tokens}.npz") as arrays:
        about = json.loads(arrays["about"].tobytes())
        cases = {}
        for name, case in about["cases"].items():
            kept = np.unpackbits(arrays[f"{name}/kept"], axis=-1, count=num_tokens).astype(bool)
            gaps: dict[tuple[int, int], dict[int, float]] = {}
            for place, gap in zip(arrays[f"{name}/near"], arrays[f"{name}/gaps"], strict=True):
                layer, head, position = map(int, place)
                # CriticalKV chooses twice, so a position may be near twice.
                of_head = gaps.setdefault((layer, head), {})
                of_head[position] = min(float(gap), of_head.get(position, float("inf")))
            cases[name] = KeptCase(
                name=name,
                press=case["press"],
                parameters=case["parameters"],
                inner=case["inner"] or {},
                nominal=case["nominal"],
                kept=kept,
                gaps=gaps,
            )
        return KeptPrompt(tuple(about["token_ids"]), arrays["key_norms"], cases)


def kept_difference(
    case: KeptCase, layer: int, positions: Sequence[Sequence[int]]
) -> KeptDifference:
    """Compare a layer's kept positions with a case's.

    Args:
        case: What the third party kept.
        layer: The layer.
        positions: The positions kept, per KV head.

    Raises:
        ValueError: The numbers of heads or of positions are not the case's, or a position comes
            twice: sets of different size are no matter of near ties.
    """
    kept = np.zeros_like(case.kept[layer])
    if len(positions) != kept.shape[0]:
        raise ValueError(f"{len(positions)} KV heads, but {kept.shape[0]} in the case")
    for head, of_head in enumerate(positions):
        kept[head, list(of_head)] = True
        if not len(of_head) == kept[head].sum() == case.num_kept(layer):
            raise ValueError(
                f"head {head} keeps {len(of_head)} positions ({kept[head].sum()} different), but"
                f" {case.num_kept(layer)} in the case"
            )
    differing = [(int(h), int(p)) for h, p in np.argwhere(kept != case.kept[layer])]
    return KeptDifference(
        differing=len(differing),
        unexplained=tuple(
            (head, position)
            for head, position in differing
            if case.gaps.get((layer, head), {}).get(position, float("inf")) > NEAR
        ),
    )
