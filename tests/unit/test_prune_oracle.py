"""The pruning oracle against Hugging Face's own layers and against the formulas in Python loops."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
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
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.oracle.prune_formula import (
    gemfilter_score,
    policy_score,
    pooled,
    rank_variance,
    ranks,
    window_score,
)
from tests.oracle.prune_oracle import PruneParams, PruneResult, run
from tests.oracle.snapkv_oracle import Oracle

VOCAB, LAYERS, P, K, STEPS = 97, 6, 48, 20, 5
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Wide weights: with the default 0.02 attention is almost uniform and scores nearly tie.
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
ARCHITECTURES = {
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**SHAPE)),
    "mistral": (
        MistralForCausalLM,
        lambda: MistralConfig(**SHAPE, head_dim=8, sliding_window=None),
    ),
    "qwen2": (Qwen2ForCausalLM, lambda: Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, lambda: Qwen3Config(**SHAPE, head_dim=16)),
}
POLICY = {"policy_window": 6, "policy_pool": ("max", 5), "policy_sinks": 2, "policy_recent": 6}
# Fewer recent tokens than the policy's window, so that the one cannot stand for the other.
OTHER_POLICY = POLICY | {"policy_pool": ("avg", 3), "policy_recent": 3}
FASTKV = PruneParams("fastkv", K, window=4, pool=("max", 3), layer=2, **OTHER_POLICY)
ASL = PruneParams(
    "asl", K, window=4, pool=("avg", 7), min_layer=2, observed_layers=3, threshold=0.0, **POLICY
)
GEMFILTER = PruneParams("gemfilter", K, window=1, pool=("avg", 5), layer=3)
TWO_PASS = replace(ASL, method="asl-two-pass")


def make_model(name: str = "llama", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model_class, make_config = ARCHITECTURES[name]
    model: PreTrainedModel = model_class(make_config())
    with torch.no_grad():
        for param in model.parameters():
            # Biases and norm weights start at 0 and 1, where leaving them out would not show.
            if param.ndim == 1:
                param.add_(torch.randn_like(param) * 0.2)
    return model.eval()


def make_prompt(length: int = P, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (length,), generator=generator).tolist()


def prune(params: PruneParams, name: str = "llama", steps: int = STEPS) -> PruneResult:
    return run(make_model(name), make_prompt(), params, steps)


# --- a second reading of the definitions: Hugging Face's own forward, and Python loops -----------


@torch.no_grad()
def observe(model, prompt):
    """The prompt through the model's own forward: attention, hidden states and cache by layer."""
    return model(
        torch.tensor([prompt]),
        use_cache=True,
        output_attentions=True,
        output_hidden_states=True,
        # The head on one row, as in decoding and in the oracle: on many it rounds differently.
        logits_to_keep=1,
    )


@torch.no_grad()
def continue_with(model, cache, logits, position, steps):
    """Greedy tokens and logits by the model's own decode on a hand-made cache."""
    tokens, rows = [], []
    for step in range(steps):
        rows.append(logits)
        tokens.append(int(logits.argmax()))
        logits = model(
            torch.tensor([tokens[-1:]]),
            position_ids=torch.tensor([[position + step]]),
            past_key_values=cache,
        ).logits[0, -1]
    return tokens, torch.stack(rows)


def literal_pool(row, kind, size):
    out = []
    for j in range(len(row)):
        near = [row[i] for i in range(j - size // 2, j + size // 2 + 1) if 0 <= i < len(row)]
        out.append(max(near) if kind == "max" else sum(near) / size)
    return out


def literal_window_score(attention, window, kind, size):
    """attention[head][query][key], after softmax."""
    n = len(attention[0])
    total = [0.0] * (n - window)
    for head in attention:
        mass = [sum(head[i][j] for i in range(n - window, n)) for j in range(n - window)]
        total = [a + b for a, b in zip(total, literal_pool(mass, kind, size), strict=True)]
    return total


def literal_rank(scores, j):
    return 1 + sum((s, i) > (scores[j], j) for i, s in enumerate(scores))


def literal_best(scores, count, sinks=0):
    """Forced first tokens, then the best others."""
    others = sorted(range(sinks, len(scores)), key=lambda j: literal_rank(scores, j))
    return sorted([*range(sinks), *others[: count - sinks]])


def literal_variance(scores_by_layer, best):
    """The mean of squares less the square of the mean, exactly."""
    moved = []
    for j in range(len(scores_by_layer[0])):
        row = [literal_rank(scores, j) for scores in scores_by_layer]
        if min(row) <= best:
            square = Fraction(sum(r * r for r in row), len(row))
            moved.append(square - Fraction(sum(row), len(row)) ** 2)
    return float(sum(moved) / len(moved))


def literal_policy(attention, params, num_kv_heads=2):
    group, n, kept = len(attention) // num_kv_heads, len(attention[0]), []
    for kv in range(num_kv_heads):
        mean = [
            sum(
                attention[h][i][j]
                for h in range(kv * group, (kv + 1) * group)
                for i in range(n - params.policy_window, n)
            )
            / (group * params.policy_window)
            for j in range(n - params.policy_recent)
        ]
        best = literal_best(
            literal_pool(mean, *params.policy_pool),
            params.kept - params.policy_recent,
            params.policy_sinks,
        )
        kept.append([*best, *range(n - params.policy_recent, n)])
    return kept


def literal_asl(scores, params):
    """(variances, relative) of every layer from min_layer."""
    variances = {
        layer: literal_variance(
            scores[layer - params.observed_layers + 1 : layer + 1], params.kept - params.window
        )
        for layer in range(params.min_layer, len(scores))
    }
    return variances, {layer: v / variances[params.min_layer] for layer, v in variances.items()}


def all_window_scores(seen, params):
    return [
        literal_window_score(a[0].tolist(), params.window, *params.pool) for a in seen.attentions
    ]


@torch.no_grad()
def pruned_by_hand(model, seen, positions, layer, kept_per_layer, steps):
    """Deeper layers by the model's own modules on the chosen rows; then the model's own decode."""
    cache, rows = DynamicCache(), torch.tensor(positions)
    for index, kept in enumerate(kept_per_layer):
        rows_of = [
            torch.stack([tensor[0, head, head_kept] for head, head_kept in enumerate(kept)])[None]
            for tensor in (
                seen.past_key_values.layers[index].keys,
                seen.past_key_values.layers[index].values,
            )
        ]
        cache.update(*rows_of, index)
    inputs = hidden = seen.hidden_states[layer + 1][:, rows]
    mask = torch.full((len(rows), len(rows)), -math.inf).triu(1)[None, None]
    rotary = model.model.rotary_emb(hidden, rows[None])
    for index in range(layer + 1, LAYERS):
        hidden = model.model.layers[index](
            hidden, attention_mask=mask, position_embeddings=rotary, past_key_values=cache
        )
    logits = model.lm_head(model.model.norm(hidden))[0, -1]
    return inputs[0], continue_with(model, cache, logits, P, steps)


def assert_same_text(result, tokens, logits):
    assert result.tokens == tokens
    assert len(set(tokens)) > 1
    assert_close(result.logprobs, logits.log_softmax(-1))


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


# --- one pass ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fastkv_equals_the_models_own_layers(name, sinks):
    params, model, prompt = replace(FASTKV, sinks=sinks), make_model(name), make_prompt()
    result = run(model, prompt, params, STEPS)
    seen = observe(model, prompt)
    scores = all_window_scores(seen, params)[2]
    positions = literal_best(scores, K - 4, sinks) + list(range(P - 4, P))
    kept = [literal_policy(a[0].tolist(), params) for a in seen.attentions[:3]]
    assert (result.selected_layer, result.reason) == (2, "fixed")
    assert result.positions.tolist() == positions
    assert [layer.tolist() for layer in result.kept_per_layer] == kept
    assert result.variances == result.relative == {}
    inputs, text = pruned_by_hand(model, seen, positions, 2, kept, STEPS)
    assert_close(result.deep_inputs, inputs)
    assert_same_text(result, *text)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_asl_equals_the_models_own_layers(name):
    model, prompt = make_model(name), make_prompt()
    seen = observe(model, prompt)
    scores = all_window_scores(seen, ASL)
    variances, relative = literal_asl(scores, ASL)
    # A threshold just above the smaller of two layers, so that either can be the one.
    params = replace(ASL, threshold=min(relative[3], relative[4]) * 1.001)
    layer = 3 if relative[3] < params.threshold else 4
    result = run(model, prompt, params, STEPS)
    assert (result.selected_layer, result.reason) == (layer, "threshold")
    reached = range(2, layer + 1)
    assert result.variances == pytest.approx({i: variances[i] for i in reached}, rel=1e-12)
    assert result.relative == pytest.approx({i: relative[i] for i in reached}, rel=1e-12)
    positions = literal_best(scores[layer], K - 4) + list(range(P - 4, P))
    kept = [literal_policy(a[0].tolist(), params) for a in seen.attentions[: layer + 1]]
    assert result.positions.tolist() == positions
    assert [head.tolist() for head in result.kept_per_layer] == kept
    inputs, text = pruned_by_hand(model, seen, positions, layer, kept, STEPS)
    assert_close(result.deep_inputs, inputs)
    assert_same_text(result, *text)


def test_the_models_of_these_tests_select_at_different_layers():
    """Without this the test above could pass with a fixed layer."""
    layers = set()
    for name in ARCHITECTURES:
        relative = prune(ASL, name, steps=1).relative
        layers.add(3 if relative[3] < relative[4] else 4)
    assert layers == {3, 4}


def test_asl_that_never_triggers_is_the_policy_alone():
    result = prune(ASL)
    assert (result.selected_layer, result.reason) == (None, "never")
    assert result.positions is None and result.deep_inputs is None
    assert list(result.variances) == list(result.relative) == [2, 3, 4, 5]
    sieved = Oracle(make_model()).run(
        make_prompt(),
        budget_tokens=K,
        block_size=1,
        full_layers=set(),
        observation_window=6,
        pool_size=5,
        num_sink_tokens=2,
        max_new_tokens=STEPS,
    )
    assert len(result.kept_per_layer) == LAYERS
    for layer, kept in enumerate(result.kept_per_layer):
        assert torch.equal(kept, sieved.kept[layer])
    assert result.tokens == sieved.token_ids
    assert_close(result.logprobs, sieved.logprobs)


def test_the_threshold_is_strict():
    relative = prune(ASL, steps=1).relative
    lowest = min(relative[3], relative[4])
    at, above = (
        prune(replace(ASL, threshold=t), steps=1) for t in (lowest, math.nextafter(lowest, 9))
    )
    assert at.reason == "never" and above.reason == "threshold"
    assert relative[above.selected_layer] == lowest


def test_the_first_layer_that_can_be_selected_follows_min_layer():
    result = prune(replace(ASL, threshold=1e9), steps=1)
    assert (result.selected_layer, result.reason) == (3, "threshold")
    assert result.relative[2] == 1.0


@pytest.mark.parametrize("max_layer", [2, 3, 4])
def test_a_deepest_layer_prunes_anyway(max_layer):
    result = prune(replace(ASL, max_layer=max_layer))
    assert (result.selected_layer, result.reason) == (max_layer, "deepest")
    fixed = prune(replace(FASTKV, layer=max_layer, pool=ASL.pool, **POLICY))
    assert torch.equal(result.positions, fixed.positions)
    assert torch.equal(result.logprobs, fixed.logprobs)
    assert len(result.kept_per_layer) == max_layer + 1


def test_a_trigger_at_the_deepest_layer_is_a_trigger():
    assert prune(replace(ASL, threshold=1e9, max_layer=3), steps=1).reason == "threshold"


@pytest.mark.parametrize("method", ["asl", "asl-two-pass"])
def test_the_last_layer_is_never_selected(method):
    params = replace(ASL, method=method, min_layer=4, threshold=1e9, max_layer=5)
    result = prune(params, steps=1)
    assert result.reason == "never" and result.relative[5] < 1e9
    assert result.selected_layer == (None if method == "asl" else 5)


def test_without_variance_at_min_layer_nothing_triggers():
    # One layer has no variance.
    params = replace(ASL, observed_layers=1, threshold=1e9)
    result = prune(params, steps=1)
    assert result.reason == "never" and set(result.variances.values()) == {0.0}
    assert all(math.isnan(r) for r in result.relative.values())
    assert prune(replace(params, max_layer=3), steps=1).reason == "deepest"


def test_sinks_change_what_is_kept_and_no_variance():
    plain, forced = (prune(replace(ASL, sinks=s, max_layer=3), steps=1) for s in (0, 3))
    assert forced.variances == plain.variances
    assert forced.positions[:3].tolist() == [0, 1, 2] != plain.positions[:3].tolist()
    assert len(forced.positions) == K and (forced.positions.diff() > 0).all()
    assert set(forced.positions[3:].tolist()) < set(plain.positions.tolist())


# --- two passes ----------------------------------------------------------------------------------


@torch.no_grad()
def own_gemfilter_scores(model, seen, layer, size):
    """Queries by the model's own modules, keys from its cache; the last query alone."""
    attn = model.model.layers[layer].self_attn
    x = model.model.layers[layer].input_layernorm(seen.hidden_states[layer])
    q = attn.q_proj(x).view(1, P, -1, attn.head_dim)
    q = (attn.q_norm(q) if hasattr(attn, "q_norm") else q).transpose(1, 2)
    q, _ = apply_rotary_pos_emb(q, q, *model.model.rotary_emb(x, torch.arange(P)[None]))
    last, k = q[0, :, -1].tolist(), seen.past_key_values.layers[layer].keys[0].tolist()
    raw = [
        sum(a * b for h in range(4) for a, b in zip(last[h], k[h // 2][j], strict=True))
        for j in range(P)
    ]
    return literal_pool(raw, "avg", size)


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gemfilter_equals_generate_on_the_kept_ids(name, sinks):
    params, model, prompt = replace(GEMFILTER, sinks=sinks), make_model(name), make_prompt()
    result = run(model, prompt, params, STEPS)
    scores = own_gemfilter_scores(model, observe(model, prompt), 3, 5)
    positions = literal_best(scores, K, sinks)
    assert (result.selected_layer, result.reason) == (3, "fixed")
    assert result.positions.tolist() == positions
    assert result.kept_per_layer == []
    ids = torch.tensor(prompt)[positions]
    assert torch.equal(result.deep_inputs, model.model.embed_tokens(ids))
    assert_generates(model, ids.tolist(), result)


def assert_generates(model, ids, result):
    expected = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=STEPS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert_same_text(result, expected.sequences[0, len(ids) :].tolist(), torch.cat(expected.logits))


def test_gemfilter_forces_nothing():
    kept = {p for seed in range(8) for p in run_gemfilter(seed)}
    assert any(0 not in run_gemfilter(seed) for seed in range(8))
    assert any(P - 1 not in run_gemfilter(seed) for seed in range(8))
    assert {0, P - 1} <= kept


def run_gemfilter(seed):
    return run(make_model(), make_prompt(seed=seed), GEMFILTER, 1).positions.tolist()


@pytest.mark.parametrize("max_layer", [3, None])
def test_two_pass_asl_reads_the_kept_ids_again(max_layer):
    result = prune(replace(TWO_PASS, max_layer=max_layer))
    layer = LAYERS - 1 if max_layer is None else max_layer
    assert result.reason == ("never" if max_layer is None else "deepest")
    assert result.selected_layer == layer
    scores = all_window_scores(observe(make_model(), make_prompt()), ASL)[layer]
    positions = literal_best(scores, K - 4) + list(range(P - 4, P))
    assert result.positions.tolist() == positions
    assert result.variances == prune(replace(ASL, max_layer=max_layer), steps=1).variances
    assert_generates(make_model(), [make_prompt()[p] for p in positions], result)


@pytest.mark.parametrize("params", [GEMFILTER, TWO_PASS], ids=lambda p: p.method)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_second_pass_may_start_anywhere(name, params):
    """Rotary attention sees distances only."""
    from_zero, to_the_end = (prune(replace(params, contiguous_from=c), name) for c in (0, P - K))
    assert torch.equal(from_zero.positions, to_the_end.positions)
    assert from_zero.tokens == to_the_end.tokens
    torch.testing.assert_close(from_zero.logprobs, to_the_end.logprobs, atol=1e-4, rtol=0)
    assert not torch.equal(from_zero.logprobs, to_the_end.logprobs)


# --- nothing to prune ----------------------------------------------------------------------------


@pytest.mark.parametrize("params", [FASTKV, ASL, GEMFILTER, TWO_PASS], ids=lambda p: p.method)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("length", [1, 7, K])
def test_a_prompt_that_fits_is_the_plain_model_exactly(name, length, params):
    model, prompt = make_model(name), make_prompt(length)
    result = run(model, prompt, params, STEPS)
    assert (result.selected_layer, result.reason) == (None, "never")
    assert result.positions is None and result.deep_inputs is None and result.variances == {}
    everything = torch.arange(length).repeat(2, 1)
    assert len(result.kept_per_layer) == LAYERS
    assert all(torch.equal(kept, everything) for kept in result.kept_per_layer)
    seen = observe(model, prompt)
    tokens, logits = continue_with(model, seen.past_key_values, seen.logits[0, -1], length, STEPS)
    assert result.tokens == tokens
    assert torch.equal(result.logprobs, logits.log_softmax(-1))


def test_one_token_more_than_fits_is_pruned():
    for params in (FASTKV, GEMFILTER):
        result = run(make_model(), make_prompt(K + 1), params, 1)
        assert result.reason == "fixed" and len(result.positions) == K


# --- formulas ------------------------------------------------------------------------------------


def test_of_equal_scores_the_higher_position_ranks_better():
    assert ranks(torch.tensor([1.0, 3, 1, 3, 1])).tolist() == [5, 2, 4, 1, 3]
    assert ranks(torch.zeros(4)).tolist() == [4, 3, 2, 1]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12))
def test_ranks_count_who_is_better(scores):
    assert ranks(torch.tensor(scores).float()).tolist() == [
        literal_rank(scores, j) for j in range(len(scores))
    ]


def test_rank_variance_by_hand():
    observed = [torch.tensor([1, 2, 3, 4]), torch.tensor([3, 2, 1, 4])]
    # Of the best one per layer: tokens 0 and 2, each 1 from its mean. Of the best two also token 1.
    assert rank_variance(observed, 1) == 1.0
    assert rank_variance(observed, 2) == pytest.approx(2 / 3)
    assert rank_variance(observed, 4) == 0.5


@given(
    st.lists(st.permutations(list(range(9))), min_size=1, max_size=5),
    st.integers(1, 9),
)
def test_rank_variance_is_the_mean_of_squares_less_the_square_of_the_mean(layers, best):
    observed = [ranks(torch.tensor(scores).float()) for scores in layers]
    expected = literal_variance(layers, best)
    assert rank_variance(observed, best) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_pooling_at_the_edges():
    scores = torch.tensor([[-4.0, -2, 0, 6]])
    assert pooled(scores, ("max", 3)).tolist() == [[-2, 0, 6, 6]]
    assert_close(pooled(scores, ("avg", 3)), torch.tensor([[-2.0, -2, 4 / 3, 2]]))
    assert_close(pooled(scores[:, :1], ("avg", 5)), torch.tensor([[-0.8]]))


def test_scores_by_hand():
    # Two query heads on one KV head of one dimension; e**0 and e**log(3) make easy weights.
    k = torch.tensor([[[0.0], [math.log(3)], [0.0], [0.0]]])
    q = torch.tensor([[[7.0], [7.0], [1.0], [0.0]], [[7.0], [7.0], [0.0], [2.0]]])
    # Query 2 sees 3 keys, query 3 sees 4. Head 0: weights 1 3 1 / 5 and 1 / 4 each.
    # Head 1: 1 / 3 each, then 1 9 1 1 / 12.
    one, two = [1 / 5 + 1 / 4, 3 / 5 + 1 / 4], [1 / 3 + 1 / 12, 1 / 3 + 9 / 12]
    shared = torch.tensor([a + b for a, b in zip(one, two, strict=True)])
    assert_close(window_score(q, k, 1.0, 2, ("avg", 1)), shared)
    assert_close(policy_score(q, k, 1.0, 2, ("avg", 1), 2), shared[None] / 4)
    # Query 2 gives nothing to key 3: the mean is still over two queries.
    last = (1 / 5 + 1 / 4 + 1 / 3 + 1 / 12) / 4
    assert policy_score(q, k, 1.0, 2, ("avg", 1), 1)[0, 2].item() == pytest.approx(last)
    # Pooling by maximum comes before the sum over heads, and the sum over heads before GemFilter's.
    assert_close(gemfilter_score(q, k, ("avg", 1)), torch.tensor([0.0, 2 * math.log(3), 0, 0]))
    third = 2 * math.log(3) / 3
    assert_close(gemfilter_score(q, k, ("avg", 3)), torch.tensor([third, third, third, 0]))


def test_maxima_are_taken_per_query_head():
    q = torch.tensor([[[0.0], [0], [0], [5]], [[0], [0], [0], [-5]]])
    k = torch.tensor([[[1.0], [0], [-1], [0]]])
    weights = torch.stack([torch.softmax(s * k[0, :, 0], 0)[:3] for s in (5, -5)])
    expected = pooled(weights, ("max", 3)).sum(0)
    assert not torch.allclose(expected, pooled(weights.sum(0)[None], ("max", 3))[0])
    assert_close(window_score(q, k, 1.0, 1, ("max", 3)), expected)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "changes", "words"),
    [
        (FASTKV, {"method": "h2o"}, "no such method"),
        (FASTKV, {"pool": ("avg", 4)}, "odd"),
        (FASTKV, {"policy_pool": ("sum", 3)}, "avg or max"),
        (FASTKV, {"window": 0}, "at least 1"),
        (FASTKV, {"sinks": -1}, "not negative"),
        (FASTKV, {"window": K}, "one token that is chosen"),
        (FASTKV, {"sinks": K - 3}, "cannot hold a window"),
        (FASTKV, {"policy_recent": K - 1}, "of the policy"),
        (FASTKV, {"layer": None}, "layer=None"),
        (ASL, {"layer": 3}, "layer=3"),
        (ASL, {"observed_layers": 4}, "fewer than 4"),
        (ASL, {"max_layer": 1}, "max_layer=1"),
        (FASTKV, {"max_layer": 3}, "max_layer=3"),
    ],
)
def test_refuses_parameters(params, changes, words):
    with pytest.raises(ValueError, match=words):
        replace(params, **changes)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (replace(FASTKV, layer=LAYERS - 1), "fastkv cannot select at layer 5 of 6"),
        (replace(GEMFILTER, layer=LAYERS), "gemfilter cannot select at layer 6"),
        (replace(ASL, min_layer=LAYERS), "asl cannot select at layer 6"),
    ],
)
def test_refuses_layers_that_the_model_does_not_have(params, words):
    with pytest.raises(ValueError, match=words):
        prune(params)


def test_refuses_models_and_lengths():
    sliding = MistralForCausalLM(MistralConfig(**SHAPE, head_dim=8, sliding_window=16))
    for model, words in (
        (sliding, "no sliding window, the model has 16"),
        (make_model().to(torch.bfloat16), "float32"),
    ):
        with pytest.raises(ValueError, match=words):
            run(model, make_prompt(), FASTKV, 1)
    other = make_model()
    other.config.model_type = "gemma3_text"
    with pytest.raises(ValueError, match="not checked for model type gemma3_text"):
        run(other, make_prompt(), FASTKV, 1)
    for prompt, steps in (([], 1), (make_prompt(), 0)):
        with pytest.raises(ValueError, match="at least one"):
            run(make_model(), prompt, FASTKV, steps)
