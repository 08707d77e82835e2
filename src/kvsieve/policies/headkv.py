"""HeadKV (Fu et al. 2024, arXiv 2410.19258), as far as equal lengths allow."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvsieve.core.config import SieveConfig
from kvsieve.core.notation import COUNT, read_json
from kvsieve.policies.evidence import Evidence
from kvsieve.policies.method import Method
from kvsieve.policies.options import read_number
from kvsieve.policies.policy import Policy, Score
from kvsieve.policies.reduce import sum_of_group, weigh_heads
from kvsieve.policies.snapkv import SNAPKV

OPTIONS = {"head_scores": None, "beta": 1.005, "temp": 1.0}

MAX_TEMP = 10
"""Of two heads one of which has half of the other's score, it gets a thousandth. Far beyond it
all weights but the model's best heads' are 0, and the other groups count their heads alike."""


def read_head_scores(path: str | Path) -> list[list[float]]:
    """A table of head scores in the authors' format.

    Args:
        path: A JSON object with one entry per query head of the model, `"layer-head"` (both from
            0) to a score or to a list of scores, whose mean counts.

    Returns:
        [num_layers][num_heads], at least 0.

    Raises:
        ValueError: The file cannot be read or is no such table.
    """
    try:
        entries = read_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"head_scores: {path} cannot be read as JSON: {error}") from error
    if not isinstance(entries, dict) or not entries:
        raise ValueError(f"head_scores: {path} must hold an object of 'layer-head' to score")
    scores: dict[tuple[int, int], float] = {}
    for name, value in entries.items():
        layer, _, head = name.partition("-")
        if not (COUNT.match(layer) and COUNT.match(head)):
            shown = reprlib.repr(name)
            raise ValueError(f"head_scores: {shown} in {path} is no 'layer-head'")
        scores[int(layer), int(head)] = _score(name, value)
    num_layers, num_heads = (1 + max(number[axis] for number in scores) for axis in (0, 1))
    if len(scores) != num_layers * num_heads:
        raise ValueError(
            f"head_scores: {path} has {len(scores)} heads, but {num_layers} layers of {num_heads}"
            f" are {num_layers * num_heads}"
        )
    return [[scores[layer, head] for head in range(num_heads)] for layer in range(num_layers)]


def _score(name: str, value: Any) -> float:
    values = value if isinstance(value, list) else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, (int, float)):
            shown = reprlib.repr(one)
            raise ValueError(f"head_scores: the score of {name!r} is no number: {shown}")
    try:
        mean = sum(values) / len(values) if values else math.nan
    except OverflowError:
        mean = math.inf
    if not (math.isfinite(mean) and mean >= 0):
        shown = reprlib.repr(value)
        raise ValueError(f"head_scores: the score of {name!r} must be at least 0, got {shown}")
    return mean


def head_capacities(scores: Sequence[Sequence[float]], beta: float, temp: float) -> torch.Tensor:
    """HeadKV's capacity of every query head, as a multiple of the mean capacity.

    Of every head's budget the part 1/beta goes to a pool, which is dealt out by score.

    Args:
        scores: [num_layers][num_heads], at least 0.
        beta: At least 1; the larger, the more alike the heads.
        temp: Exponent of the scores.

    Returns:
        [num_layers, num_heads] float64, of mean 1.

    Raises:
        ValueError: All scores are 0.
    """
    table = torch.tensor(scores, dtype=torch.float64)
    if not bool((table > 0).any()):
        raise ValueError("head_scores: every score is 0")
    # The largest is 1, so neither their sum nor their powers can vanish.
    share = (table / table.max()).pow(temp)
    share = share / share.sum()
    return share * table.numel() / beta + (1 - 1 / beta)


def layer_shares(
    scores: Sequence[Sequence[float]], beta: float = 1.005, temp: float = 1.0
) -> list[float]:
    """What HeadKV's table gives each layer, as a multiple of the mean layer's budget.

    The policy does not use it: budgets per layer are settings (`layer_budgets`).
    """
    shares: list[float] = head_capacities(scores, beta, temp).mean(dim=1).tolist()
    return shares


def weighted_window_attention(capacities: torch.Tensor) -> Score:
    """SnapKV's score, each query head weighted with its part of the group's capacity."""

    def score(evidence: Evidence) -> torch.Tensor:
        attention = evidence.window_attention()
        num_heads = attention.shape[0] * attention.shape[1]
        num_layers, known_heads = capacities.shape
        if evidence.layer >= num_layers or num_heads != known_heads:
            raise ValueError(
                f"head_scores is a table of {num_layers} layers of {known_heads} query heads, and"
                f" layer {evidence.layer} of this model has {num_heads}"
            )
        weights = capacities[evidence.layer].to(attention.device, torch.float32)
        return weigh_heads(attention, weights.view(attention.shape[:2]))

    return score


def build(config: SieveConfig) -> Policy:
    """SnapKV, in which a query head counts as much as a table of heads says.

    Options:
        head_scores: Path of the table (`read_head_scores`). It belongs to one model: the authors
            measure how well each head retrieves, or retrieves and reasons.
        beta: The larger, the more alike the heads. The authors try 1.005 to 10; 1.005 is what
            their LongBench script runs.
        temp: Exponent of the scores, at most 10.

    Deviations: HeadKV gives every head a length of its own. **Every head of a layer keeps the same
    number of tokens here**, and capacities only weigh the query heads of a group against one
    another. What the table gives whole layers is left out as well; `layer_shares` computes it for
    `layer_budgets`. Sinks are forced. Not with tensor parallelism: a worker sees its own heads
    only, and says so.
    """
    beta = read_number(config, OPTIONS, "beta", at_least=1)
    temp = read_number(config, OPTIONS, "temp", at_least=0, at_most=MAX_TEMP)
    path = config.policy_options.get("head_scores", OPTIONS["head_scores"])
    if not isinstance(path, str) or not path:
        raise ValueError(
            "headkv needs head_scores, the path of a JSON table of the model's query heads:"
            ' {"layer-head": score, ...}'
        )
    capacities = head_capacities(read_head_scores(path), beta, temp)
    return Policy.with_settings(
        config, weighted_window_attention(capacities), reduce=sum_of_group, pools_heads=True
    )


HEADKV = Method(
    name="headkv",
    summary="SnapKV, query heads weighted by a table of the model's heads",
    source="arXiv 2410.19258",
    sees_question=True,
    build=build,
    defaults=SNAPKV.defaults,
    options=OPTIONS,
)
