"""Every policy on the served model: it sieves, says so, and keeps what its definition keeps.

What a policy keeps is computed a second time from a Transformers model, with the reference
kernels, over the whole prompt at once; the engine reads it in chunks, from a paged cache, with
its own kernels. (That the definitions are the published ones is the business of
tests/unit/test_policies_table.py and test_thirdparty.py.)
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsieve.demo.document import demo_document
from kvsieve.kernels.dense import DenseEvidence
from kvsieve.policies import METHODS, Policy, Rotary, parse_settings, policy_from_config
from tests.engine.engines import (
    Generated,
    drop_engine,
    generate,
    make_engine,
    worker,
)
from tests.engine.host import EngineHost
from tests.engine.models import random_prompt
from tests.thirdparty.capture import LayerTensors, capture_layers, rotary_table

pytestmark = pytest.mark.engine

BUDGET = 320
BLOCK_SIZE = 32
SAMPLE = {"pyramidkv", "h2o", "expected_attention", "criticalkv", "keydiff"}
"""What every run serves: tiers, gathering, rotary, output projection, no query at all."""

SCORE_EPSILON = 1e-4
"""Relative distance of two scores that counts as a near tie, as in `agreement`."""
MAX_TIE_SHARE = 1e-3
"""Kept positions that near ties may explain, as a share of all."""


@pytest.fixture(scope="module")
def prompts(real_model: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_model)
    ids = tokenizer(demo_document())["input_ids"]
    return [ids[:701], ids[200:645]]


@pytest.fixture(scope="module")
def captured(real_model: str, prompts: list[list[int]]) -> tuple[list[list[LayerTensors]], Rotary]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32).eval()
    table = rotary_table(model, model.config.max_position_embeddings)
    return [capture_layers(model, prompt) for prompt in prompts], Rotary(table, is_neox=True)


@pytest.fixture
def head_scores(tmp_path: Path) -> str:
    """A table of head scores in HeadKV's format."""
    generator = random.Random(0)
    scores = {f"{layer}-{head}": [generator.random()] for layer in range(30) for head in range(9)}
    path = tmp_path / "heads.json"
    path.write_text(json.dumps(scores))
    return str(path)


def marks(name: str) -> list[Any]:
    return [] if name in SAMPLE else [pytest.mark.long]


def policies() -> Iterator[Any]:
    for name in METHODS:
        yield pytest.param(name, "v1", marks=marks(name), id=f"{name}-v1")
        yield pytest.param(name, "v2", marks=pytest.mark.long, id=f"{name}-v2")


@pytest.mark.parametrize(("name", "runner"), policies())
def test_served_policy_keeps_what_its_definition_keeps(
    name: str,
    runner: str,
    request: pytest.FixtureRequest,
    real_model: str,
    prompts: list[list[int]],
    captured: tuple[list[list[LayerTensors]], Rotary],
    head_scores: str,
) -> None:
    host: EngineHost = request.getfixturevalue(f"{runner}_host")
    settings: dict[str, Any] = {"policy": name, "budget": BUDGET}
    if name == "headkv":
        settings["policy_options"] = {"head_scores": head_scores}
    host.call(
        make_engine,
        "served",
        real_model,
        settings,
        max_model_len=1024,
        max_num_batched_tokens=256,
        max_num_seqs=4,
    )
    answers = host.call(generate, "served", prompts, {"max_tokens": 3})
    host.call(drop_engine, "served")

    policy = policy_from_config(parse_settings(settings))
    layers, rotary = captured
    different = explained = total = 0
    for answer, prompt, tensors in zip(answers, prompts, layers, strict=True):
        check_proof(answer, len(prompt), name)
        for layer, kept in answer.kept.items():
            evidence = evidence_of(tensors[layer], policy, rotary, layer)
            num_keep = kept.shape[1]
            expected = policy.choose(evidence, num_keep)
            assert expected.shape == kept.shape
            ours, ties = kept_difference(policy, evidence, expected, kept)
            different += ours
            explained += ties
            total += kept.numel()
    assert different == explained, f"{different - explained} of {total} positions differ"
    assert explained <= max(2, MAX_TIE_SHARE * total)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_prompts_that_are_gathered_wait_for_each_other_and_read_no_cache(
    runner: str, request: pytest.FixtureRequest, tiny_llama: str
) -> None:
    host: EngineHost = request.getfixturevalue(f"{runner}_host")
    # More prompts than are gathered at once, in chunks that mix them.
    prompts = [random_prompt(length, length) for length in (300, 517, 260, 444, 390, 351)]
    host.call(
        make_engine,
        "gathered",
        tiny_llama,
        {"policy": "h2o", "budget": 96},
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_batched_tokens=160,
        enable_prefix_caching=True,
    )
    first = host.call(generate, "gathered", prompts, {"max_tokens": 3})
    again = host.call(generate, "gathered", prompts, {"max_tokens": 3})
    alone = [host.call(generate, "gathered", [prompt], {"max_tokens": 3})[0] for prompt in prompts]
    open_states = host.call(num_gathered, "gathered")
    host.call(drop_engine, "gathered")

    assert open_states == [0, 0]
    for one, *others in zip(first, again, alone, strict=True):
        assert one.report["sieved"] and one.kept
        for other in others:
            assert other.token_ids == one.token_ids
            for layer, kept in one.kept.items():
                assert (kept == other.kept[layer]).float().mean() > 0.99


def num_gathered(name: str) -> list[int]:
    """Runs in an engine's process: prompts still being gathered, and windows still open.

    An engine hears that requests ended with the next step.
    """
    generate(name, [[5]], {"max_tokens": 1})
    generate(name, [[5]], {"max_tokens": 1})
    sieve = worker(name).sieve
    return [sieve._gathers.num_open, sieve.observer.num_open]


def check_proof(answer: Generated, prompt_tokens: int, name: str) -> None:
    """The report says that the prompt was sieved, and counts what was kept."""
    report = answer.report
    assert report["policy"] == name
    assert report["sieved"]
    assert report["blocks_freed"] > 0
    kept = [positions.shape[1] for positions in answer.kept.values()]
    sieved = report["layers"]["sieved"]
    assert report["dropped_tokens"] == len(kept) * prompt_tokens - sum(kept)
    held = sum(kept) + (sieved - len(kept)) * prompt_tokens
    assert report["stored_tokens"]["sieved"] == -(-held // sieved)
    assert all(
        tier["stored_tokens"] >= BUDGET or report["tiers"] is not None
        for tier in report["tiers"] or [{"stored_tokens": held // sieved}]
    )
    assert 0 <= report["attention_mass_lost"]["mean"] < 1


def evidence_of(tensors: LayerTensors, policy: Policy, rotary: Rotary, layer: int) -> DenseEvidence:
    return DenseEvidence(
        queries=tensors.queries,
        key=tensors.keys,
        value=tensors.values,
        observation_window=policy.observation_window,
        scale=tensors.scale,
        output_projection=tensors.output_projection,
        rotary=rotary,
        accumulator=policy.accumulator,
        layer=layer,
    )


def kept_difference(
    policy: Policy, evidence: DenseEvidence, expected: torch.Tensor, kept: torch.Tensor
) -> tuple[int, int]:
    """Positions in one of two kept sets only, and how many of them a near tie explains."""
    scores = policy.candidate_scores(evidence, expected.shape[1])
    different = explained = 0
    for head, (one, other) in enumerate(zip(expected.tolist(), kept.tolist(), strict=True)):
        differing = set(one) ^ set(other)
        different += len(differing)
        candidates = [position for position in one if position < scores.shape[1]]
        forced = set(range(policy.num_sink_tokens))
        free = [position for position in candidates if position not in forced]
        if not differing or not free:
            continue
        threshold = min(float(scores[head, position]) for position in free)
        for position in differing:
            if position < scores.shape[1]:
                distance = abs(float(scores[head, position]) - threshold)
                explained += distance <= SCORE_EPSILON * abs(threshold)
    return different, explained
