"""A small HTTP server that answers completions in vLLM 0.32's shapes, and can be made to fail.

For what no real server can be brought to do at will. Its answers follow from the prompt, and from
the budget where that is smaller than the prompt.
"""

from __future__ import annotations

import json
import math
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SMALLEST = 68
VOCABULARY = 700
TOP = 20


class Double:
    """What the server is and does; tests change its attributes while it runs.

    Attributes:
        policy: Its sieve's policy.
        mode: Its sieve's mode.
        takes_forced: Whether it allows forced tokens.
        forces: Whether it heeds them.
        logprobs_mode: vLLM's setting of that name.
        window: Something that decides what the sieve loses.
        max_model_len: Longest sequence, in tokens.
        reports: Makes of a report what is sent.
        fail: Called with the handler and the body before each completion; True: it has answered.
        bodies: Bodies of the completions that were asked.
    """

    def __init__(self) -> None:
        self.url = ""
        self.policy, self.mode = "snapkv", "sieve"
        self.takes_forced = self.forces = True
        self.logprobs_mode = "raw_logprobs"
        self.window = 32
        self.max_model_len: int | None = 4096
        self.reports: Callable[[dict[str, Any]], Any] = lambda report: report
        self.fail: Callable[[Handler, dict[str, Any]], bool] = lambda handler, body: False
        self.bodies: list[dict[str, Any]] = []

    def budgets(self) -> list[Any]:
        """Budgets of the completions that were asked, in order."""
        return [body["vllm_xargs"].get("kv_budget") for body in self.bodies]

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and content."""
        xargs = body.get("vllm_xargs") or {}
        prompt, budget = body["prompt"], xargs.get("kv_budget")
        forced = xargs.get("forced_tokens") or []
        if isinstance(budget, int) and budget < SMALLEST:
            return refusal(f"kv_budget {budget} is too small: the smallest is {SMALLEST}")
        if forced and not self.takes_forced:
            return refusal("this server does not take forced_tokens (--forced-tokens)")
        if body["model"] != "model":
            return refusal(f"The model `{body['model']}` does not exist.", 404)
        report = self.report(len(prompt), budget)
        tokens = self.tokens(prompt, report, body["max_tokens"], forced if self.forces else [])
        choice: dict[str, Any] = {
            "index": 0,
            "text": " ".join(map(str, tokens)),
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": None,
        }
        if body.get("return_token_ids"):
            choice["token_ids"] = tokens
        if body.get("logprobs"):
            choice["logprobs"] = self.logprobs(prompt, report, tokens, len(forced))
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "total_tokens": len(prompt) + len(tokens),
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        params = {"kvsieve": self.reports(report)} if self.reports(report) else None
        return 200, {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": "model",
            "choices": [choice],
            "usage": usage,
            "kv_transfer_params": params,
        }

    def report(self, length: int, budget: Any) -> dict[str, Any]:
        """What the sieve reports of a prompt."""
        mode = "full" if self.mode == "full" or budget == "full" else self.mode
        kept = budget if isinstance(budget, int) else length
        if isinstance(budget, str) and budget.endswith("%"):
            kept = max(SMALLEST, math.ceil(length * float(budget[:-1]) / 100))
        sieved = mode == "sieve" and kept < length
        held = kept if sieved else length
        lost = (1 - kept / length) * 8 / self.window if sieved else None
        return {
            "policy": self.policy,
            "mode": mode,
            "budget": None if mode == "full" else kept,
            "sieved": sieved,
            "prompt_tokens": length,
            "stored_tokens": {"full": length, "sieved": held},
            "layers": {"full": 3, "sieved": 27},
            "dropped_tokens": 27 * (length - held),
            "attention_mass_lost": lost and {"mean": lost, "max": lost, "layers": {}},
        }

    def tokens(
        self, prompt: Sequence[int], report: dict[str, Any], count: int, forced: list[int]
    ) -> list[int]:
        """What is generated."""
        draw = random.Random(f"{prompt} {report['stored_tokens']}")
        return [*forced, *(draw.randrange(5, VOCABULARY) for _ in range(count))][:count]

    def logprobs(
        self, prompt: Sequence[int], report: dict[str, Any], tokens: list[int], num_forced: int
    ) -> dict[str, Any]:
        """The distribution at every token."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        for place, token in enumerate(tokens):
            draw = random.Random(f"{prompt} {place}")
            logits = {draw.randrange(5, VOCABULARY): draw.uniform(0, 6) for _ in range(TOP)}
            logits[token] = 3.0
            if report["sieved"]:
                logits = {each: logit + draw.uniform(0, 2) for each, logit in logits.items()}
            total = math.log(VOCABULARY + sum(map(math.exp, logits.values())))
            listed = {each: logit - total for each, logit in logits.items()}
            if self.logprobs_mode == "processed_logprobs" and place < num_forced:
                listed = {each: 0.0 if each == token else -9999.0 for each in listed}
            found["tokens"].append(f"token_id:{token}")
            found["token_logprobs"].append(listed[token])
            found["top_logprobs"].append(
                {f"token_id:{each}": value for each, value in listed.items()}
            )
        return found


def refusal(message: str, status: int = 400) -> tuple[int, dict[str, Any]]:
    """How vLLM refuses."""
    kind = "NotFoundError" if status == 404 else "BadRequestError"
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    double: Double

    def log_message(self, *args: Any) -> None:
        """Nothing: the tests ask the double."""

    def do_GET(self) -> None:
        if self.path != "/v1/models" or self.double.max_model_len is None:
            self.send(404, {"detail": "Not Found"})
            return
        card = {"id": "model", "object": "model", "max_model_len": self.double.max_model_len}
        self.send(200, {"object": "list", "data": [card]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.double.bodies.append(body)
        if not self.double.fail(self, body):
            self.send(*self.double.answer(body))

    def send(
        self,
        status: int,
        content: Any,
        kind: str = "application/json",
        announced: int | None = None,
    ) -> None:
        """Answer; `announced` is a Content-Length that is not kept."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(announced or len(data)))
        self.end_headers()
        self.wfile.write(data)
        if announced:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True


@contextmanager
def running_double() -> Iterator[Double]:
    """A double that listens on a loopback port inside the block."""
    double = Double()
    handler = type("Handler", (Handler,), {"double": double})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        double.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield double
        finally:
            server.shutdown()
            thread.join()
