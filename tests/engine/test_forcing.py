"""Forced tokens: the model says them, and its own distribution is what is reported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.engines import drop_engine, generate, make_engine
from tests.engine.host import EngineHost, HostError
from tests.engine.models import VOCABULARY, random_prompt
from tests.oracle.snapkv_oracle import Oracle

pytestmark = pytest.mark.engine

BUDGET = 128
SETTINGS = {"budget": BUDGET, "full_layers": 2, "forced_tokens": True}
OPTIONS = {"skip_tokenizer_init": True, "max_model_len": 1024, "max_num_batched_tokens": 200}
SAMPLING = {"ignore_eos": True, "detokenize": False}
LENGTHS = [300, 250, 40]
MAX_LOGPROB_DIFFERENCE = 2e-3


@pytest.fixture(scope="module", params=["v1", "v2"])
def host(request: pytest.FixtureRequest, tiny_llama: str) -> Iterator[EngineHost]:
    host: EngineHost = request.getfixturevalue(f"{request.param}_host")
    host.call(make_engine, "forcing", tiny_llama, SETTINGS, **OPTIONS)
    yield host
    host.call(drop_engine, "forcing")


def forcing(tokens: list[int], max_tokens: int) -> dict[str, object]:
    return {**SAMPLING, "max_tokens": max_tokens, "extra_args": {"forced_tokens": tokens}}


def test_forced_tokens_are_said_and_judged_by_the_sieved_model(
    host: EngineHost, tiny_llama: str
) -> None:
    prompts = [random_prompt(length, length) for length in LENGTHS]
    tokens = [random_prompt(8, 1000 + length) for length in LENGTHS]
    forced = host.call(generate, "forcing", prompts, [forcing(each, 8) for each in tokens])

    assert [answer.token_ids for answer in forced] == tokens
    assert [answer.report["sieved"] for answer in forced] == [True, True, False]
    oracle = Oracle(tiny_llama)
    for prompt, answer in zip(prompts, forced, strict=True):
        expected = oracle.run(
            prompt,
            budget_tokens=BUDGET,
            block_size=32,
            full_layers={0, 1},
            max_new_tokens=8,
            forced_tokens=answer.token_ids,
            forced_kept=answer.kept,
        )
        logprobs = [
            float(step[token])
            for step, token in zip(expected.logprobs, answer.token_ids, strict=True)
        ]
        assert answer.logprobs == pytest.approx(logprobs, abs=MAX_LOGPROB_DIFFERENCE)


def test_the_text_goes_on_freely_and_neighbours_notice_nothing(host: EngineHost) -> None:
    prompts = [random_prompt(length, length) for length in LENGTHS[:2]]
    free = {**SAMPLING, "max_tokens": 10}
    alone = host.call(generate, "forcing", prompts, free)
    said = alone[0].token_ids
    # Forcing what it would have said changes nothing, at either end of the forced part.
    mixed = host.call(generate, "forcing", prompts, [forcing(said[:4], 10), free])
    assert [answer.token_ids for answer in mixed] == [answer.token_ids for answer in alone]
    for one, other in zip(alone, mixed, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    # The slot of a request that forced is taken over by one that does not.
    again = host.call(generate, "forcing", prompts, free)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in alone]


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (forcing([VOCABULARY], 4), f"whole numbers from 0 to {VOCABULARY - 1}"),
        (forcing([-1], 4), "whole numbers"),
        (forcing([], 4), "must be a list of token ids"),
        ({"extra_args": {"forced_tokens": "abc"}}, "must be a list of token ids"),
        ({"extra_args": {"forced_tokens": [1, True]}}, "whole numbers"),
        ({"extra_args": {"forced_tokens": [1.0]}}, "whole numbers"),
    ],
)
def test_what_is_no_token_is_refused(
    host: EngineHost, sampling: dict[str, object], reason: str
) -> None:
    with pytest.raises(HostError, match=reason):
        host.call(generate, "forcing", [random_prompt(50, 1)], {**SAMPLING, **sampling})


def test_a_server_that_does_not_allow_it_says_so(v1_host: EngineHost, tiny_llama: str) -> None:
    v1_host.call(make_engine, "plain", tiny_llama, {"budget": BUDGET}, **OPTIONS)
    with pytest.raises(HostError, match="does not take forced_tokens"):
        v1_host.call(generate, "plain", [random_prompt(50, 1)], forcing([5], 4))
    v1_host.call(drop_engine, "plain")
