"""kvsieve's policies against kvpress: the same tokens of a real prompt, in every layer and head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from kvsieve.core.tiers import pyramid
from kvsieve.demo.model import ensure_demo_model
from kvsieve.kernels.dense import DenseEvidence
from kvsieve.policies.evidence import Rotary
from kvsieve.policies.table import parse_settings, policy_from_config
from tests.thirdparty.capture import LayerTensors, capture_layers, rotary_table
from tests.thirdparty.kept import (
    NORM_STRIDE,
    PROMPTS,
    KeptCase,
    KeptPrompt,
    kept_difference,
    load_prompt,
)

FUTURE = 512
"""Positions beyond the prompt that any case looks at."""

CASES = sorted((tokens, name) for tokens in PROMPTS for name in load_prompt(tokens).cases)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    folder = ensure_demo_model(Console(stderr=True))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> dict[int, KeptPrompt]:
    return {tokens: load_prompt(tokens) for tokens in PROMPTS}


@pytest.fixture(scope="module")
def layers(model: Any, prompts: dict[int, KeptPrompt]) -> dict[int, list[LayerTensors]]:
    return {tokens: capture_layers(model, prompts[tokens].token_ids) for tokens in PROMPTS}


@pytest.fixture(scope="module")
def rotary(model: Any) -> Rotary:
    return Rotary(rotary_table(model, max(PROMPTS) + FUTURE), is_neox=True)


# kvsieve forces sinks and the last tokens by settings of their own; kvpress' presses force what
# is written here.


def _snapkv(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "observation_window": parameters["window_size"],
        "pooling": "avg",
        "pool_size": parameters["kernel_size"],
        "num_sink_tokens": 0,
    }


def _options(parameters: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {"policy_options": {name: parameters[name] for name in names}}


SETTINGS: dict[str, Callable[[KeptCase], dict[str, Any]]] = {
    "SnapKVPress": lambda case: {"policy": "snapkv", **_snapkv(case.parameters)},
    "PyramidKVPress": lambda case: {"policy": "pyramidkv", **_snapkv(case.parameters)},
    "CriticalKVPress": lambda case: {
        "policy": "criticalkv",
        **_snapkv(case.inner),
        **_options(case.parameters, "epsilon", "first_stage_ratio"),
    },
    "ChunkKVPress": lambda case: {
        "policy": "chunkkv",
        **_snapkv(case.inner),
        **_options(case.parameters, "chunk_length"),
    },
    "TOVAPress": lambda case: {"policy": "tova"},
    "KnormPress": lambda case: {"policy": "knorm"},
    "KeyDiffPress": lambda case: {"policy": "keydiff"},
    "ExpectedAttentionPress": lambda case: {
        "policy": "expected_attention",
        "num_sink_tokens": case.parameters["n_sink"],
        **_options(case.parameters, "n_future_positions", "use_covariance", "use_vnorm", "epsilon"),
    },
    "StreamingLLMPress": lambda case: {
        "policy": "streaming_llm",
        "num_sink_tokens": case.parameters["n_sink"],
    },
}


@pytest.mark.parametrize("tokens", PROMPTS)
def test_model_and_prompt_are_those_of_the_fixture(
    tokens: int, prompts: dict[int, KeptPrompt], layers: dict[int, list[LayerTensors]]
) -> None:
    norms = torch.stack([layer.keys.norm(dim=-1)[:, ::NORM_STRIDE] for layer in layers[tokens]])
    np.testing.assert_allclose(norms.numpy(), prompts[tokens].key_norms, rtol=1e-4)


@pytest.mark.parametrize(("tokens", "name"), CASES)
def test_policy_keeps_the_tokens_that_kvpress_keeps(
    tokens: int,
    name: str,
    prompts: dict[int, KeptPrompt],
    layers: dict[int, list[LayerTensors]],
    rotary: Rotary,
) -> None:
    case = prompts[tokens].cases[name]
    policy = policy_from_config(parse_settings(SETTINGS[case.press](case)))
    unexplained = {}
    for number, layer in enumerate(layers[tokens]):
        evidence = DenseEvidence(
            layer.queries,
            layer.keys,
            layer.values,
            observation_window=policy.observation_window,
            scale=layer.scale,
            output_projection=layer.output_projection,
            rotary=rotary,
            accumulator=policy.accumulator,
        )
        positions = policy.choose(evidence, case.num_kept(number)).tolist()
        difference = kept_difference(case, number, positions)
        if difference.unexplained:
            unexplained[number] = difference.unexplained
    assert unexplained == {}


def test_pyramid_without_recent_tokens_is_that_of_kvpress_but_for_rounding(
    prompts: dict[int, KeptPrompt],
) -> None:
    # kvpress' formula leaves the window out and its counts contain it; the authors' code, and
    # kvsieve, put the window on top. Without one both are a line between the same two numbers,
    # where kvpress rounds and kvsieve makes the mean exact.
    case = prompts[703].cases["pyramidkv-8-7"]
    counts = [case.num_kept(layer) for layer in range(len(case.kept))]
    ours = pyramid(703, case.nominal, recent_tokens=0, smallest=1, num_layers=len(counts))
    assert (ours[0], ours[-1]) == (counts[0], counts[-1]) == (585, 15)
    assert max(abs(a - b) for a, b in zip(ours, counts, strict=True)) <= 1


def test_no_prompt_is_a_multiple_of_a_chunk_and_no_case_keeps_everything(
    prompts: dict[int, KeptPrompt],
) -> None:
    for tokens, prompt in prompts.items():
        for case in prompt.cases.values():
            assert tokens % case.parameters.get("chunk_length", tokens + 1)
            assert all(0 < case.num_kept(layer) < tokens for layer in range(len(case.kept)))


def test_difference_counts_what_only_one_side_has_and_excuses_near_ties_alone() -> None:
    kept = np.array([[[1, 1, 0, 0], [0, 1, 1, 0]]], dtype=bool)
    case = KeptCase("a", "A", {}, {}, 2, kept, {(0, 0): {1: 5e-5, 2: 5e-5}, (0, 1): {2: 5e-4}})
    same = kept_difference(case, 0, [[0, 1], [1, 2]])
    assert (same.differing, same.unexplained) == (0, ())
    near = kept_difference(case, 0, [[0, 2], [1, 2]])
    assert (near.differing, near.unexplained) == (2, ())
    far = kept_difference(case, 0, [[2, 3], [0, 1]])
    assert (far.differing, far.unexplained) == (6, ((0, 0), (0, 3), (1, 0), (1, 2)))


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[0, 1]], "1 KV heads, but 2"),
        ([[0, 1, 2], [1, 2]], "head 0 keeps 3 positions"),
        ([[0, 1], [1, 1]], "head 1 keeps 2 positions .1 different"),
    ],
)
def test_sets_of_another_size_are_refused(positions: list[list[int]], message: str) -> None:
    kept = np.array([[[1, 1, 0, 0], [0, 1, 1, 0]]], dtype=bool)
    case = KeptCase("a", "A", {}, {}, 2, kept, {})
    with pytest.raises(ValueError, match=message):
        kept_difference(case, 0, positions)
