"""Sends jobs to a server with the stock `openai` client, and checks the answers."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from typing import Any

import openai

from soaking.jobs import Job

PATIENCE_S = 600.0


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        job: Its number.
        kind: Its kind.
        server: Name of the server.
        status: "ok", "left" (we disconnected), "refused" (400, as it must be), or what was
            wrong: an HTTP status, an exception's name, or "wrong answer".
        error: Text of what was wrong; None if nothing was.
        said: The sentence of a refusal.
        seconds: From sending to the last byte.
        first_seconds: To the first chunk of a stream.
        sieved: What the report says; None without one.
        at: When it ended, in seconds since the start.
    """

    job: int
    kind: str
    server: str
    status: str
    error: str | None
    said: str | None
    seconds: float
    first_seconds: float | None
    sieved: bool | None
    at: float


class WrongAnswerError(Exception):
    """An answer with status 200 that is not what was asked for."""


class Left(Exception):  # noqa: N818 - not an error: the job asked for it
    """The client closed the stream."""


class Server:
    """A server under load.

    Args:
        name: What reports call it.
        url: Its root.
        began: `time.monotonic` of the soak's start.

    Attributes:
        sieve: Whether it knows kvsieve's budgets per request; found out by `inspect`.
        model: Name of what it serves.
        max_model_len: Longest request, in tokens.
    """

    def __init__(self, name: str, url: str, began: float) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.sieve = False
        self.model = ""
        self.max_model_len = 0
        self.began = began
        self.client = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )

    async def inspect(self, budgets: bool) -> None:
        """Find out what it serves, and whether it knows budgets per request."""
        card = (await self.client.models.list()).data[0]
        self.model = card.id
        self.max_model_len = int(getattr(card, "max_model_len", None) or 2048)
        if budgets:
            try:
                await self.client.get("/kvsieve/mode", cast_to=object)
                self.sieve = True
            except openai.APIStatusError:
                self.sieve = False

    async def run(self, job: Job) -> Outcome:
        """Send a job; every failure is in the outcome."""
        began = time.monotonic()
        answer = _Answer()
        error: str | None = None
        said: str | None = None
        try:
            await self._send(job, answer, began)
            if job.refused:
                status, error = "200", "was to be refused"
            else:
                _check(job, answer)
                status = "ok"
        except Left:
            status = "left"
        except WrongAnswerError as wrong:
            status, error = "wrong answer", str(wrong)
        except openai.APIError as refusal:
            code = _code(refusal)
            if code is None:
                status, error = type(refusal).__name__, _chain(refusal)
            else:
                said = _message(refusal)
                status, error = str(code), said or "(no text)"
                if job.refused and code == 400:
                    error = _not_a_sentence(said)
                    status = "wrong answer" if error else "refused"
        except Exception as failure:
            status, error = type(failure).__name__, _chain(failure)
        if error:
            error = f"{error} | {_brief(job)}"
        now = time.monotonic()
        return Outcome(
            job=job.number,
            kind=job.kind,
            server=self.name,
            status=status,
            error=error,
            said=said,
            seconds=now - began,
            first_seconds=answer.first_seconds,
            sieved=answer.sieved,
            at=now - self.began,
        )

    async def _send(self, job: Job, answer: _Answer, began: float) -> None:
        extra = dict(job.extra)
        if job.budget is not None and self.sieve:
            extra["vllm_xargs"] = {"kv_budget": job.budget}
        api = self.client.chat.completions if job.chat else self.client.completions
        create: Any = api.create
        if not job.stream:
            whole = create(model=self.model, **job.body, extra_body=extra)
            if job.leave_seconds is None:
                answer.take(await whole, job.chat)
                return
            try:
                answer.take(await asyncio.wait_for(whole, job.leave_seconds), job.chat)
            except TimeoutError:
                raise Left from None
            return
        options = {} if job.leave_after is not None else {"include_usage": True}
        stream = await create(
            model=self.model,
            **job.body,
            extra_body=extra,
            stream=True,
            **({"stream_options": options} if options else {}),
        )
        try:
            if job.leave_after == 0:
                raise Left
            chunks = 0
            async for chunk in stream:
                if answer.first_seconds is None:
                    answer.first_seconds = time.monotonic() - began
                answer.take_chunk(chunk, job.chat)
                chunks += 1
                if job.leave_after is not None and chunks >= job.leave_after:
                    raise Left
        finally:
            await stream.close()

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()


class _Answer:
    """An answer, whether it came whole or in chunks."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.reasons: dict[int, str] = {}
        self.completion_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.has_logprobs = False
        self.first_seconds: float | None = None
        self.sieved: bool | None = None

    def take(self, response: Any, chat: bool) -> None:
        for choice in response.choices:
            text = choice.message.content if chat else choice.text
            self.texts[choice.index] = text or ""
            self.reasons[choice.index] = choice.finish_reason
            self.has_logprobs |= choice.logprobs is not None
        self._take_usage(response.usage)
        self._take_report(response)

    def take_chunk(self, chunk: Any, chat: bool) -> None:
        for choice in chunk.choices:
            text = choice.delta.content if chat else choice.text
            self.texts[choice.index] = self.texts.get(choice.index, "") + (text or "")
            if choice.finish_reason:
                self.reasons[choice.index] = choice.finish_reason
            self.has_logprobs |= getattr(choice, "logprobs", None) is not None
        self._take_usage(chunk.usage)
        self._take_report(chunk)

    def _take_report(self, response: Any) -> None:
        report = (getattr(response, "kv_transfer_params", None) or {}).get("kvsieve")
        if report:
            # Of several choices there is a list.
            self.sieved = any(one["sieved"] for one in report.get("choices", [report]) if one)

    def _take_usage(self, usage: Any) -> None:
        if usage is not None:
            self.completion_tokens = usage.completion_tokens
            self.prompt_tokens = usage.prompt_tokens


def _check(job: Job, answer: _Answer) -> None:
    def require(condition: bool, what: str) -> None:
        if not condition:
            raise WrongAnswerError(what)

    require(set(answer.texts) == set(range(job.choices)), f"choices {sorted(answer.texts)}")
    require(
        all(answer.reasons.get(index) in ("stop", "length") for index in range(job.choices)),
        f"finish reasons {answer.reasons}",
    )
    tokens = answer.completion_tokens
    require(tokens is not None, "no usage")
    assert tokens is not None
    most = job.body["max_tokens"] * job.choices
    require(tokens <= most, f"{tokens} completion tokens, more than {most}")
    if job.exactly is not None:
        wanted = job.exactly * job.choices
        require(tokens == wanted, f"{tokens} completion tokens instead of {wanted}")
    least = job.at_least * job.choices
    require(tokens >= least, f"{tokens} completion tokens, fewer than {least}")
    prompt = job.body.get("prompt")
    if prompt:
        length = len(prompt) if isinstance(prompt[0], int) else sum(map(len, prompt))
        require(
            answer.prompt_tokens == length, f"{answer.prompt_tokens} prompt tokens, not {length}"
        )
    for stop in job.body.get("stop", ()):
        require(
            not any(stop in text for text in answer.texts.values()),
            f"the stop string {stop!r} is in the answer",
        )
    if "logprobs" in job.body:
        require(answer.has_logprobs, "no log-probabilities")


def _code(refusal: openai.APIError) -> int | None:
    """The status of an error; None if no server said anything.

    What vLLM finds out after it began a stream comes in an event with a code of its own.
    """
    if isinstance(refusal, openai.APIStatusError):
        return refusal.status_code
    code = refusal.body.get("code") if isinstance(refusal.body, dict) else None
    return code if isinstance(code, int) else None


def _message(refusal: openai.APIError) -> str:
    body = refusal.body
    if isinstance(body, dict) and isinstance(body.get("message"), str):
        return body["message"]
    return str(refusal)


def _not_a_sentence(text: str) -> str | None:
    """What is wrong with a refusal's text; None if a person can read it."""
    if len(re.findall(r"[A-Za-z]{2,}", text)) < 4:
        return f"the refusal is no sentence: {text!r}"
    if re.search(r"Traceback|Internal Server Error|object at 0x", text):
        return f"the refusal shows the inside: {text!r}"
    return None


def _chain(failure: BaseException) -> str:
    texts = []
    link: BaseException | None = failure
    while link is not None:
        texts.append(f"{type(link).__name__}: {link}")
        link = link.__cause__
    return " <- ".join(texts)


def _brief(job: Job) -> str:
    """A job in one line, without its prompt."""
    body = {key: value for key, value in job.body.items() if key not in ("prompt", "messages")}
    if job.refused:
        # What is wrong may be in the prompt.
        body["first_bytes"] = str(job.body.get("prompt", job.body.get("messages")))[:60]
    prompt = job.body.get("prompt")
    if prompt:
        size = len(prompt) if isinstance(prompt[0], int) else [len(one) for one in prompt]
        body["prompt_tokens"] = size
    return f"job {job.number} {job.kind} {body} {job.extra} kv_budget={job.budget!r}"
