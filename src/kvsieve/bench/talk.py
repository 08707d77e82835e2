"""A client that keeps the tokens of a streamed answer, which the next turn of a chat repeats."""

from __future__ import annotations

import time
from typing import Any

from kvsieve.core.config import CONFIG_KEY
from kvsieve.serving.client import Client, Completion, RequestError


class ChatClient(Client):
    """As `Client`, and a streamed `Completion` has `token_ids` too.

    For chats only: the server then sends the prompt's ids back with the first token.
    """

    async def _streamed(self, arguments: dict[str, Any]) -> Completion:
        arguments["extra_body"]["return_token_ids"] = True
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
                extra = chunk.model_extra or {}
                report = (extra.get("kv_transfer_params") or {}).get(CONFIG_KEY) or report
                if chunk.choices:
                    times.append(time.perf_counter())
                    choice = chunk.choices[0]
                    pieces.append(choice.text)
                    token_ids.extend((choice.model_extra or {}).get("token_ids") or ())
                    finish_reason = choice.finish_reason or finish_reason
        if usage is None or finish_reason is None:
            raise RequestError("the stream broke off before its end")
        details = usage.prompt_tokens_details
        return Completion(
            text="".join(pieces),
            token_ids=tuple(token_ids),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=details.cached_tokens if details else None,
            finish_reason=finish_reason,
            report=report,
            sent_at=sent_at,
            token_times=tuple(times),
        )
