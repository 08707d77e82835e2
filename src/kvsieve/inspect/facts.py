"""What an inspection found, as plain JSON values: the file of `--json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvsieve.core.budget import sieve_start
from kvsieve.core.report import MassLost
from kvsieve.inspect.activations import TokenActivations
from kvsieve.inspect.concentration import HeadSpread
from kvsieve.inspect.prompt import TOKEN_KINDS, TokenKind
from kvsieve.inspect.reading import Reading
from kvsieve.inspect.recommend import Candidate, as_shell, serve_command
from kvsieve.inspect.run import Inspection, PromptFindings


@dataclass(frozen=True)
class KindShare:
    """What tokens of one kind are and get.

    Attributes:
        kind: The kind.
        tokens: Tokens of the prompt that are of it.
        massive: Those of them with a massive activation.
        attention: Share of the window's attention that they get together, mean over layers.
    """

    kind: TokenKind
    tokens: int
    massive: int
    attention: float


def kind_shares(findings: PromptFindings) -> list[KindShare]:
    """Tokens, massive activations and attention by kind of token; kinds without tokens left out."""
    reading = findings.reading
    kinds = reading.prompt.kinds
    attention = torch.stack(reading.attention).mean(dim=0)
    massive = {p for one in reading.activations for p in one.massive_positions}
    shares = []
    for kind in TOKEN_KINDS:
        positions = [position for position, one in enumerate(kinds) if one == kind]
        if positions:
            shares.append(
                KindShare(
                    kind=kind,
                    tokens=len(positions),
                    massive=len(massive & set(positions)),
                    attention=float(attention[positions].sum()),
                )
            )
    return shares


def attention_of(reading: Reading, position: int) -> tuple[float, float]:
    """Share of the window's attention that a position gets: mean and largest over the layers."""
    shares = [float(layer[position]) for layer in reading.attention]
    return sum(shares) / len(shares), max(shares)


def predicted_loss(inspection: Inspection, reading: Reading) -> MassLost | None:
    """What the engine will report for a prompt under the recommended plan.

    Returns:
        None if there is no plan, or the prompt fits its budget.
    """
    best = inspection.recommendation.best
    if best is None:
        return None
    if not sieve_start(reading.num_tokens, best.budget, reading.probe.block_size):
        return None
    index = inspection.budgets.index(best.budget)
    layers = inspection.survey.layers
    shares = tuple(reading.lost[layers.index(layer)][index] for layer in best.plan.sieved)
    return MassLost.of(best.plan.sieved, shares)


def as_facts(inspection: Inspection) -> dict[str, Any]:
    """The inspection as JSON values."""
    settings, seen = inspection.settings, inspection.survey
    config = settings.config
    return {
        "model": inspection.model,
        "dtype": inspection.dtype,
        "device": inspection.device,
        "settings": {
            "chat": settings.chat,
            "policy": config.policy,
            "policy_options": config.policy_options,
            "layer_budgets": "uniform",
            "observation_window": config.observation_window,
            "num_recent_tokens": config.recent_tokens,
            "pool_size": config.pool_size,
            "pooling": config.pooling,
            "num_sink_tokens": config.num_sink_tokens,
            "block_size": settings.block_size,
            "sampled_queries": settings.num_sampled,
            "massive_activations": asdict(settings.massive),
        },
        "scratch_bytes": inspection.scratch_bytes,
        "layers": {"full_attention": seen.layers, "sliding_window": seen.untouched},
        "prompts": [_prompt(inspection, one) for one in inspection.prompts],
        "calibrated_l_min": inspection.calibrated_l_min,
        "plan": _plan(inspection),
    }


def _prompt(inspection: Inspection, findings: PromptFindings) -> dict[str, Any]:
    reading = findings.reading
    tokens = reading.num_tokens
    lost = predicted_loss(inspection, reading)
    return {
        "name": reading.prompt.name,
        "tokens": tokens,
        "concentration": [
            {
                "layer": layer,
                "window": _spreads(window, tokens),
                "all_queries": _spreads(sampled, tokens),
            }
            for layer, window, sampled in zip(
                inspection.survey.layers, reading.window, reading.sampled, strict=True
            )
        ],
        "massive_activations": {
            "layers": [
                {
                    "layer": one.layer,
                    "median": one.median,
                    "count": one.num_massive,
                    "positions": list(one.massive_positions),
                    "top": [asdict(entry) for entry in one.top],
                }
                for one in reading.activations
            ],
            "tokens": [_token(reading, token) for token in findings.tokens],
            "kinds": [asdict(share) for share in kind_shares(findings)],
        },
        "rank_stability": asdict(findings.stability),
        "attention_mass_lost": None if lost is None else asdict(lost),
    }


def _spreads(spreads: dict[float, HeadSpread], tokens: int) -> dict[str, Any]:
    return {
        f"{share:g}": {**asdict(spread), "share_of_prompt": spread.mean / tokens}
        for share, spread in spreads.items()
    }


def _token(reading: Reading, token: TokenActivations) -> dict[str, Any]:
    mean, largest = attention_of(reading, token.position)
    return {
        **asdict(token),
        "text": reading.prompt.texts[token.position],
        "kind": reading.prompt.kinds[token.position],
        "attention_mean": mean,
        "attention_max": largest,
    }


def _plan(inspection: Inspection) -> dict[str, Any]:
    recommendation, settings = inspection.recommendation, inspection.settings
    best = recommendation.best
    return {
        "bounds": asdict(settings.bounds),
        "is_within_bounds": recommendation.is_within,
        "plans_tried": recommendation.num_candidates,
        "recommended": None if best is None else _candidate(inspection, best),
        "budgets": list(inspection.budgets),
        "mean_loss_by_budget": inspection.curves,
    }


def _candidate(inspection: Inspection, best: Candidate) -> dict[str, Any]:
    words = serve_command(
        inspection.model, best, inspection.settings.config, inspection.settings.block_size
    )
    return {
        "budget": best.budget,
        "full_layers": list(best.plan.full),
        "mean_loss": best.mean_loss,
        "worst_layer_loss": best.worst_loss,
        "kv_bytes": best.kv_bytes,
        "kv_share_of_full": best.kv_share,
        "padding_share": best.padding_share,
        "groups": best.num_groups,
        "command": as_shell(words),
    }
