"""What policies see in a pass, against the dense evidence and against the models' own modules."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvsieve.core.errors import ConfigError
from kvsieve.inspect.activations import MassiveRule
from kvsieve.inspect.evidence import find_rotary, layer_evidence, rotary_for
from kvsieve.inspect.forward import run_pass
from kvsieve.inspect.model import LoadedModel, decoder_layers
from kvsieve.inspect.prompt import Prompt
from kvsieve.inspect.reading import Probe, Reading, read_prompt
from kvsieve.inspect.sliced import LayerAttention, LayerHeads, sampled_queries, sliced_attention
from kvsieve.kernels.dense import DenseEvidence
from kvsieve.policies import METHODS, Policy, Rotary, parse_settings, policy_from_config
from tests.engine.models import random_prompt, tiny_model

NUM_TOKENS = 600
"""More than two chunks of an accumulator, and a part of one."""


def table_of_heads(folder: Path, num_layers: int, num_heads: int) -> str:
    path = folder / "heads.json"
    scores = {
        f"{layer}-{head}": 1 + (3 * layer + head) % 4
        for layer in range(num_layers)
        for head in range(num_heads)
    }
    path.write_text(json.dumps(scores))
    return str(path)


def policy_of(name: str, folder: Path) -> Policy:
    settings: dict[str, Any] = {"policy": name}
    if name == "headkv":
        settings["policy_options"] = {"head_scores": table_of_heads(folder, 6, 4)}
    return policy_from_config(parse_settings(settings))


def plain_rotary(num_positions: int, rotary_dim: int, base: float = 10000.0) -> Rotary:
    """The rotary table from its formula, a position at a time."""
    rows = []
    for position in range(num_positions):
        angles = [position * base ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]
        row = torch.tensor(angles, dtype=torch.float64)
        rows.append(torch.cat([row.cos(), row.sin()]))
    return Rotary(torch.stack(rows).float(), True)


def load(path: str) -> LoadedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return LoadedModel(path, model, None, decoder_layers(model), 4096)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model(tmp_path_factory.mktemp("models"), head_size=16))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_predicted_losses_are_those_of_dense_evidence(
    name: str, loaded: LoadedModel, tmp_path: Path
) -> None:
    policy = policy_of(name, tmp_path)
    ids = random_prompt(NUM_TOKENS, 5)
    probe = Probe(policy, (320, 400, 500), 32, 7, MassiveRule(), 8)
    prompt = Prompt("p", tuple(ids), ("",) * NUM_TOKENS, ("word",) * NUM_TOKENS)

    class Keeping(Reading):
        def on_attention(self, attention: LayerAttention, heads: LayerHeads) -> None:
            super().on_attention(attention, heads)
            kept[attention.layer] = heads

    kept: dict[int, LayerHeads] = {}
    reading = Keeping(prompt, probe, rotary_for(loaded, policy, NUM_TOKENS))
    run_pass(loaded, ids, reading, observation_window=policy.observation_window, num_sampled=8)

    assert len(reading.lost) == 6
    future = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).triu(1)
    for layer, losses in enumerate(reading.lost):
        heads = kept[layer]
        weight = loaded.model.model.layers[layer].self_attn.o_proj.weight
        dense = DenseEvidence(
            heads.query.transpose(0, 1),
            heads.key,
            heads.value,
            policy.observation_window,
            16**-0.5,
            output_projection=weight.detach().T.reshape(4, 16, -1),
            rotary=plain_rotary(4096, 16),
            accumulator=policy.accumulator,
            layer=layer,
        )
        logits = heads.query.double() @ heads.key.repeat_interleave(2, 0).double().mT / 4
        matrix = logits.masked_fill(future, -torch.inf).softmax(-1)
        window = matrix[:, -policy.observation_window :].mean(dim=1)
        for budget, loss in zip(probe.budgets, losses, strict=True):
            num_keep = NUM_TOKENS - (NUM_TOKENS - budget) // 32 * 32
            positions = policy.choose(dense, num_keep)
            shares = [float(window[head, positions[head // 2]].sum()) for head in range(4)]
            # Two tokens of nearly the same score may change places.
            assert loss == pytest.approx(1 - sum(shares) / 4, abs=1e-3)


def test_read_prompt_finds_the_rotary_embedding_that_a_policy_looks_at(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    prompt = Prompt("p", tuple(random_prompt(80, 1)), ("",) * 80, ("word",) * 80)

    def read(name: str) -> Reading:
        return read_prompt(
            loaded, prompt, Probe(policy_of(name, tmp_path), (64,), 32, 7, MassiveRule(), 8)
        )

    assert read("snapkv").rotary is None
    rotary = read("expected_attention").rotary
    assert rotary is not None and rotary.is_neox
    torch.testing.assert_close(rotary.cos_sin, plain_rotary(4096, 16).cos_sin, atol=1e-3, rtol=0)


def small(config_class: Any, **settings: Any) -> LoadedModel:
    torch.manual_seed(0)
    common = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 1,
    }
    config = config_class(**{**common, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return LoadedModel("small", model, None, decoder_layers(model), 128)


@pytest.mark.parametrize(
    ("make", "is_neox", "rotary_dim", "last"),
    [
        (lambda: small(transformers.LlamaConfig), True, 16, "q_proj"),
        (lambda: small(transformers.Qwen3Config), True, 16, "q_norm"),
        (lambda: small(transformers.CohereConfig), False, 16, "q_proj"),
        (lambda: small(transformers.GlmConfig, partial_rotary_factor=0.5), False, 8, "q_proj"),
        (
            lambda: small(
                transformers.Gemma3TextConfig,
                layer_types=["sliding_attention", "full_attention"],
                sliding_window=4,
            ),
            True,
            16,
            "q_norm",
        ),
    ],
    ids=["llama", "qwen3", "cohere", "glm", "gemma3"],
)
def test_rotary_turns_queries_as_the_model_does(
    make: Callable[[], LoadedModel], is_neox: bool, rotary_dim: int, last: str
) -> None:
    loaded = make()
    rotary = find_rotary(loaded, 40)
    before: list[torch.Tensor] = []
    attention: Any = loaded.layers[1].self_attn
    hook = getattr(attention, last).register_forward_hook(
        lambda _module, _inputs, output: before.append(output)
    )
    seen: dict[int, LayerHeads] = {}

    class Notes:
        def on_attention(self, attention: LayerAttention, heads: LayerHeads) -> None:
            seen[attention.layer] = heads

        def on_sliding(self, layer: int) -> None: ...

        def on_hidden(self, layer: int, hidden: torch.Tensor) -> None: ...

    run_pass(loaded, list(range(2, 42)), Notes(), observation_window=4, num_sampled=4)
    hook.remove()

    assert rotary is not None
    assert (rotary.is_neox, tuple(rotary.cos_sin.shape)) == (is_neox, (40, rotary_dim))
    (raw,) = before
    # A norm may come before or after tokens and heads change places.
    raw = (raw if raw.shape[1] == 40 else raw.transpose(1, 2)).reshape(40, 4, 16)
    pairs = rotary_dim // 2
    turned = raw.clone()
    for pair in range(pairs):
        first, second = (pair, pair + pairs) if is_neox else (2 * pair, 2 * pair + 1)
        cos, sin = rotary.cos_sin[:, pair, None], rotary.cos_sin[:, pairs + pair, None]
        turned[..., first] = raw[..., first] * cos - raw[..., second] * sin
        turned[..., second] = raw[..., second] * cos + raw[..., first] * sin
    torch.testing.assert_close(turned.transpose(0, 1), seen[1].query, atol=1e-4, rtol=1e-4)


def test_a_pass_is_the_same_after_a_longer_table_was_made() -> None:
    loaded = small(
        transformers.LlamaConfig,
        max_position_embeddings=32,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    )
    ids = torch.arange(2, 30)[None]
    with torch.no_grad():
        before = loaded.model(ids).logits
        longer = find_rotary(loaded, 100)
        after = loaded.model(ids).logits

    assert longer is not None and longer.cos_sin.shape[0] == 100
    assert torch.equal(before, after)


def test_a_model_with_layers_that_do_not_use_the_rotary_embedding_has_none() -> None:
    def smollm3(uses: list[int]) -> LoadedModel:
        return small(transformers.SmolLM3Config, no_rope_layers=uses)

    assert find_rotary(smollm3([1, 1]), 40) is not None
    assert find_rotary(smollm3([1, 0]), 40) is None


def test_table_ends_where_the_model_does(loaded: LoadedModel, tmp_path: Path) -> None:
    policy = policy_of("expected_attention", tmp_path)

    rotary = rotary_for(loaded, policy, 500)

    assert rotary is not None and rotary.cos_sin.shape == (4096, 16)
    unknown = LoadedModel(loaded.name, loaded.model, None, loaded.layers, None)
    rotary = rotary_for(unknown, policy, 500)
    assert rotary is not None and rotary.cos_sin.shape[0] >= 500 + 512


def test_a_rotary_embedding_that_is_none_we_know_is_refused(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of("expected_attention", tmp_path)
    modeling = sys.modules[type(loaded.layers[0]).__module__]
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", lambda q, k, cos, sin: (2 * q, 2 * k))

    with pytest.raises(ConfigError, match="needs the rotary embedding of"):
        rotary_for(loaded, policy, 500)


def bare_layer(projection: torch.nn.Module | None) -> tuple[LayerAttention, LayerHeads]:
    torch.manual_seed(3)
    query, key, value = torch.randn(4, 50, 8), torch.randn(2, 50, 8), torch.randn(2, 50, 8)
    module = torch.nn.Module()
    if projection is not None:
        module.o_proj = projection
    heads = LayerHeads(module, query, key, value, 0.3)
    _, attention = sliced_attention(
        *(query, key, value, 0.3), layer=4, observation_window=8, sampled=sampled_queries(50, 4)
    )
    return attention, heads


def test_output_norms_are_those_of_a_projection_without_its_bias(tmp_path: Path) -> None:
    projection = torch.nn.Linear(32, 20)
    attention, heads = bare_layer(projection)

    evidence = layer_evidence(policy_of("criticalkv", tmp_path), attention, heads, None)

    for kv_head in range(2):
        for token in (0, 17, 49):
            norms = []
            for head in (2 * kv_head, 2 * kv_head + 1):
                mixed = torch.zeros(32)
                mixed[8 * head : 8 * head + 8] = heads.value[kv_head, token]
                norms.append(float((projection.weight.detach() @ mixed).abs().sum()))
            assert float(evidence.output_norms()[kv_head, token]) == pytest.approx(
                sum(norms) / 2, rel=1e-4
            )
    assert evidence.output_norms() is evidence.output_norms()


def test_a_layer_without_an_output_projection_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="output projection of layer 4"):
        layer_evidence(policy_of("criticalkv", tmp_path), *bare_layer(None), None)


def test_what_a_policy_did_not_ask_for_is_an_error(tmp_path: Path) -> None:
    projection = torch.nn.Linear(32, 20)
    evidence = layer_evidence(policy_of("snapkv", tmp_path), *bare_layer(projection), None)

    with pytest.raises(ValueError, match="looks_at"):
        evidence.output_norms()
    with pytest.raises(ValueError, match="no accumulator"):
        evidence.accumulated()


def test_a_policy_that_does_not_fit_the_model_says_so(loaded: LoadedModel, tmp_path: Path) -> None:
    table = table_of_heads(tmp_path, 6, 3)
    config = parse_settings({"policy": "headkv", "policy_options": {"head_scores": table}})
    prompt = Prompt("p", tuple(random_prompt(80, 1)), ("",) * 80, ("word",) * 80)
    probe = Probe(policy_from_config(config), (70,), 8, 7, MassiveRule(), 8)

    with pytest.raises(ConfigError, match="the policy headkv: head_scores is a table"):
        read_prompt(loaded, prompt, probe)
