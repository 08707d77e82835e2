"""`kvsieve mode`: the mode of a running server, shown or switched."""

from __future__ import annotations

import json
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from kvsieve.core.errors import KvsieveError
from kvsieve.core.treatment import MODES

PATH = "/v1/kvsieve/mode"
TIMEOUT_S = 30.0


def mode(
    new_mode: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODE]", help=f"Mode to switch to: {', '.join(MODES)}. Default: only show it."
        ),
    ] = None,
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(help="Key of the server's --api-key.", envvar="VLLM_API_KEY"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show or switch the mode of a running server.

    The mode is what happens to requests that arrive from then on: sieve drops what does not
    fit the budget, shadow only reports what it would drop, full leaves the cache alone.
    Switching needs a server that was started with the setting mode_endpoint.
    """
    if new_mode is not None and new_mode not in MODES:
        raise typer.BadParameter(f"{new_mode!r} is no mode; the modes are {', '.join(MODES)}")
    answer = _ask(url.rstrip("/").removesuffix("/v1"), api_key, new_mode)
    if as_json:
        print(json.dumps(answer))
    elif new_mode is None:
        print(answer["mode"])
    else:
        Console().print(f"{answer['mode']} (was {answer['previous']})", highlight=False)


def _ask(url: str, api_key: str | None, new_mode: str | None) -> dict[str, Any]:
    """The server's answer.

    Raises:
        KvsieveError: There is none, or a refusal.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    body = None if new_mode is None else {"mode": new_mode}
    method = "GET" if new_mode is None else "POST"
    try:
        response = httpx.request(method, url + PATH, json=body, headers=headers, timeout=TIMEOUT_S)
    except httpx.TimeoutException:
        raise KvsieveError(
            f"{url} gave no answer in {TIMEOUT_S:.0f} seconds; is the server overloaded? Ask again,"
            " without a mode, whether a switch arrived"
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise KvsieveError(
            f"cannot reach a server at {url} ({error}); start one with `kvsieve serve`, or give"
            " its address with --url"
        ) from None
    if response.status_code == httpx.codes.OK:
        return _object(response)
    if response.status_code == httpx.codes.UNAUTHORIZED:
        given = "does not take this API key" if api_key else "wants an API key"
        raise KvsieveError(f"the server at {url} {given}; give its key with --api-key")
    if response.status_code == httpx.codes.NOT_FOUND:
        raise KvsieveError(
            f"the server at {url} has no {PATH}: it is not configured for kvsieve;"
            " start it with `kvsieve serve`, or with --additional-config"
        )
    raise KvsieveError(
        f"the server at {url} refused with status {response.status_code}: {_message(response)}"
    )


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
        assert "mode" in answer
    except (ValueError, AssertionError, TypeError):
        raise KvsieveError(
            f"{response.url} answered with something else than a mode:"
            f" {response.text[:200]!r}; is it a kvsieve server?"
        ) from None
    found: dict[str, Any] = answer
    return found


def _message(response: httpx.Response) -> str:
    """The sentence in an error of the OpenAI API's shape, else the text."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200] or "no reason given"
