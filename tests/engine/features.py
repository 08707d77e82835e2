"""Ask an engine everything that a request can ask, and look at what is left afterwards.

Runs inside an engine's process, for stock and sieved engines alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.engine import engines
from tests.engine.aborts import _remembered_by_the_sieve

Prompt = list[int] | str


@dataclass
class Answer:
    """The outcome of one request, each list with an entry per completion.

    Attributes:
        token_ids: Generated tokens.
        texts: Generated text; empty without a tokenizer.
        finish_reasons: vLLM's.
        stop_reasons: vLLM's.
        logprobs: Log-probabilities by token, per generated token.
        prompt_logprobs: The same of the prompt, None for the first token.
        cached_tokens: Prompt tokens that the prefix cache had.
        report: The `kvsieve` report that the client sees.
        all_reports: The report of each request in the engine core, in order.
    """

    token_ids: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    stop_reasons: list[Any] = field(default_factory=list)
    logprobs: list[list[dict[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    cached_tokens: int | None = None
    report: dict[str, Any] | None = None
    all_reports: list[dict[str, Any] | None] = field(default_factory=list)


def ask(
    name: str, prompts: list[Prompt], sampling: dict[str, Any] | list[dict[str, Any]]
) -> list[Answer]:
    """Run prompts through an engine, all submitted at once.

    Args:
        name: The engine.
        prompts: Token ids or text of each.
        sampling: Keyword arguments of `SamplingParams`, for all or for each. A dict under
            `structured_outputs` becomes vLLM's object.
    """
    llm = engines._engines[name]
    each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    with _reports(name) as reports:
        outputs = llm.generate(
            [
                prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
                for prompt in prompts
            ],
            [_params(kwargs) for kwargs in each],
            use_tqdm=False,
        )
    return [_answer(output, reports) for output in outputs]


def _params(kwargs: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    kwargs = {"temperature": 0, **kwargs}
    if "structured_outputs" in kwargs:
        kwargs["structured_outputs"] = StructuredOutputsParams(**kwargs["structured_outputs"])
    return SamplingParams(**kwargs)


@contextmanager
def _reports(name: str) -> Iterator[dict[str, dict[str, Any] | None]]:
    scheduler = engines.scheduler(name)
    stock = scheduler._free_request
    reports: dict[str, dict[str, Any] | None] = {}

    def free_request(request: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(request, *args, **kwargs)
        reports[request.request_id] = (result[0] or {}).get("kvsieve")
        return result

    scheduler._free_request = free_request
    try:
        yield reports
    finally:
        del scheduler._free_request


def _answer(output: Any, reports: dict[str, dict[str, Any] | None]) -> Answer:
    def values(step: dict[int, Any]) -> dict[int, float]:
        return {token: entry.logprob for token, entry in step.items()}

    own = {
        internal: report
        for internal, report in reports.items()
        # A child is "0_7-abc", its parent "7-abc", and the client's name for it "7".
        if internal.split("-")[0].split("_")[-1] == output.request_id
    }
    return Answer(
        token_ids=[list(completion.token_ids) for completion in output.outputs],
        texts=[completion.text for completion in output.outputs],
        finish_reasons=[completion.finish_reason for completion in output.outputs],
        stop_reasons=[completion.stop_reason for completion in output.outputs],
        logprobs=[[values(step) for step in c.logprobs or []] for c in output.outputs],
        prompt_logprobs=output.prompt_logprobs
        and [step and values(step) for step in output.prompt_logprobs],
        cached_tokens=output.num_cached_tokens,
        report=(output.kv_transfer_params or {}).get("kvsieve"),
        all_reports=[own[internal] for internal in sorted(own)],
    )


def refusal(name: str, prompts: list[Prompt], sampling: dict[str, Any]) -> str:
    """What an engine says to a request that it refuses; empty if it answers."""
    try:
        ask(name, prompts, sampling)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def beam_search(name: str, prompt: Prompt, width: int, max_tokens: int) -> list[list[int]]:
    """The generated tokens of each beam."""
    from vllm.sampling_params import BeamSearchParams

    given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    (output,) = engines._engines[name].beam_search(
        [given], BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
    )
    return [list(beam.tokens[-max_tokens:]) for beam in output.sequences]


def call_llm(name: str, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of an engine's `LLM`."""
    return getattr(engines._engines[name], method)(*args, **kwargs)


def left_behind(name: str) -> dict[str, int]:
    """What an engine without requests still holds; empty if nothing.

    A short request goes first, because what ended is told to the worker with the next
    step's message.
    """
    ask(name, [[5]], {"max_tokens": 2, "detokenize": False})
    scheduler = engines.scheduler(name)
    pool = scheduler.kv_cache_manager.block_pool
    held = {
        "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "requests": len(scheduler.requests),
    }
    if getattr(scheduler, "sieved_managers", ()):
        held["requests of the sieve"] = _remembered_by_the_sieve(scheduler)
        held["windows"] = engines.worker(name).sieve.observer.num_open
    return {what: count for what, count in held.items() if count}


@dataclass
class Disturbed:
    """Requests that were disturbed while they ran.

    Attributes:
        token_ids: Tokens of each request.
        finish_reasons: vLLM's, per request.
        preemptions: How often each was preempted.
        result: What the disturbance returned.
    """

    token_ids: list[list[int]]
    finish_reasons: list[str | None]
    preemptions: list[int]
    result: Any


def disturb(
    name: str,
    prompts: list[list[int]],
    max_tokens: int,
    when: str,
    disturbance: Callable[..., Any],
    *args: Any,
) -> Disturbed:
    """Run requests, disturb them once in a phase, and run them to their end.

    Args:
        name: The engine; its prefix cache is emptied first.
        prompts: Their token ids.
        max_tokens: Tokens that each generates.
        when: "mid-prefill", "prompt just read" or "decoding", of the last prompt.
        disturbance: Called with the engine's name and `args`.
        args: Further arguments.
    """
    from vllm import SamplingParams

    engine = engines._engines[name].llm_engine
    scheduler = engines.scheduler(name)
    assert engine.reset_prefix_cache()
    requests = []
    for index, prompt in enumerate(prompts):
        internal = engine.add_request(
            f"disturbed-{index}",
            {"prompt_token_ids": prompt},
            SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=max_tokens),
        )
        requests.append(scheduler.requests[internal])
    last = requests[-1]
    reached: dict[str, Callable[[], bool]] = {
        "mid-prefill": lambda: 0 < last.num_computed_tokens < last.num_prompt_tokens,
        "prompt just read": lambda: last.num_output_tokens == 1,
        "decoding": lambda: last.num_output_tokens >= 4,
    }
    finished: dict[str, Any] = {}
    result = None
    disturbed = False
    for _ in range(2000):
        if not disturbed and reached[when]():
            result = disturbance(name, *args)
            disturbed = True
        if not scheduler.has_requests():
            break
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0]
    assert disturbed, when
    # An engine in this process that aborts by itself does not tell its front end.
    engine.abort_request([f"disturbed-{index}" for index in range(len(prompts))])
    completions = [finished.get(f"disturbed-{index}") for index in range(len(prompts))]
    return Disturbed(
        token_ids=[list(c.token_ids) if c else [] for c in completions],
        finish_reasons=[c.finish_reason if c else None for c in completions],
        preemptions=[request.num_preemptions for request in requests],
        result=result,
    )


def reset_prefix_cache(name: str, running_too: bool) -> bool:
    """A disturbance: forget every cached block."""
    return engines._engines[name].reset_prefix_cache(reset_running_requests=running_too)


def sleep_and_wake(name: str, level: int, mode: str) -> str:
    """A disturbance: sleep, and wake up; what was raised, or nothing."""
    llm = engines._engines[name]
    try:
        llm.sleep(level=level, mode=mode)
        llm.wake_up()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def reload_weights(name: str) -> str:
    """A disturbance: read the weights again; what was raised, or nothing."""
    try:
        engines._engines[name].collective_rpc("reload_weights")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@dataclass
class Prioritised:
    """Requests that were scheduled by priority.

    Attributes:
        token_ids: Tokens of each.
        finished: Their indices in the order in which they finished.
        preemptions: How often each was preempted.
    """

    token_ids: list[list[int]]
    finished: list[int]
    preemptions: list[int]


def run_by_priority(
    name: str, prompts: list[list[int]], priorities: list[int], max_tokens: int
) -> Prioritised:
    """Run prompts of different priority, submitted a few steps apart."""
    from vllm import SamplingParams

    engine = engines._engines[name].llm_engine
    scheduler = engines.scheduler(name)
    requests = []
    outputs: dict[str, list[int]] = {}

    def step() -> None:
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = list(output.outputs[0].token_ids)

    for index, (prompt, priority) in enumerate(zip(prompts, priorities, strict=True)):
        internal = engine.add_request(
            str(index),
            {"prompt_token_ids": prompt},
            SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=max_tokens),
            priority=priority,
        )
        requests.append(scheduler.requests[internal])
        for _ in range(4):
            step()
    while engine.has_unfinished_requests():
        step()
    return Prioritised(
        token_ids=[outputs[str(index)] for index in range(len(prompts))],
        finished=[int(request_id) for request_id in outputs],
        preemptions=[request.num_preemptions for request in requests],
    )
