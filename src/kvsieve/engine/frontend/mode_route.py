"""`/v1/kvsieve/mode`: the mode of a running server, shown and switched over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from kvsieve.core.treatment import MODES
from kvsieve.engine.activation import is_configured
from kvsieve.engine.frontend.mode_call import call_mode
from kvsieve.engine.settings import sieve_config
from kvsieve.engine.wrapping import wrap

# Under /v1, which is what vLLM's `--api-key` covers.
PATH = "/v1/kvsieve/mode"

router = APIRouter(tags=["kvsieve"])


def install_mode_route() -> None:
    """Give a server its route when vLLM builds it, if it is configured for kvsieve."""
    import vllm.entrypoints.serve

    wrap(vllm.entrypoints.serve, "register_vllm_serve_api_routers", _register_routers)


def _register_routers(stock: Callable[..., None], app: Any) -> None:
    stock(app)
    args = getattr(app.state, "args", None)
    if is_configured(getattr(args, "additional_config", None)):
        app.include_router(router)


@router.get(PATH)
async def show_mode(request: Request) -> JSONResponse:
    """The mode that new requests are served in."""
    client = _engine_client(request)
    if client is None:
        return _no_engine()
    return JSONResponse({"mode": await call_mode(client)})


@router.post(PATH)
async def set_mode(request: Request) -> JSONResponse:
    """Switch the mode of requests that arrive from now on; the others keep theirs."""
    client = _engine_client(request)
    if client is None:
        return _no_engine()
    config = sieve_config(client.vllm_config)
    if not config.mode_endpoint:
        return _error(
            HTTPStatus.FORBIDDEN,
            "this server does not let its mode be changed: start it with --mode-endpoint (in"
            ' additional_config: "mode_endpoint": true) to allow it',
        )
    mode, complaint = wanted_mode(await request.body())
    if mode is None:
        return _error(HTTPStatus.BAD_REQUEST, complaint)
    return JSONResponse({"mode": mode, "previous": await call_mode(client, mode)})


def wanted_mode(body: bytes) -> tuple[str | None, str]:
    """The mode that a body asks for; without one, a sentence that says what is wrong."""
    example = json.dumps({"mode": MODES[0]})
    try:
        wanted = json.loads(body)
    except (ValueError, RecursionError):
        return None, f"the body is not JSON; send an object such as {example}"
    if not isinstance(wanted, dict) or set(wanted) != {"mode"}:
        return None, f"the body must be an object with the one key 'mode', such as {example}"
    mode = wanted["mode"]
    if mode not in MODES:
        return None, f"the mode must be one of {', '.join(MODES)} (given: {mode!r})"
    return mode, ""


def _engine_client(request: Request) -> Any:
    # The state gets its client after the routes are made. A render server gets none.
    return getattr(request.app.state, "engine_client", None)


def _no_engine() -> JSONResponse:
    return _error(HTTPStatus.SERVICE_UNAVAILABLE, "this server has no engine, and so no mode")


def _error(status: HTTPStatus, message: str) -> JSONResponse:
    """An error in the shape of the OpenAI API's, as the server's other routes answer."""
    error = {"message": message, "type": status.phrase, "param": None, "code": status.value}
    return JSONResponse({"error": error}, status_code=status.value)
