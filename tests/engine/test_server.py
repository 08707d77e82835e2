"""`kvsieve serve` through the stock OpenAI client, and what it says when it cannot start."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from tests.engine.server import Server, free_port

pytestmark = pytest.mark.engine

LONG = (Path(__file__).parents[2] / "LICENSE").read_text()[:5000]
KVSIEVE = [sys.executable, "-m", "kvsieve"]
FLAGS = [
    *["--budget", "128", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"],
    *["--kv-cache-memory-bytes", "500M", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"],
]


@pytest.fixture(scope="module")
def server(real_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    command = [*KVSIEVE, "serve", real_model, *FLAGS, "--port", str(port)]
    with Server(command, port, tmp_path_factory.mktemp("server") / "log") as server:
        yield server
    assert server.exit_status == 0, server.log.read_text()[-2000:]


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


def report_of(response: object) -> dict[str, object]:
    return response.model_extra["kv_transfer_params"]["kvsieve"]


def test_a_long_prompt_is_sieved_and_says_so(client: OpenAI, model: str) -> None:
    response = client.completions.create(model=model, prompt=LONG, max_tokens=8, temperature=0)

    report = report_of(response)
    prompt_tokens = response.usage.prompt_tokens
    start = (prompt_tokens - 128) // 32 * 32
    assert report["sieved"] is True
    assert report["prompt_tokens"] == prompt_tokens
    assert report["stored_tokens"]["sieved"] == prompt_tokens - start
    assert report["dropped_tokens"] == start * 30
    assert report["blocks_freed"] == start // 32


def test_a_short_prompt_is_not_and_says_so(client: OpenAI, model: str) -> None:
    response = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hi"}], max_tokens=4
    )

    assert report_of(response)["sieved"] is False
    assert report_of(response)["blocks_freed"] == 0


def test_streaming_gives_the_same_text(client: OpenAI, model: str) -> None:
    request = {"model": model, "prompt": LONG, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**request).choices[0].text

    chunks = list(client.completions.create(**request, stream=True))

    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert len(chunks) > 4


def test_stop_strings_min_tokens_and_logprobs(client: OpenAI, model: str) -> None:
    request = {"model": model, "prompt": LONG, "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**request).choices[0].text
    word = text.split()[2]

    response = client.completions.create(**request, stop=[word])
    stopped = response.choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(word)]
    # The front end ends such a request and would drop what the engine core says last.
    assert report_of(response)["sieved"] is True

    long_enough = client.completions.create(**request, extra_body={"min_tokens": 24})
    assert long_enough.usage.completion_tokens == 24

    logprobs = client.completions.create(**request, logprobs=3).choices[0].logprobs
    assert len(logprobs.token_logprobs) == 24
    assert max(logprobs.token_logprobs) <= 0


def test_many_at_once_are_as_each_alone(client: OpenAI, model: str) -> None:
    prompts = [LONG[offset : offset + 1500 + 400 * offset // 100] for offset in range(0, 700, 100)]
    prompts += ["The capital of France is", "One, two,"]

    def answer(prompt: str) -> str:
        response = client.completions.create(
            model=model, prompt=prompt, max_tokens=12, temperature=0
        )
        return response.choices[0].text

    alone = [answer(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(answer, prompts))

    # Batch shape changes rounding: a near tie may flip one text of the nine.
    assert sum(a != b for a, b in zip(alone, together, strict=True)) <= 1


NEAR_TIE = 1e-3


def test_clients_with_different_budgets_and_one_prefix_get_what_each_gets_alone(
    client: OpenAI, model: str
) -> None:
    tails = ["\nIn short, the licence", "\nThe contributor", "\nA summary:", "\nYou may"]
    wishes = [(LONG + tail, budget) for tail in tails for budget in (None, 256, "full", "40%")]

    def ask(wish: tuple[str, object]) -> tuple[list[str], list[float], object]:
        prompt, budget = wish
        extra = {} if budget is None else {"vllm_xargs": {"kv_budget": budget}}
        response = client.completions.create(
            model=model, prompt=prompt, max_tokens=12, temperature=0, logprobs=2, extra_body=extra
        )
        logprobs = response.choices[0].logprobs
        gaps = [max(top.values()) - min(top.values()) for top in logprobs.top_logprobs]
        report = report_of(response)
        return logprobs.tokens, gaps, (report["budget"], report["stored_tokens"])

    alone = [ask(wish) for wish in wishes]
    with ThreadPoolExecutor(len(wishes)) as pool:
        together = list(pool.map(ask, wishes))

    ties = 0
    for (tokens, gaps, report), (others, _, other_report) in zip(alone, together, strict=True):
        assert report == other_report
        for token, other, gap in zip(tokens, others, gaps, strict=True):
            if token != other:
                # Batch shape changes rounding, and nothing else may change a token.
                assert gap < NEAR_TIE, (tokens, others)
                ties += 1
                break
    assert ties <= 2
    assert len({str(report) for _, _, report in alone}) >= 4


def test_a_bad_budget_gets_400_and_a_sentence(client: OpenAI, model: str) -> None:
    from openai import BadRequestError

    for budget in (5, -1, "x", "0%", 1.5, [256]):
        with pytest.raises(BadRequestError, match="kv_budget"):
            client.completions.create(
                model=model,
                prompt=LONG,
                max_tokens=4,
                extra_body={"vllm_xargs": {"kv_budget": budget}},
            )
    with pytest.raises(BadRequestError, match="did you mean 'kv_budget'"):
        client.completions.create(
            model=model, prompt=LONG, max_tokens=4, extra_body={"vllm_xargs": {"kv_bugdet": 256}}
        )


def test_bad_requests_get_400_and_harm_nobody(client: OpenAI, model: str) -> None:
    from openai import BadRequestError

    for bad in (
        {"prompt": LONG * 20, "max_tokens": 4},
        {"prompt": "x", "max_tokens": -1},
        {"prompt": "x", "max_tokens": 4, "temperature": -5},
    ):
        with pytest.raises(BadRequestError):
            client.completions.create(model=model, **bad)
    assert client.completions.create(model=model, prompt="x", max_tokens=2).choices


def test_the_log_counts(server: Server) -> None:
    log = server.log.read_text()

    assert (
        "kvsieve: mode sieve, kvsieve over 30 sieved layers, budget 128 tokens; full layers: none"
        in log
    )
    assert " sieved: " in log and "% of attention lost" in log


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KVSIEVE, *arguments], capture_output=True, text=True, timeout=240)


def test_a_taken_port_is_said_at_once(server: Server, real_model: str) -> None:
    done = run("serve", real_model, "--port", server.url.rsplit(":", 1)[1])

    assert done.returncode == 2
    assert "cannot listen on 127.0.0.1" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "0"], "at least 1 token"),
        (["--additional-config", "{nonsense"], "must be a JSON object"),
        (["--additional-config", '{"kvsieve": 5}'], "must be a JSON object"),
        (["--additional-config", '{"kvsieve": {"budgt": 1}}'], "did you mean 'budget'"),
        (["--additional-config.kvsieve.budgt", "1"], "did you mean 'budget'"),
        (["--full-layers", "0-99999"], "beyond 10000"),
        (["--port", "99999"], "not a port number"),
    ],
)
def test_a_bad_setting_ends_in_a_sentence(
    real_model: str, arguments: list[str], words: str
) -> None:
    done = run("serve", real_model, *arguments)

    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_a_refused_feature_ends_in_all_reasons(real_model: str) -> None:
    port = str(free_port())
    done = run("serve", real_model, "--port", port, "--enable-lora", "--kv-cache-dtype", "fp8")

    assert done.returncode == 2
    assert "for 2 reasons" in done.stderr
    assert "LoRA" in done.stderr
    assert "--kv-cache-dtype auto" in done.stderr


def parsed_settings(arguments: list[str]) -> dict[str, object]:
    """What `vllm serve` would be given, without starting it."""
    script = (
        "import json, sys\n"
        "from vllm.entrypoints.cli.serve import ServeSubcommand\n"
        "ServeSubcommand.validate = lambda self, args: None\n"
        "ServeSubcommand.cmd = staticmethod(\n"
        "    lambda args: print(json.dumps([args.additional_config, args.host]))\n"
        ")\n"
        "sys.argv = ['kvsieve', 'serve', 'model', '--port', '0', *sys.argv[1:]]\n"
        "from kvsieve.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=240
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_settings_reach_vllm_however_they_are_spelled(tmp_path: Path) -> None:
    budget = ["--budget", "128"]
    kvsieve = {"budget": "128"}
    assert parsed_settings(budget) == [{"kvsieve": kvsieve}, "127.0.0.1"]
    dotted = parsed_settings([*budget, "--additional-config.foo=1", "--host", "::1"])
    assert dotted == [{"foo": 1, "kvsieve": kvsieve}, "::1"]
    underscored = '{"foo": 1, "kvsieve": {"full_layers": 6, "budget": 64}}'
    assert parsed_settings([*budget, "--additional_config", underscored])[0] == {
        "foo": 1,
        "kvsieve": {"full_layers": 6, **kvsieve},
    }
    file = tmp_path / "config.yaml"
    file.write_text("additional-config: '{\"foo\": 2}'\nhost: 127.0.0.2\n")
    assert parsed_settings([*budget, "--config", str(file)]) == [
        {"foo": 2, "kvsieve": kvsieve},
        "127.0.0.2",
    ]
