"""The oracle against Hugging Face `generate` and against SnapKV in literal Python loops."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.oracle.snapkv_formula import select_kept, snapkv_scores
from tests.oracle.snapkv_oracle import Oracle, kept_difference, sieve_start

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Wide weights: with the default 0.02 attention is almost uniform and scores nearly tie.
    "initializer_range": 0.4,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ARCHITECTURES = {
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**SHAPE)),
    "mistral": (
        MistralForCausalLM,
        lambda: MistralConfig(**SHAPE, head_dim=8, sliding_window=None),
    ),
    "mistral-sliding": (
        MistralForCausalLM,
        lambda: MistralConfig(**SHAPE, head_dim=8, sliding_window=16),
    ),
    "qwen2": (Qwen2ForCausalLM, lambda: Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, lambda: Qwen3Config(**SHAPE, head_dim=16)),
    "gemma3": (
        Gemma3ForCausalLM,
        lambda: Gemma3TextConfig(
            **SHAPE,
            head_dim=16,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
}
SMALL = {"observation_window": 8, "pool_size": 3, "num_sink_tokens": 2}


def make_model(name: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32):
    torch.manual_seed(seed)
    model_class, make_config = ARCHITECTURES[name]
    model: PreTrainedModel = model_class(make_config())
    with torch.no_grad():
        for param_name, param in model.named_parameters():
            # Biases and norm weights start at 0 and 1, where leaving them out would not show.
            if param.ndim == 1:
                param.add_(torch.randn_like(param) * 0.2)
            assert param.abs().sum() > 0, param_name
    return model.to(dtype).eval()


def make_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (length,), generator=generator).tolist()


# --- an independent reading of the specification, one scalar at a time where it matters ---------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(vec: list[float], position: int, theta: float) -> list[float]:
    half = len(vec) // 2
    out = [0.0] * len(vec)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(vec))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = vec[i] * cos - vec[i + half] * sin
        out[i + half] = vec[i + half] * cos + vec[i] * sin
    return out


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    exps = [math.exp(x - top) for x in logits]
    return [e / sum(exps) for e in exps]


def literal_kept(attn, prompt_len, window, pool, pooling, sinks, kept_count, group):
    """attn[head][query][key] -> (scores, kept), per KV head, by nested loops."""
    all_scores, all_kept = [], []
    for kv in range(len(attn) // group):
        raw = []
        for j in range(prompt_len - window):
            per_head = [
                sum(attn[h][q][j] for q in range(prompt_len - window, prompt_len))
                for h in range(kv * group, (kv + 1) * group)
            ]
            raw.append(sum(per_head) / group)
        pooled = []
        for j in range(len(raw)):
            near = [raw[i] for i in range(j - pool // 2, j + pool // 2 + 1) if 0 <= i < len(raw)]
            pooled.append(max(near) if pooling == "max" else sum(near) / pool)
        # Sinks first, then by score, then by higher position.
        ranking = sorted(range(len(raw)), key=lambda j: (j >= sinks, -pooled[j], -j))
        chosen = set(ranking[: kept_count - window]) | set(range(prompt_len - window, prompt_len))
        all_scores.append(pooled)
        all_kept.append(sorted(chosen))
    return all_scores, all_kept


def literal_llama(model, tokens, prompt_len, full_layers, start, pooling):
    """Non-incremental Llama forward over prompt and text; returns (logits, scores, kept)."""
    config, weights = model.config, dict(model.named_parameters())
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim, group = config.hidden_size // heads, heads // kv_heads
    theta, eps = config.rope_parameters["rope_theta"], config.rms_norm_eps
    total, scores, kept = len(tokens), {}, {}
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_hidden_layers):
        w = {
            n.removeprefix(f"model.layers.{layer}."): p
            for n, p in weights.items()
            if n.startswith(f"model.layers.{layer}.")
        }
        normed = rms_norm(x, w["input_layernorm.weight"], eps)
        q, k, v = (normed @ w[f"self_attn.{n}_proj.weight"].T for n in "qkv")
        q = q.view(total, heads, dim).tolist()
        k = k.view(total, kv_heads, dim).tolist()
        v = v.view(total, kv_heads, dim).tolist()
        q = [[rotate(vec, pos, theta) for vec in q[pos]] for pos in range(total)]
        k = [[rotate(vec, pos, theta) for vec in k[pos]] for pos in range(total)]

        def row(h, i, keys, q=q, k=k):
            logits = [
                sum(a * b for a, b in zip(q[i][h], k[j][h // group], strict=True)) / math.sqrt(dim)
                for j in keys
            ]
            return dict(zip(keys, softmax(logits), strict=True))

        attn = [[row(h, i, range(i + 1)) for i in range(prompt_len)] for h in range(heads)]
        if layer not in full_layers:
            scores[layer], kept[layer] = literal_kept(
                attn, prompt_len, 8, 3, pooling, 2, prompt_len - start, group
            )
        for h in range(heads):
            for i in range(prompt_len, total):
                prompt_keys = kept[layer][h // group] if layer in kept else range(prompt_len)
                attn[h].append(row(h, i, [*prompt_keys, *range(prompt_len, i + 1)]))
        mixed = torch.zeros(total, heads, dim, dtype=x.dtype)
        for h in range(heads):
            for i in range(total):
                for d in range(dim):
                    mixed[i, h, d] = sum(a * v[j][h // group][d] for j, a in attn[h][i].items())
        x = x + mixed.reshape(total, -1) @ w["self_attn.o_proj.weight"].T
        normed = rms_norm(x, w["post_attention_layernorm.weight"], eps)
        gate, up = normed @ w["mlp.gate_proj.weight"].T, normed @ w["mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T
    x = rms_norm(x, weights["model.norm.weight"], eps)
    return x @ weights["lm_head.weight"].T, scores, kept


# --- tests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_generate_when_the_budget_covers_the_prompt(name):
    model, prompt, steps = make_model(name), make_prompt(50), 12
    before = model.config._attn_implementation
    result = Oracle(model).run(
        prompt, budget_tokens=50, block_size=16, full_layers=set(), max_new_tokens=steps
    )
    assert model.config._attn_implementation == before == "sdpa"
    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 50, dtype=torch.long),
        do_sample=False,
        max_new_tokens=steps,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(expected.logits)
    assert result.start == 0
    assert result.token_ids == expected.sequences[0, 50:].tolist()
    assert len(set(result.token_ids)) > 1
    torch.testing.assert_close(result.logprobs, logits.log_softmax(-1), atol=1e-5, rtol=1e-5)
    best = logits.topk(2).values
    torch.testing.assert_close(result.top2_gap, best[:, 0] - best[:, 1], atol=1e-5, rtol=1e-4)
    for layer in result.kept:
        assert torch.equal(result.kept[layer], torch.arange(50).repeat(2, 1))


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_equals_python_loops(pooling):
    model, prompt, forced = make_model(dtype=torch.float64), make_prompt(60), make_prompt(5, seed=1)
    result = Oracle(model, dtype=torch.float64).run(
        prompt,
        budget_tokens=24,
        block_size=8,
        full_layers={0},
        max_new_tokens=5,
        forced_tokens=forced,
        pooling=pooling,
        **SMALL,
    )
    assert result.start == 32
    with torch.no_grad():
        logits, scores, kept = literal_llama(model, prompt + forced[:-1], 60, {0}, 32, pooling)
    assert set(result.kept) == set(kept) == {1, 2}
    for layer in kept:
        torch.testing.assert_close(
            result.scores[layer], torch.tensor(scores[layer]), atol=1e-6, rtol=1e-5
        )
        assert result.kept[layer].tolist() == kept[layer]
    expected = logits[59:].log_softmax(-1).float()
    torch.testing.assert_close(result.logprobs, expected, atol=1e-5, rtol=1e-5)
    assert result.token_ids == expected.argmax(-1).tolist()


def run_small(**overrides):
    options = {"budget_tokens": 24, "block_size": 8, "full_layers": {0}, "max_new_tokens": 6}
    return Oracle(make_model()).run(make_prompt(60), **(options | SMALL | overrides))


def test_shapes_sinks_and_window():
    result = run_small()
    assert set(result.kept) == set(result.scores) == {1, 2}
    assert result.logprobs.shape == (6, VOCAB) and result.logprobs.dtype == torch.float32
    assert result.top2_gap.shape == (6,) and (result.top2_gap >= 0).all()
    for layer, kept in result.kept.items():
        assert kept.shape == (2, 60 - result.start) and kept.dtype == torch.int64
        assert result.scores[layer].shape == (2, 52)
        assert (kept.diff(dim=1) > 0).all()
        assert kept[:, :2].tolist() == [[0, 1]] * 2
        assert kept[:, -8:].tolist() == [list(range(52, 60))] * 2


def test_layers_and_heads_choose_for_themselves():
    result = run_small()
    assert not torch.equal(result.kept[1], result.kept[2])
    assert not torch.equal(result.kept[1][0], result.kept[1][1])


def test_sieving_changes_the_text_from_the_second_step_only():
    sieved, whole = run_small(), run_small(budget_tokens=60)
    assert torch.equal(sieved.logprobs[0], whole.logprobs[0])
    assert (sieved.logprobs[1] - whole.logprobs[1]).abs().max() > 1e-3
    all_full = run_small(full_layers={0, 1, 2})
    assert all_full.start == 32 and all_full.kept == {}
    assert torch.equal(all_full.logprobs, whole.logprobs)


def test_forcing_its_own_tokens_changes_nothing():
    free = run_small()
    forced = run_small(forced_tokens=free.token_ids)
    assert forced.token_ids == free.token_ids
    assert torch.equal(forced.logprobs, free.logprobs)
    other = run_small(forced_tokens=[(t + 1) % VOCAB for t in free.token_ids])
    assert torch.equal(other.logprobs[0], free.logprobs[0])
    assert not torch.allclose(other.logprobs[1], free.logprobs[1], atol=1e-3)


def test_sliding_window_layers_are_left_alone():
    prompt, options = make_prompt(60), {"block_size": 8, "full_layers": set(), "max_new_tokens": 4}
    gemma = Oracle(make_model("gemma3")).run(prompt, budget_tokens=24, **options, **SMALL)
    assert set(gemma.kept) == {1}
    mistral = Oracle(make_model("mistral-sliding"))
    sieved = mistral.run(prompt, budget_tokens=24, **options, **SMALL)
    whole = mistral.run(prompt, budget_tokens=60, **options, **SMALL)
    assert sieved.kept == {} and torch.equal(sieved.logprobs, whole.logprobs)


def test_prefill_in_slices_equals_one_slice(monkeypatch):
    whole = run_small()
    monkeypatch.setattr("tests.oracle.snapkv_oracle.PREFILL_ROWS", 7)
    sliced = run_small()
    torch.testing.assert_close(sliced.logprobs, whole.logprobs, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(sliced.kept[layer], whole.kept[layer]) for layer in whole.kept)


@pytest.mark.parametrize(
    ("prompt_len", "budget", "block", "start"),
    [
        (1, 100, 16, 0),
        (99, 100, 16, 0),
        (100, 100, 16, 0),
        (115, 100, 16, 0),
        (116, 100, 16, 16),
        (131, 100, 16, 16),
        (132, 100, 16, 32),
        (3000, 256, 32, 2720),
    ],
)
def test_sieve_start(prompt_len, budget, block, start):
    assert sieve_start(prompt_len, budget, block) == start


def test_ties_go_to_the_higher_position():
    scores = torch.tensor([[0.0, 1, 1, 1, 1, 0], [5, 0, 0, 0, 0, 0]])
    kept = select_kept(scores, prompt_len=8, num_kept=5, num_sink_tokens=1)
    assert kept.tolist() == [[0, 3, 4, 6, 7], [0, 4, 5, 6, 7]]
    kept = select_kept(scores, prompt_len=8, num_kept=5, num_sink_tokens=0)
    assert kept.tolist() == [[2, 3, 4, 6, 7], [0, 4, 5, 6, 7]]


def test_pooling_stops_at_the_window():
    attention = torch.zeros(2, 1, 8)
    attention[0, 0] = torch.tensor([-4.0, -2, 0, 0, 0, 6, 100, 100])
    # The window here is the last query only, so all but position 7 have a score.
    assert snapkv_scores(attention[:, :, :7], 1, 3, "max").tolist() == [[-1, 0, 0, 0, 3, 3]]
    averages = snapkv_scores(attention[:, :, :7], 1, 3, "avg")
    torch.testing.assert_close(averages, torch.tensor([[-3.0, -3, -1, 0, 3, 3]]) / 3)


def test_kept_difference():
    scores = torch.tensor([[9.0, 1.0, 5.0, 0.999, 3.0, 0.1]])
    reference = torch.tensor([[0, 1, 2, 4, 6, 7]])  # one sink, threshold 1.0, window of two
    assert kept_difference(reference, reference, scores, 0.01, num_sink_tokens=1) == (0, 0)
    near, far = torch.tensor([[0, 2, 3, 4, 6, 7]]), torch.tensor([[0, 2, 4, 5, 6, 7]])
    no_sink, no_window = torch.tensor([[1, 2, 3, 4, 6, 7]]), torch.tensor([[0, 1, 2, 3, 4, 7]])
    assert kept_difference(reference, near, scores, 0.01, num_sink_tokens=1) == (2, 2)
    assert kept_difference(reference, near, scores, 1e-6, num_sink_tokens=1) == (2, 1)
    assert kept_difference(reference, far, scores, 0.01, num_sink_tokens=1) == (2, 1)
    assert kept_difference(reference, far, scores, 1e-6, num_sink_tokens=1) == (2, 1)
    assert kept_difference(reference, no_sink, scores, 0.01, num_sink_tokens=1) == (2, 1)
    assert kept_difference(reference, no_window, scores, 0.01, num_sink_tokens=1) == (2, 1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        # The window does not fit, then the second sink.
        ({"budget_tokens": 7, "block_size": 1, "num_sink_tokens": 0}, "cannot hold a window"),
        ({"budget_tokens": 9, "block_size": 1}, "cannot hold a window"),
        ({"full_layers": {3}}, "no such layers"),
        ({"pool_size": 4}, "must be odd"),
        ({"pooling": "median"}, "pooling must be"),
        ({"max_new_tokens": 0}, "at least one"),
        ({"forced_tokens": [1]}, "forced tokens for"),
    ],
)
def test_refuses(overrides, words):
    with pytest.raises(ValueError, match=words):
        run_small(**overrides)


def test_the_tightest_budget():
    result = run_small(budget_tokens=10, block_size=1)
    for kept in result.kept.values():
        assert kept.tolist() == [[0, 1, *range(52, 60)]] * 2


def test_bfloat16_keeps_scores_and_rotary_frequencies_in_fp32():
    model = make_model()
    oracle = Oracle(model, dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    result = oracle.run(
        make_prompt(60), budget_tokens=24, block_size=8, full_layers={0}, max_new_tokens=2, **SMALL
    )
    assert result.scores[1].dtype == result.logprobs.dtype == torch.float32
    assert result.logprobs.exp().sum(-1).sub(1).abs().max() < 1e-5


def test_a_prompt_shorter_than_the_window():
    result = Oracle(make_model()).run(
        make_prompt(5), budget_tokens=64, block_size=16, full_layers=set(), max_new_tokens=3
    )
    assert result.start == 0 and result.scores[0].shape == (2, 0)
    assert result.kept[0].tolist() == [list(range(5))] * 2
