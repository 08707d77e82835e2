"""Write the kept sets that kvpress chooses on SmolLM2-135M-Instruct.

kvpress (NVIDIA, Apache-2.0) is a second implementation of methods that kvsieve also has. It pins
another Transformers than kvsieve's, so it runs here, once, in an environment of its own, and its
choices are committed: `kvpress_301.npz` and `kvpress_703.npz`. `kept.py` reads them.

Made with Python 3.11, torch 2.13.0 (CPU), transformers 5.2.0, numpy 2.4.6 and kvpress 0.5.5:

    python -m venv /tmp/kvpress-venv
    /tmp/kvpress-venv/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    /tmp/kvpress-venv/bin/pip install kvpress==0.5.5 transformers==5.2.0
    OMP_NUM_THREADS=1 /tmp/kvpress-venv/bin/python tests/thirdparty/make_fixtures.py MODEL

MODEL is the folder that `kvsieve demo` makes, ~/.cache/kvsieve/models/SmolLM2-135M-Instruct.

How the choices are read off: kvpress cuts a layer's cache in a hook after the layer attended, so
the keys of a pressed cache are rows of the full cache, which a run without a press gives. Each
stored row is looked up there, bit for bit. That it is always found shows as well that every
layer's keys come from the whole prompt, whatever the layers before it dropped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvpress import (
    ChunkKVPress,
    CriticalKVPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

HERE = Path(__file__).parent

DOCUMENT = HERE.parents[1] / "src" / "kvsieve" / "demo" / "document.txt"
"""Public-domain English (its origin is told in kvsieve.demo.document)."""

NEAR = 1e-3
"""Positions whose score is this close to the threshold, relatively, are written down."""


@dataclass(frozen=True)
class Prompt:
    """A stretch of the document.

    Attributes:
        first: Its first token.
        num_tokens: Its length; no multiple of a chunk's.
        keep: Tokens that a layer stores, per KV head.
        pyramid_keep: Nominal tokens of PyramidKV's cases; from here its pyramid is one with
            either window.
    """

    first: int
    num_tokens: int
    keep: int
    pyramid_keep: int


PROMPTS = (
    Prompt(first=0, num_tokens=301, keep=120, pyramid_keep=170),
    Prompt(first=1500, num_tokens=703, keep=240, pyramid_keep=400),
)


@dataclass(frozen=True)
class Case:
    """A press and its parameters.

    Attributes:
        name: Unique.
        press: The class of the press; with `inner`, the one that wraps.
        parameters: What the press is built with.
        inner: Parameters of the SnapKVPress inside, for a prompt; None if there is none.
        keep: Nominal tokens to keep; None for the prompt's.
    """

    name: str
    press: Callable[..., Any]
    parameters: dict[str, Any]
    inner: Callable[[Prompt], dict[str, Any]] | None = None
    keep: Callable[[Prompt], int] = lambda prompt: prompt.keep


def _pyramid(prompt: Prompt) -> int:
    return prompt.pyramid_keep


def _snap(window_size: int, kernel_size: int) -> Callable[[Prompt], dict[str, Any]]:
    return lambda prompt: {"window_size": window_size, "kernel_size": kernel_size}


def _snap_ending_with_a_chunk(
    chunk_length: int, more_chunks: int, kernel_size: int
) -> Callable[[Prompt], dict[str, Any]]:
    """A window of whole chunks and the rest of the prompt.

    Where a chunk is cut by the window, ChunkKVPress gives it a mean of real scores and of the
    value that forces the window, which is no definition that anyone else shares.
    """
    return lambda prompt: {
        "window_size": prompt.num_tokens % chunk_length + more_chunks * chunk_length,
        "kernel_size": kernel_size,
    }


_SNAP_DEFAULT = {"window_size": 64, "kernel_size": 5}
_SNAP_PAPER = {"window_size": 32, "kernel_size": 7}
_EXPECTED_DEFAULT = {
    "n_future_positions": 512,
    "n_sink": 4,
    "use_covariance": True,
    "use_vnorm": True,
    "epsilon": 0.0,
}

CASES = (
    Case("snapkv", SnapKVPress, _SNAP_DEFAULT),
    Case("snapkv-32-7", SnapKVPress, _SNAP_PAPER),
    Case("pyramidkv", PyramidKVPress, {**_SNAP_DEFAULT, "beta": 20}, keep=_pyramid),
    Case(
        "pyramidkv-8-7",
        PyramidKVPress,
        {"window_size": 8, "kernel_size": 7, "beta": 20},
        keep=lambda prompt: prompt.keep + 60,
    ),
    # Its window is more than the smallest layer would get, so it falls back to equal counts.
    Case("pyramidkv-uniform", PyramidKVPress, {**_SNAP_PAPER, "beta": 20}),
    Case("tova", TOVAPress, {}),
    Case("knorm", KnormPress, {}),
    Case("keydiff", KeyDiffPress, {}),
    Case("streaming", StreamingLLMPress, {"n_sink": 4}),
    Case("streaming-0", StreamingLLMPress, {"n_sink": 0}),
    Case("expected", ExpectedAttentionPress, _EXPECTED_DEFAULT),
    Case(
        "expected-mean",
        ExpectedAttentionPress,
        {**_EXPECTED_DEFAULT, "n_future_positions": 128, "use_covariance": False, "epsilon": 0.02},
    ),
    Case(
        "expected-attention-only",
        ExpectedAttentionPress,
        {**_EXPECTED_DEFAULT, "n_sink": 16, "use_vnorm": False},
    ),
    Case("critical", CriticalKVPress, {"epsilon": 1e-4, "first_stage_ratio": 0.5}, _snap(32, 7)),
    Case(
        "critical-16-5", CriticalKVPress, {"epsilon": 1e-3, "first_stage_ratio": 0.25}, _snap(16, 5)
    ),
    Case("chunkkv", ChunkKVPress, {"chunk_length": 20}, _snap_ending_with_a_chunk(20, 1, 7)),
    Case("chunkkv-10", ChunkKVPress, {"chunk_length": 10}, _snap_ending_with_a_chunk(10, 3, 5)),
)


def make_press(case: Case, prompt: Prompt) -> tuple[Any, int, float]:
    """The press, the nominal count and the compression ratio that gives it.

    kvpress keeps `int(n * (1 - ratio))` tokens; half a token more makes that exact in floating
    point. PyramidKVPress rounds instead of cutting off, so there the ratio is the plain one.
    """
    keep = case.keep(prompt)
    extra = 0.0 if case.press is PyramidKVPress else 0.5
    ratio = 1 - (keep + extra) / prompt.num_tokens
    if case.inner is None:
        return case.press(compression_ratio=ratio, **case.parameters), keep, ratio
    inner = SnapKVPress(compression_ratio=ratio, **case.inner(prompt))
    return case.press(inner, **case.parameters), keep, ratio


def listen(press: Any) -> list[np.ndarray]:
    """Record the scores that a press gives, [num_kv_heads, n] float32 per call."""
    heard: list[np.ndarray] = []
    score = press.score

    def scored(*args: Any, **kwargs: Any) -> torch.Tensor:
        scores: torch.Tensor = score(*args, **kwargs)
        # CriticalKV changes its inner press's scores in place afterwards.
        heard.append(scores[0].float().numpy().copy())
        return scores

    press.score = scored
    return heard


@torch.no_grad()
def caches(model: Any, ids: list[int], press: Any | None) -> tuple[torch.Tensor, ...]:
    """The keys that each layer stores of a prompt, [num_kv_heads, stored, head_size]."""
    cache = DynamicCache(config=model.config)
    batch = torch.tensor([ids])
    if press is None:
        model.model(input_ids=batch, past_key_values=cache, use_cache=True)
    else:
        with press(model):
            model.model(input_ids=batch, past_key_values=cache, use_cache=True)
    return tuple(layer.keys[0] for layer in cache.layers)


def find_rows(stored: torch.Tensor, full: torch.Tensor) -> np.ndarray:
    """Whether each position is stored, [num_kv_heads, n] bool.

    Raises:
        RuntimeError: A stored key is no key of the full cache, or not of one position alone.
    """
    kept = np.zeros(full.shape[:2], dtype=bool)
    for head in range(full.shape[0]):
        place: dict[bytes, int] = {}
        for position, row in enumerate(full[head].numpy()):
            place[row.tobytes()] = position
        if len(place) != full.shape[1]:
            raise RuntimeError("two positions have the same key")
        for row in stored[head].numpy():
            try:
                kept[head, place[row.tobytes()]] = True
            except KeyError:
                raise RuntimeError("a stored key is no key of the full prompt") from None
    if (kept.sum(axis=1) != stored.shape[1]).any():
        raise RuntimeError("a position is stored twice")
    return kept


def near_threshold(scores: np.ndarray, chosen: np.ndarray) -> list[tuple[int, int, float]]:
    """Positions that a small change of scores would move across the threshold.

    Args:
        scores: [num_kv_heads, n].
        chosen: [num_kv_heads, n] bool, the positions of the highest scores.

    Returns:
        (head, position, gap) of each that is near. The gap of a chosen position is how far its
        score is above the best of those not chosen, the gap of another one how far it is below
        the worst chosen, relative to the larger of the two scores.
    """
    found = []
    for head in range(scores.shape[0]):
        row, inside = scores[head].astype(np.float64), chosen[head]
        edge = np.where(inside, row[~inside].max(), row[inside].min())
        difference = np.where(inside, row - edge, edge - row)
        if (difference < 0).any():
            raise RuntimeError("a position was chosen over one with a higher score")
        largest = np.maximum(np.maximum(np.abs(row), np.abs(edge)), np.finfo(np.float64).tiny)
        gap = difference / largest
        found += [(head, int(position), gap[position]) for position in np.flatnonzero(gap <= NEAR)]
    return found


def top(scores: np.ndarray, count: int) -> np.ndarray:
    """The highest `count` scores of each row as a mask; ties as the sort leaves them."""
    mask = np.zeros(scores.shape, dtype=bool)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    np.put_along_axis(mask, order, True, axis=1)
    return mask


def near_ties(
    case: Case, press: Any, kept: np.ndarray, heard: dict[str, np.ndarray], num_tokens: int
) -> list[tuple[int, int, float]]:
    """`near_threshold` of each choice that a press makes in one layer."""
    if case.press is ChunkKVPress:
        return _near_chunks(heard["inner"], kept, press.chunk_length)
    found = near_threshold(heard["press"], kept)
    if case.press is CriticalKVPress:
        ratio = press.compression_ratio
        first = max(1, int((1 - ratio) * num_tokens * press.first_stage_ratio))
        found += near_threshold(heard["inner"], top(heard["inner"], first))
    return found


def _near_chunks(
    scores: np.ndarray, kept: np.ndarray, chunk_length: int
) -> list[tuple[int, int, float]]:
    """Near ties between chunks, told of each of their positions and for every head."""
    starts = range(0, scores.shape[1], chunk_length)
    ends = [min(start + chunk_length, scores.shape[1]) for start in starts]
    means = np.array(
        [[scores[:, a:b].sum(axis=0).mean() for a, b in zip(starts, ends, strict=True)]]
    )
    chosen = np.array([[kept[0, start] for start in starts]])
    return [
        (head, position, gap)
        for _, chunk, gap in near_threshold(means, chosen)
        for head in range(scores.shape[0])
        for position in range(starts[chunk], ends[chunk])
    ]


def capture(
    model: Any, prompt: Prompt, ids: list[int], full: tuple[torch.Tensor, ...], case: Case
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Run a case: its description, and its arrays."""
    press, keep, ratio = make_press(case, prompt)
    heard = {"press": listen(press)} if case.press is not ChunkKVPress else {}
    if case.inner is not None:
        heard["inner"] = listen(press.press)
    stored = caches(model, ids, press)
    kept = np.stack([find_rows(*pair) for pair in zip(stored, full, strict=True)])
    near = [
        (layer, *found)
        for layer in range(len(full))
        for found in near_ties(
            case, press, kept[layer], {who: h[layer] for who, h in heard.items()}, len(ids)
        )
    ]
    description = {
        "press": case.press.__name__,
        "parameters": case.parameters,
        "inner": case.inner and {"press": "SnapKVPress", **case.inner(prompt)},
        "nominal": keep,
        "compression_ratio": ratio,
        "kept": kept.sum(axis=2)[:, 0].tolist(),
    }
    where = np.array([row[:3] for row in near], dtype=np.uint16).reshape(-1, 3)
    gaps = np.array([row[3] for row in near], dtype=np.float32)
    arrays = {"kept": np.packbits(kept, axis=-1), "near": where, "gaps": gaps}
    return description, {f"{case.name}/{name}": array for name, array in arrays.items()}


def main(folder: str) -> None:
    """Write a fixture per prompt."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    document = AutoTokenizer.from_pretrained(folder)(DOCUMENT.read_text(encoding="utf-8"))
    for prompt in PROMPTS:
        ids = document["input_ids"][prompt.first : prompt.first + prompt.num_tokens]
        full = caches(model, ids, None)
        arrays: dict[str, np.ndarray] = {
            # What a reader compares with its own run first: is it the same model?
            "key_norms": torch.stack([keys.norm(dim=-1) for keys in full]).numpy()[:, :, ::50]
        }
        cases = {}
        for case in CASES:
            cases[case.name], more = capture(model, prompt, ids, full, case)
            arrays |= more
            counts = cases[case.name]["kept"]
            print(
                f"{len(ids)} {case.name}: kept {counts[0]} .. {counts[-1]},"
                f" near ties {len(more[f'{case.name}/gaps'])},"
                f" within 1e-4 {(more[f'{case.name}/gaps'] <= 1e-4).sum()}"
            )
        about = {
            "made_with": {
                name: version(name) for name in ("kvpress", "transformers", "torch", "numpy")
            },
            "model": "SmolLM2-135M-Instruct",
            "num_layers": len(full),
            "num_kv_heads": full[0].shape[0],
            "token_ids": ids,
            "cases": cases,
        }
        about_bytes = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
        file = HERE / f"kvpress_{len(ids)}.npz"
        np.savez_compressed(file, about=about_bytes, **arrays)
        print(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
