"""What `kvsieve inspect` predicts against what the served engine reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from kvsieve.demo.document import demo_document
from kvsieve.inspect.facts import predicted_loss
from kvsieve.inspect.recommend import Bounds, layer_ranges
from kvsieve.inspect.run import InspectSettings, inspect_model
from kvsieve.policies import parse_settings
from tests.engine.engines import drop_engine, generate, make_engine
from tests.engine.host import EngineHost

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
"""Shares are reported with five digits; two float32 computations of one attention differ by less
than ten of the last, also where they swap two tokens of nearly equal score."""


@pytest.mark.parametrize("policy", ["snapkv", "criticalkv", "expected_attention"])
def test_recommended_plan_loses_what_was_predicted(
    policy: str, v1_host: EngineHost, real_model: str, tmp_path: Path
) -> None:
    prompt_file = tmp_path / "prompt.txt"
    prompt_file.write_text(demo_document()[:4500])
    found = inspect_model(
        real_model,
        [prompt_file],
        InspectSettings(parse_settings({"policy": policy}), Bounds(0.05, 0.15)),
        console=Console(quiet=True),
    )
    reading = found.prompts[0].reading
    predicted = predicted_loss(found, reading)
    best = found.recommendation.best
    assert found.recommendation.is_within and predicted is not None and best is not None
    assert 900 < reading.num_tokens < 1200

    # As the recommended command would set them.
    settings = {
        "policy": policy,
        "budget": best.budget,
        "full_layers": layer_ranges(best.plan.full),
    }
    parse_settings(settings)
    v1_host.call(make_engine, "inspect", real_model, settings, max_model_len=2048)
    (outcome,) = v1_host.call(
        generate, "inspect", [list(reading.prompt.token_ids)], {"max_tokens": 1}
    )
    v1_host.call(drop_engine, "inspect")

    reported = outcome.report["attention_mass_lost"]
    assert list(reported["layers"]) == list(predicted.layers)
    for layer, share in predicted.layers.items():
        assert reported["layers"][layer] == pytest.approx(share, abs=TOLERANCE)
    assert reported["mean"] == pytest.approx(predicted.mean, abs=TOLERANCE)
    assert reported["mean"] <= 0.05 + TOLERANCE and reported["max"] <= 0.15 + TOLERANCE
    # Its memory is what was promised: sieved layers store the budget, rounded up to blocks.
    assert outcome.report["stored_tokens"]["sieved"] - best.budget in range(32)
