"""Requests to an OpenAI server of vLLM, as an evaluation and a benchmark need them."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from kvsieve.core.config import CONFIG_KEY
from kvsieve.core.errors import KvsieveError
from kvsieve.core.forcing import FORCED_TOKENS_KEY
from kvsieve.core.treatment import KV_BUDGET_KEY

_TOKEN_ID = "token_id:"
"""What vLLM writes before a token's id when it names tokens by their ids."""


class RequestError(KvsieveError, RuntimeError):
    """A server refused a request, or could not be reached.

    Args:
        message: What happened, in the server's words where it had some.
        status: HTTP status; None if there was no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class TokenLogprobs:
    """One generated token and the model's distribution there.

    Attributes:
        token_id: The token.
        logprob: Its log-probability (natural), before any sampling setting.
        top: Log-probabilities of the most probable tokens, by token.
    """

    token_id: int
    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        text: What was generated.
        token_ids: The same in tokens, if they were asked for.
        prompt_tokens: Length of the prompt, in tokens.
        completion_tokens: Length of the answer, in tokens.
        cached_tokens: Prompt tokens that the prefix cache had; None if the server does not say.
        finish_reason: "length", "stop", ...
        report: What the sieve did with the request; None from stock vLLM.
        logprobs: One per generated token, if they were asked for.
        sent_at: When the request was sent, in seconds of `time.perf_counter`.
        token_times: When pieces of the answer came, on the same clock; empty if it was not
            streamed.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    finish_reason: str | None
    report: dict[str, Any] | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    sent_at: float = 0.0
    token_times: tuple[float, ...] = field(default=(), repr=False)


class Client:
    """Completions of one model by one server, greedy.

    Args:
        base_url: Root of the server's API, with or without `/v1`.
        model: The name under which it serves the model.
        api_key: Its key, if it wants one.
        timeout_s: Longest wait for an answer, in seconds.

    Raises:
        RequestError: `base_url` is no URL.
    """

    def __init__(
        self, base_url: str, model: str, *, api_key: str | None = None, timeout_s: float = 3600.0
    ) -> None:
        root = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._timeout_s = timeout_s
        try:
            self._client = openai.AsyncOpenAI(
                base_url=f"{root}/v1",
                api_key=api_key or "unused",
                max_retries=0,
                timeout=timeout_s,
                # A proxy from the environment is of no use on loopback, and elsewhere it is.
                http_client=openai.DefaultAsyncHttpxClient(trust_env=not _is_local(root)),
            )
        # An InvalidURL, of whichever HTTP library openai uses.
        except Exception as error:
            raise RequestError(f"{base_url!r} is no address of a server: {error}") from None

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        kv_budget: int | str | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
        stream: bool = False,
        token_ids: bool = True,
        logprobs: int | None = None,
        forced_tokens: Sequence[int] = (),
    ) -> Completion:
        """Generate from a prompt.

        Args:
            prompt: The prompt as text, or its token ids.
            max_tokens: Most tokens to generate, forced ones included.
            kv_budget: Budget of this request: tokens, a share such as "25%", "full"; None for
                the server's. Stock vLLM ignores it.
            stop: Texts that end the answer.
            ignore_eos: Whether to go on after the end of the text.
            min_tokens: Fewest tokens to generate.
            stream: Whether to stream, and take the time of each piece.
            token_ids: Whether to have the answer's token ids. In a stream the server then
                sends the prompt's too, with the first token.
            logprobs: How many of the most probable tokens to report per token; not streamed.
            forced_tokens: Token ids that the model is made to say first. The server must allow
                it (setting `forced_tokens` of kvsieve).

        Raises:
            RequestError: The server refused, broke off, or could not be reached.
        """
        xargs: dict[str, Any] = {}
        if kv_budget is not None:
            xargs[KV_BUDGET_KEY] = kv_budget
        if forced_tokens:
            xargs[FORCED_TOKENS_KEY] = list(forced_tokens)
        extra: dict[str, Any] = {
            "ignore_eos": ignore_eos,
            "min_tokens": min_tokens,
            # vLLM takes the default from the model's generation_config.json, and a penalty
            # makes copying from the prompt a fault.
            "repetition_penalty": 1.0,
        }
        if xargs:
            extra["vllm_xargs"] = xargs
        if token_ids:
            extra["return_token_ids"] = True
        if logprobs is not None:
            extra["return_tokens_as_token_ids"] = True
        arguments: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stop": list(stop) or None,
            "logprobs": logprobs,
            "extra_body": extra,
        }
        try:
            if stream:
                return await self._streamed(arguments)
            return await self._whole(arguments)
        except RequestError:
            raise
        # Not only openai's own: some of its versions let through what their HTTP library (httpx
        # or httpx2) raises, and an answer that is not vLLM's may raise anything.
        except Exception as error:
            raise self._failure(error) from error

    async def models(self) -> dict[str, int | None]:
        """The models that the server has, each with its longest sequence in tokens, if known.

        Raises:
            RequestError: It refused, or could not be reached.
        """
        try:
            served = (await self._client.models.list()).data
            return {model.id: (model.model_extra or {}).get("max_model_len") for model in served}
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> RequestError:
        """What is to be said about an error of the client's library."""
        server = str(self._client.base_url).rstrip("/")
        if isinstance(error, openai.APIStatusError):
            body = error.body if isinstance(error.body, dict) else {}
            said = _shortened(body.get("message") or error.message)
            return RequestError(
                f"the server answered {error.status_code}: {said}", error.status_code
            )
        cause = error.__cause__ or error
        if isinstance(error, openai.APITimeoutError) or type(cause).__name__.endswith("Timeout"):
            return RequestError(f"no answer from {server} within {self._timeout_s:g} s")
        said = _shortened(f"{type(cause).__name__}: {cause}".removesuffix(": "))
        if isinstance(error, openai.APIConnectionError) or _is_of_http(cause):
            return RequestError(f"no answer from {server}: {said}")
        if isinstance(error, openai.APIError):
            return RequestError(f"{server} broke off: {_shortened(error.message)}")
        return RequestError(f"{server} does not answer as vLLM does ({said})")

    async def _whole(self, arguments: dict[str, Any]) -> Completion:
        sent_at = time.perf_counter()
        response = await self._client.completions.create(**arguments)
        choice = response.choices[0]
        return Completion(
            text=choice.text,
            token_ids=tuple((choice.model_extra or {}).get("token_ids") or ()),
            finish_reason=choice.finish_reason,
            report=_report(response),
            logprobs=_logprobs(choice.logprobs),
            sent_at=sent_at,
            **_usage(response.usage),
        )

    async def _streamed(self, arguments: dict[str, Any]) -> Completion:
        pieces: list[str] = []
        token_ids: list[int] = []
        times: list[float] = []
        usage = report = finish_reason = None
        sent_at = time.perf_counter()
        stream = await self._client.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
        async with stream:
            async for chunk in stream:
                usage = chunk.usage or usage
                report = _report(chunk) or report
                if chunk.choices:
                    times.append(time.perf_counter())
                    choice = chunk.choices[0]
                    pieces.append(choice.text)
                    token_ids += (choice.model_extra or {}).get("token_ids") or ()
                    finish_reason = choice.finish_reason or finish_reason
        if usage is None or finish_reason is None:
            raise RequestError("the stream broke off before its end")
        return Completion(
            text="".join(pieces),
            token_ids=tuple(token_ids),
            finish_reason=finish_reason,
            report=report,
            sent_at=sent_at,
            token_times=tuple(times),
            **_usage(usage),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


def _shortened(text: Any) -> str:
    """A server's words on one line, and no whole page of them."""
    return textwrap.shorten(str(text), 500, placeholder=" ...")


def _is_of_http(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2")


def _is_local(root: str) -> bool:
    host = root.split("://")[-1].split("/")[0].rsplit(":", 1)[0]
    return host in ("127.0.0.1", "localhost", "[::1]")


def _report(response: Any) -> dict[str, Any] | None:
    """The sieve's report in a response; vLLM carries it in a field that OpenAI's lack."""
    extra = response.model_extra or {}
    report: dict[str, Any] | None = (extra.get("kv_transfer_params") or {}).get(CONFIG_KEY)
    return report


def _usage(usage: Any) -> dict[str, Any]:
    details = getattr(usage, "prompt_tokens_details", None)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": getattr(details, "cached_tokens", None),
    }


def _logprobs(logprobs: Any) -> tuple[TokenLogprobs, ...]:
    if logprobs is None:
        return ()
    return tuple(
        TokenLogprobs(
            token_id=int(token.removeprefix(_TOKEN_ID)),
            logprob=logprob,
            top={int(name.removeprefix(_TOKEN_ID)): value for name, value in top.items()},
        )
        for token, logprob, top in zip(
            logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
        )
    )
