"""Pruning while a prompt is read: against an independent reference, alone, mixed and in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.engines import Generated, drop_engine, generate, make_engine, scheduler, worker
from tests.engine.host import EngineHost, HostError
from tests.engine.models import random_prompt, tiny_model
from tests.engine.prune_agreement import (
    BUDGET,
    METHODS,
    OUTPUT,
    check,
    load,
    reference_of,
    stored,
)

pytestmark = pytest.mark.engine


def asking(method: str, **sampling: Any) -> dict[str, Any]:
    extra = {"kv_prune": method}
    return {"ignore_eos": True, "max_tokens": OUTPUT, "extra_args": extra, **sampling}


def start(host: EngineHost, model: str, step: int = 1032, **settings: Any) -> None:
    options = settings.pop("options", {})
    host.call(
        make_engine,
        "prune",
        model,
        {"budget": BUDGET, "prune": "fastkv", **settings},
        **{"max_model_len": 1024, "max_num_batched_tokens": step, **options},
    )


def watch_inputs(name: str) -> None:
    """Record what enters each decoder layer, by layer; the last call with few rows wins."""
    sieve = worker(name).sieve
    seen: dict[int, torch.Tensor] = {}

    def watch(number: int) -> Any:
        def before(_layer: Any, args: tuple[Any, ...]) -> None:
            _, hidden_states, residual = args[:3]
            if len(hidden_states) > 1:
                total = hidden_states if residual is None else hidden_states + residual
                seen[number] = total.clone()

        return before

    for number, layer in enumerate(sieve.pruner._layers):
        layer.register_forward_pre_hook(watch(number))
    sieve.seen_inputs = seen


def inputs_of(name: str) -> dict[int, torch.Tensor]:
    """What `watch_inputs` recorded."""
    return worker(name).sieve.seen_inputs


@pytest.fixture(scope="module")
def words(real_model: str) -> list[int]:
    from transformers import AutoTokenizer

    text = " ".join(f"Item {i} costs {i * i % 97} and weighs {i * 7 % 31}." for i in range(200))
    return AutoTokenizer.from_pretrained(real_model).encode(text)


@pytest.fixture(scope="module")
def real_engine(v1_host: EngineHost, real_model: str) -> Iterator[EngineHost]:
    start(v1_host, real_model)
    v1_host.call(watch_inputs, "prune")
    yield v1_host
    v1_host.call(drop_engine, "prune")


@pytest.fixture(scope="module")
def reference_model(real_model: str) -> Any:
    return load(real_model)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_agrees_with_the_reference(
    real_engine: EngineHost, reference_model: Any, words: list[int], method: str
) -> None:
    ties = 0
    for length in (333, 700):
        prompt = words[length : 2 * length]
        (generated,) = real_engine.call(generate, "prune", [prompt], asking(method))
        inputs = real_engine.call(inputs_of, "prune")
        reference = reference_of(
            reference_model, prompt, method, **({"min_layer": 9} if "asl" in method else {})
        )
        ties += check(reference, generated, inputs)
    assert ties <= 1


def test_a_request_names_its_layer(
    real_engine: EngineHost, reference_model: Any, words: list[int]
) -> None:
    prompt = words[:400]
    for method, changes in (("fastkv@5", {"layer": 5}), ("asl@14", {"min_layer": 14})):
        (generated,) = real_engine.call(generate, "prune", [prompt], asking(method))
        reference = reference_of(reference_model, prompt, method.split("@")[0], **changes)
        check(reference, generated)


def test_a_mixed_batch_equals_each_request_alone(real_engine: EngineHost, words: list[int]) -> None:
    lengths = (300, 129, 500, 161, 700, 90, 260, 410)
    wishes = ("fastkv", "asl", "gemfilter", "none", "asl-two-pass", "asl", "fastkv@3", "asl@14")
    prompts = [words[13 * i : 13 * i + n] for i, n in enumerate(lengths)]
    asked = [asking(wish) for wish in wishes]
    together = real_engine.call(generate, "prune", prompts, asked)
    for prompt, request, mixed in zip(prompts, asked, together, strict=True):
        (alone,) = real_engine.call(generate, "prune", [prompt], request)
        same_outcome(mixed, alone)


def same_outcome(one: Generated, other: Generated) -> None:
    assert (one.report["pruned"] is None) == (other.report["pruned"] is None)
    if one.report["pruned"]:
        for key in ("method", "layer", "reason", "kept_tokens"):
            assert one.report["pruned"][key] == other.report["pruned"][key]
    assert one.kept.keys() == other.kept.keys()
    for layer in one.kept:
        assert (one.kept[layer] == other.kept[layer]).float().mean() > 0.995
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=5e-3)


@pytest.mark.parametrize("method", METHODS)
def test_prompts_within_the_budget_are_left_alone(
    real_engine: EngineHost, words: list[int], method: str
) -> None:
    prompts = [words[:length] for length in (1, 7, 31, 33, 128, 159)]
    for generated in real_engine.call(generate, "prune", prompts, asking(method)):
        assert generated.report["pruned"] is None
        assert generated.report["not_pruned"] == "the prompt fits its budget"
        assert generated.report["dropped_tokens"] == 0


def test_what_cannot_be_pruned_says_why(real_engine: EngineHost, words: list[int]) -> None:
    (generated,) = real_engine.call(
        generate, "prune", [words[:400]], asking("asl", prompt_logprobs=0)
    )
    assert generated.report["pruned"] is None
    assert "prompt_logprobs" in generated.report["not_pruned"]
    assert generated.report["sieved"]
    assert len(generated.prompt_logprobs) == 399


@pytest.mark.parametrize(
    ("wish", "words_of_the_error"),
    [
        ("slimmer", "one of asl, fastkv"),
        ("fastkv@29", r"layer must be in \[0, 28\]"),
        ("asl@3", r"layer must be in \[7, 27\]"),
        ("asl@", "one of asl"),
        (3, "one of asl"),
    ],
)
def test_a_wrong_wish_is_refused(
    real_engine: EngineHost, words: list[int], wish: Any, words_of_the_error: str
) -> None:
    with pytest.raises(HostError, match=words_of_the_error):
        real_engine.call(generate, "prune", [words[:200]], asking(wish))
    # Nobody else is harmed.
    (generated,) = real_engine.call(generate, "prune", [words[:200]], asking("fastkv"))
    assert generated.report["pruned"]


def test_nothing_stays_behind(real_engine: EngineHost, words: list[int]) -> None:
    real_engine.call(generate, "prune", [words[:500]], asking("fastkv"))
    real_engine.call(generate, "prune", [[5]], {"max_tokens": 1})
    assert real_engine.call(left_over, "prune") == (0, 0, 0)


def left_over(name: str) -> tuple[int, int, int]:
    sieve = worker(name).sieve
    hooks = sum(
        len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in sieve.pruner._layers
    )
    watched = len(sieve.pruner._layers) if hasattr(sieve, "seen_inputs") else 0
    return sieve.pruner.num_carried, sieve.observer.num_open, hooks - watched


@pytest.mark.parametrize("step", [300, 217])
def test_chunks_of_fastkv_give_what_a_whole_prompt_gives(
    v1_host: EngineHost, real_model: str, words: list[int], step: int
) -> None:
    prompts = [words[:500], words[:900], words[100:140], words[300:1000]]
    outcomes = []
    for size in (1032, step):
        start(v1_host, real_model, step=size)
        outcomes.append(v1_host.call(generate, "prune", prompts, asking("fastkv")))
        left = v1_host.call(left_over, "prune")
        v1_host.call(drop_engine, "prune")
    assert left == (0, 0, 0)
    for whole, cut in zip(*outcomes, strict=True):
        same_outcome(whole, cut)


def test_a_prompt_too_long_for_a_step_is_only_sieved(
    v1_host: EngineHost, real_model: str, words: list[int]
) -> None:
    start(v1_host, real_model, step=300, prune="asl")
    requests = [asking(wish) for wish in ("asl", "fastkv", "asl")]
    prompts = [words[:500], words[:400], words[:292]]
    outcomes = v1_host.call(generate, "prune", prompts, requests)
    v1_host.call(drop_engine, "prune")
    for generated in outcomes[:2]:
        # Memory for chunks is set aside where fastkv is the operator's method.
        assert "292 are the most" in generated.report["not_pruned"]
        assert generated.report["sieved"]
    assert outcomes[2].report["pruned"]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_architectures(v1_host: EngineHost, model_folder: Any, architecture: str) -> None:
    path = tiny_model(model_folder, architecture)
    start(v1_host, path, options={"skip_tokenizer_init": True})
    model = load(path)
    ties = 0
    for method in METHODS:
        # Six layers: the authors' layer numbers are scaled, and two layers observed.
        changes = {"min_layer": 2, "observed_layers": 2} if "asl" in method else {}
        for seed, length in enumerate((300, 555)):
            prompt = random_prompt(length, seed)
            request = asking(method, detokenize=False)
            (generated,) = v1_host.call(generate, "prune", [prompt], request)
            ties += check(reference_of(model, prompt, method, **changes), generated)
    v1_host.call(drop_engine, "prune")
    assert ties <= 2


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_within_the_budget_it_is_stock_bit_for_bit(
    request: pytest.FixtureRequest, runner: str, tiny_llama: str
) -> None:
    host: EngineHost = request.getfixturevalue(f"{runner}_host")
    prompts = [random_prompt(length, length) for length in (1, 33, 128, 255, 256)]
    options = {"skip_tokenizer_init": True, "max_model_len": 544, "max_num_batched_tokens": 552}
    sampling = {"ignore_eos": True, "max_tokens": 8, "detokenize": False}
    host.call(make_engine, "stock", tiny_llama, None, **options)
    stock = host.call(generate, "stock", prompts, sampling)
    host.call(drop_engine, "stock")
    host.call(make_engine, "prune", tiny_llama, {"budget": 256, "prune": "fastkv"}, **options)
    for method in METHODS:
        wish = {**sampling, "extra_args": {"kv_prune": method}}
        for one, other in zip(stock, host.call(generate, "prune", prompts, wish), strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == other.logprobs
    host.call(drop_engine, "prune")


def test_every_method_on_v2(v2_host: EngineHost, model_folder: Any) -> None:
    path = tiny_model(model_folder, "llama")
    start(v2_host, path, options={"skip_tokenizer_init": True})
    prompts = [random_prompt(length, length) for length in (300, 411, 200, 333)]
    wishes = [asking(method, detokenize=False, max_tokens=8) for method in METHODS]
    together = v2_host.call(generate, "prune", prompts, wishes)
    v2_host.call(drop_engine, "prune")
    model, ties = load(path), 0
    for method, prompt, generated in zip(METHODS, prompts, together, strict=True):
        changes = {"min_layer": 2, "observed_layers": 2} if "asl" in method else {}
        ties += check(reference_of(model, prompt, method, **changes), generated)
    assert ties <= 1


def cached_tokens(name: str, prompts: list[list[int]], wish: str) -> list[int]:
    """Tokens that the prefix cache had of each prompt, one after the other."""
    from vllm import SamplingParams

    from tests.engine.engines import _engines

    counts = []
    for prompt in prompts:
        sampling = SamplingParams(max_tokens=2, detokenize=False, extra_args={"kv_prune": wish})
        (output,) = _engines[name].generate(
            [{"prompt_token_ids": prompt}], sampling, use_tqdm=False
        )
        counts.append(output.num_cached_tokens)
    return counts


def test_a_pruned_request_leaves_the_prefix_cache_alone(
    v1_host: EngineHost, tiny_llama: str
) -> None:
    options = {"skip_tokenizer_init": True, "enable_prefix_caching": True}
    start(v1_host, tiny_llama, options=options)
    prompt = random_prompt(500, 1)
    for method in METHODS:
        assert v1_host.call(cached_tokens, "prune", [prompt] * 2, method) == [0, 0]
    first, second = v1_host.call(cached_tokens, "prune", [prompt] * 2, "none")
    assert first == 0
    assert second > 300
    # What is cached now is no use to a pruned request, and does not harm it.
    assert v1_host.call(cached_tokens, "prune", [prompt], "asl") == [0]
    v1_host.call(drop_engine, "prune")


@pytest.mark.parametrize(
    ("settings", "words_of_the_error"),
    [
        ({"full_layers": 2}, "every layer to be sieved"),
        ({"layer_budgets": "pyramid"}, "same budget in every layer"),
        ({"prune_options": {"layer": 5}}, r"layer must be in \[0, 4\]"),
        ({"prune_options": {"tau": 0.3}}, "prune_options"),
        ({"prune": "none", "prune_options": {"layer": 3}}, "do nothing while prune is 'none'"),
        ({"prune_calibration": "/nowhere.json"}, "cannot be read"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    v1_host: EngineHost, tiny_llama: str, settings: dict[str, Any], words_of_the_error: str
) -> None:
    with pytest.raises(HostError, match=words_of_the_error):
        start(v1_host, tiny_llama, options={"skip_tokenizer_init": True}, **settings)


def test_a_model_with_sliding_windows_is_refused(v1_host: EngineHost, model_folder: Any) -> None:
    path = tiny_model(model_folder, "gemma3")
    with pytest.raises(HostError, match="prune needs every layer to be sieved"):
        start(v1_host, path, options={"skip_tokenizer_init": True})


def test_one_step_reads_a_prompt_or_none(v1_host: EngineHost, tiny_llama: str) -> None:
    """Whether a prompt is pruned does not depend on what else is in the queue."""
    start(v1_host, tiny_llama, step=420, prune="asl", options={"skip_tokenizer_init": True})
    prompts = [random_prompt(length, length) for length in (400, 380, 412, 250, 300, 390)]
    outcomes = v1_host.call(generate, "prune", prompts, asking("asl", detokenize=False))
    assert v1_host.call(scheduler_is_empty, "prune")
    v1_host.call(drop_engine, "prune")
    assert all(generated.report["pruned"] for generated in outcomes)


def scheduler_is_empty(name: str) -> bool:
    return not scheduler(name).planned._plans


def test_protected_tokens_and_the_window_both_go_on_or_nothing_is_pruned(
    v1_host: EngineHost, tiny_llama: str
) -> None:
    options = {"skip_tokenizer_init": True}
    # This policy has no recent tokens of its own, so its budget may be full of spans.
    start(v1_host, tiny_llama, policy="keydiff", options=options)
    prompt = random_prompt(600, 1)
    kept = stored(600)
    for end, is_pruned in ((100 + kept - 9, True), (100 + kept - 8, False), (100 + kept, False)):
        request = asking("fastkv", detokenize=False)
        request["extra_args"] = {**request["extra_args"], "kv_protect": f"100:{end}"}
        (generated,) = v1_host.call(generate, "prune", [prompt], request)
        assert (generated.report["pruned"] is not None) is is_pruned
        if is_pruned:
            deepest = generated.kept[max(generated.kept)][0].tolist()
            assert {*range(100, end), *range(592, 600)} <= set(deepest)
        else:
            assert "must be chosen" in generated.report["not_pruned"]
    v1_host.call(drop_engine, "prune")


@pytest.mark.parametrize("options", [{"window": 1024}, {"num_sink_tokens": 1024}])
def test_options_larger_than_what_is_kept_prune_nothing(
    v1_host: EngineHost, tiny_llama: str, options: dict[str, int]
) -> None:
    engine = {"skip_tokenizer_init": True}
    start(v1_host, tiny_llama, prune="asl", prune_options=options, options=engine)
    request = asking("asl", detokenize=False)
    (generated,) = v1_host.call(generate, "prune", [random_prompt(600, 1)], request)
    v1_host.call(drop_engine, "prune")
    assert generated.report["pruned"] is None
    assert "must be chosen" in generated.report["not_pruned"]
