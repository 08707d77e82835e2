"""Compare a pruned request with the independent reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.agreement import SCORE_EPSILON
from tests.engine.engines import Generated
from tests.oracle.prune_oracle import PruneParams, PruneResult, run
from tests.oracle.snapkv_formula import kept_difference

BUDGET = 128
METHODS = ("fastkv", "asl", "gemfilter", "asl-two-pass")
OUTPUT = 16
# As their authors have them; the kept count is the budget's.
AUTHORS: dict[str, dict[str, Any]] = {
    "fastkv": {"window": 8, "pool": ("max", 7)},
    "asl": {"window": 32, "pool": ("avg", 7)},
    "gemfilter": {"window": 1, "pool": ("avg", 5)},
    "asl-two-pass": {"window": 32, "pool": ("avg", 7)},
}
TIE = 1e-3
"""Two best log-probabilities closer than this are a near tie, which rounding may decide."""


def stored(prompt_tokens: int, budget: int = BUDGET) -> int:
    """What a prompt keeps, in whole blocks dropped."""
    return prompt_tokens - max(0, (prompt_tokens - budget) // 32 * 32)


def check(
    reference: PruneResult, generated: Generated, inputs: dict[int, torch.Tensor] | None = None
) -> int:
    """Fail unless the engine did what the reference did.

    Two scores closer than `SCORE_EPSILON`, relative, are a near tie like two log-probabilities
    closer than `TIE`; what follows one is not compared.

    Returns:
        Near ties that were decided otherwise: 0 or 1.
    """
    report = generated.report["pruned"]
    assert report["layer"] == reference.selected_layer
    if reference.positions is None:
        assert report["reason"] == "never"
    else:
        first = 0 if "gemfilter" in report["method"] or "two" in report["method"] else None
        first = report["layer"] + 1 if first is None else first
        kept = generated.kept[max(generated.kept)]
        different, explained = kept_difference(
            reference.positions[None],
            kept[:1],
            reference.scores[None],
            SCORE_EPSILON,
            num_sink_tokens=0,
        )
        assert different == explained, f"{different} of {len(reference.positions)} positions"
        if different:
            # Another token goes on, so nothing that follows has to be the same.
            assert different == 2
            return 1
        assert all(torch.equal(generated.kept[n], kept) for n in generated.kept if n >= first)
        assert report["kept_tokens"] == len(reference.positions)
        if inputs is not None:
            ours = inputs[first]
            assert ours.shape == reference.deep_inputs.shape
            assert torch.allclose(ours, reference.deep_inputs, rtol=1e-3, atol=1e-3)
        for number, positions in enumerate(reference.kept_per_layer[:first]):
            # Near ties of per-head scores may differ; the sieve's own test counts them.
            same = (generated.kept[number] == positions).float().mean()
            assert same > 0.995, f"layer {number}"
    if report["relative_variance"]:
        for layer, value in report["relative_variance"].items():
            assert value == pytest.approx(reference.relative[int(layer)], rel=1e-2), layer
    for step, token in enumerate(generated.token_ids):
        best = reference.logprobs[step].topk(2)
        if token != int(best.indices[0]):
            assert float(best.values[0] - best.values[1]) < TIE, f"token {step}"
            return 1
        assert abs(generated.logprobs[step] - float(best.values[0])) < 5e-3
    return 0


def reference_of(
    model: Any, prompt: list[int], method: str, num_tokens: int = OUTPUT, **changes: Any
) -> PruneResult:
    """What the reference makes of a prompt, with the authors' parameters unless changed."""
    kept = stored(len(prompt))
    layers = model.config.num_hidden_layers
    layer = {"fastkv": round(15 * layers / 32), "gemfilter": round(13 * layers / 32)}.get(method)
    values = {**AUTHORS[method], "layer": layer, "kept": kept, **changes}
    if method in ("gemfilter", "asl-two-pass"):
        values["contiguous_from"] = len(prompt) - kept
    return run(model, prompt, PruneParams(method=method, **values), num_tokens)


def load(path: str) -> Any:
    """A model in Transformers, as the reference wants it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    return model.float().eval()
