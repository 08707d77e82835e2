"""The pass of inspection against Transformers' own attention matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.core.errors import ConfigError
from kvsieve.inspect.forward import NAME, run_pass, survey
from kvsieve.inspect.model import LoadedModel, decoder_layers, load_model, refusals
from kvsieve.inspect.sliced import (
    LayerAttention,
    LayerHeads,
    sampled_queries,
    scratch_bytes,
    sliced_attention,
)
from kvsieve.kernels import reference
from tests.engine.models import random_prompt, tiny_model

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma3"]
WINDOW = 16
NUM_TOKENS = 90


class Notes:
    """A listener that keeps everything."""

    def __init__(self) -> None:
        self.attention: dict[int, LayerAttention] = {}
        self.heads: dict[int, LayerHeads] = {}
        self.sliding: list[int] = []
        self.hidden: dict[int, torch.Tensor] = {}

    def on_attention(self, attention: LayerAttention, heads: LayerHeads) -> None:
        self.attention[attention.layer] = attention
        self.heads[attention.layer] = heads

    def on_sliding(self, layer: int) -> None:
        self.sliding.append(layer)

    def on_hidden(self, layer: int, hidden: torch.Tensor) -> None:
        self.hidden[layer] = hidden


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load(path: str) -> LoadedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return LoadedModel(path, model, None, decoder_layers(model), None)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pass_sees_what_eager_attention_computes(folder: Path, architecture: str) -> None:
    loaded = load(tiny_model(folder, architecture))
    ids = random_prompt(NUM_TOKENS, 3)
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        own = loaded.model(
            torch.tensor([ids]), output_attentions=True, output_hidden_states=True, use_cache=False
        )
    notes = Notes()

    last = run_pass(loaded, ids, notes, observation_window=WINDOW, num_sampled=20)

    is_gemma = architecture == "gemma3"
    assert sorted(notes.attention) == ([2, 5] if is_gemma else list(range(6)))
    assert sorted(notes.sliding) == ([0, 1, 3, 4] if is_gemma else [])
    sampled = sampled_queries(NUM_TOKENS, 20)
    for layer, seen in notes.attention.items():
        matrix = own.attentions[layer][0].float()
        torch.testing.assert_close(
            seen.window_mass, matrix[:, -WINDOW:].sum(dim=1), atol=1e-4, rtol=1e-4
        )
        torch.testing.assert_close(
            seen.sampled_mass, matrix[:, sampled].sum(dim=1), atol=1e-4, rtol=1e-4
        )
        heads = notes.heads[layer]
        groups = matrix.shape[0] // heads.key.shape[0]
        logits = heads.query @ heads.key.repeat_interleave(groups, 0).transpose(1, 2) * heads.scale
        future = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).triu(1)
        torch.testing.assert_close(
            logits.masked_fill(future, -torch.inf).softmax(-1), matrix, atol=1e-4, rtol=1e-4
        )
    for layer in range(5):  # Transformers has normed the last one.
        torch.testing.assert_close(
            notes.hidden[layer], own.hidden_states[layer + 1][0], atol=1e-3, rtol=1e-3
        )
    torch.testing.assert_close(last, own.hidden_states[-1][0], atol=1e-3, rtol=1e-3)


def test_model_is_as_before_when_a_pass_ends_or_fails(folder: Path) -> None:
    loaded = load(tiny_model(folder))
    before = loaded.model.config._attn_implementation

    class Broken(Notes):
        def on_attention(self, attention: LayerAttention, heads: LayerHeads) -> None:
            raise RuntimeError("no")

    run_pass(loaded, random_prompt(20, 0), Notes(), observation_window=4, num_sampled=4)
    with pytest.raises(RuntimeError, match="no"):
        run_pass(loaded, random_prompt(20, 0), Broken(), observation_window=4, num_sampled=4)

    assert loaded.model.config._attn_implementation == before
    assert all(not layer._forward_hooks for layer in loaded.layers)
    assert NAME not in transformers.AttentionInterface()
    assert NAME not in transformers.masking_utils.AttentionMaskInterface()


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10_000),
    st.sampled_from([(4, 4), (4, 2), (6, 3), (3, 1)]),
    st.integers(2, 70),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(1, 30)),
    st.integers(1, 40_000),
)
def test_slices_make_no_difference(
    seed: int, heads: tuple[int, int], n: int, num_sampled: int, sliding: int | None, size: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    query = 3 * torch.randn(num_heads, n, 8, generator=generator)
    key = torch.randn(num_kv_heads, n, 8, generator=generator)
    value = torch.randn(num_kv_heads, n, 5, generator=generator)
    window = int(torch.randint(1, n + 1, (1,), generator=generator))
    sampled = sampled_queries(n, num_sampled)

    output, seen = sliced_attention(
        query,
        key,
        value,
        0.4,
        layer=7,
        observation_window=window,
        sampled=sampled,
        sliding_window=sliding,
        slice_bytes=size,
    )

    keys, values = (one.repeat_interleave(num_heads // num_kv_heads, 0) for one in (key, value))
    distance = torch.arange(n)[:, None] - torch.arange(n)
    hidden = (distance < 0) | (distance >= (sliding or n))
    weights = (query @ keys.transpose(1, 2) * 0.4).masked_fill(hidden, -torch.inf).softmax(-1)
    torch.testing.assert_close(output, weights @ values, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        seen.window_mass, weights[:, n - window :].sum(1), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(seen.sampled_mass, weights[:, sampled].sum(1), atol=1e-4, rtol=1e-4)
    if sliding is None:
        scores = reference.window_scores(query[:, n - window :].transpose(0, 1), key, 0.4)
        torch.testing.assert_close(seen.window_attention, scores, atol=1e-4, rtol=1e-4)


@given(st.integers(1, 500), st.integers(1, 500))
def test_sampled_queries_are_spread_and_end_with_the_last(n: int, wanted: int) -> None:
    sampled = sampled_queries(n, wanted).tolist()

    assert len(sampled) == len(set(sampled)) == min(n, wanted)
    assert sampled[-1] == n - 1 and sampled[0] >= 0
    gaps = [b - a for a, b in zip([-1, *sampled], sampled, strict=False)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "n", "size"),
    [(9, 3, 2000, 2**20), (4, 4, 1500, 2**22), (16, 2, 700, 1)],
)
def test_no_more_memory_than_stated(heads: int, kv_heads: int, n: int, size: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    query, key = torch.randn(heads, n, 64), torch.randn(kv_heads, n, 64)
    sampled = sampled_queries(n, 256)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = sliced_attention(
            query,
            key,
            key,
            0.1,
            layer=0,
            observation_window=32,
            sampled=sampled,
            slice_bytes=size,
        )

    peak = held = 0
    events = profiler.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    for _, nbytes in sorted(changes):
        held += nbytes
        peak = max(peak, held)
    del kept
    assert peak <= scratch_bytes(heads, kv_heads, 64, n, size)
    # And that is little beside the whole matrix.
    assert scratch_bytes(heads, kv_heads, 64, n, size) < 4 * heads * n * n


def test_survey_knows_the_layers(folder: Path) -> None:
    seen = survey(load(tiny_model(folder, "gemma3")), random_prompt(200, 1))

    assert (seen.layers, seen.untouched) == ([2, 5], [0, 1, 3, 4])
    assert (seen.num_heads, seen.num_kv_heads, seen.cached_numbers) == (4, 2, 2 * 2 * 64)


def test_attention_that_is_not_plain_is_noticed() -> None:
    # Its learned sinks are handed to attention, where ours does not look at them.
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    model = transformers.GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(3.0)
    loaded = LoadedModel("sinks", model, None, decoder_layers(model), None)

    with pytest.raises(ConfigError, match="does something else"):
        survey(loaded, list(range(1, 60)))


def test_every_reason_is_given() -> None:
    deepseek = transformers.DeepseekV3Config(num_hidden_layers=2)
    t5 = transformers.T5Config()
    gemma2 = transformers.Gemma2Config(num_hidden_layers=2)

    assert any("MLA" in reason for reason in refusals(deepseek))
    assert len(refusals(t5)) >= 2 and "encoder-decoder" in refusals(t5)[0]
    assert any("capped" in reason for reason in refusals(gemma2))
    assert any("ALiBi" in reason for reason in refusals(transformers.BloomConfig()))
    assert refusals(transformers.LlamaConfig()) == []


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the model"):
        load_model(str(tmp_path))
