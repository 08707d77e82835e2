"""`/metrics` of a real server, against the reports of its responses."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.parser import text_string_to_metric_families

from kvsieve.engine.frontend.metrics import exported_names
from tests.engine.server import Server, free_port

pytestmark = pytest.mark.engine

LONG = (Path(__file__).parents[2] / "LICENSE").read_text()
SIEVE = ["--budget", "128", "--full-layers", "3"]
FLAGS = [
    *["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8"],
    *["--kv-cache-memory-bytes", "500M", "--max-num-batched-tokens", "512"],
]
SERVE = [sys.executable, "-m", "kvsieve", "serve"]
STOCK = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
LAST_STEP_S = 10.0
"""How long after a response the numbers of its last step may take to arrive."""

Samples = dict[tuple[str, str], float]
"""Value of each kvsieve series by name and its own label (`mode`, `layer`, ...), or ""."""


def scrape(server: Server) -> Samples:
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("kvsieve") and not sample.name.endswith("_created"):
                own = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                samples[sample.name, " ".join(own.values())] = sample.value
    return samples


def settled(server: Server) -> Samples:
    """The samples once nothing is held: the last step frees and reports after the response."""
    deadline = time.monotonic() + LAST_STEP_S
    while True:
        samples = scrape(server)
        held = sum(value for (name, _), value in samples.items() if name == "kvsieve_blocks_held")
        if not held or time.monotonic() > deadline:
            return samples
        time.sleep(0.2)


@pytest.fixture(scope="module")
def server(real_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    command = [*SERVE, real_model, *SIEVE, *FLAGS, "--port", str(port)]
    with Server(command, port, tmp_path_factory.mktemp("metrics") / "log") as server:
        yield server


def ask(server: Server, prompts: list[str], **more: Any) -> list[dict[str, Any]]:
    """The report of each response."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    return [
        client.completions.create(
            model=model, prompt=prompt, max_tokens=4, temperature=0, **more
        ).model_extra["kv_transfer_params"]["kvsieve"]
        for prompt in prompts
    ]


def test_metrics_are_there_before_the_first_request(server: Server) -> None:
    samples = scrape(server)

    names = {name for name, _ in samples}
    # Those by layer come with the first request, those by method only where prompts are pruned.
    later = {name for name, has in exported_names().items() if {"layer", "method"} & set(has)}
    assert names == exported_names().keys() - later
    assert samples["kvsieve_mode", "sieve"] == 1
    assert samples["kvsieve_mode", "shadow"] == samples["kvsieve_mode", "full"] == 0
    assert samples["kvsieve_pool_blocks", ""] > 100
    rest = {name for name, _ in samples} - {"kvsieve_mode", "kvsieve_pool_blocks"}
    assert not any(value for (name, _), value in samples.items() if name in rest)


def test_counters_are_the_sums_of_the_reports(server: Server) -> None:
    before = settled(server)
    # Prompts that start differently: a prefix hit shares blocks, which are not freed.
    reports = ask(server, [LONG[offset : offset + 4000 + offset] for offset in (0, 500, 1500)])
    reports += ask(server, ["The capital of France is"])
    after = settled(server)

    def grown(name: str, label: str = "") -> float:
        return after[name, label] - before[name, label]

    sieved = [report for report in reports if report["sieved"]]
    kept = sum(report["stored_tokens"]["sieved"] for report in sieved)
    prompts = sum(report["prompt_tokens"] for report in sieved)
    layers = reports[0]["layers"]["sieved"]
    assert len(sieved) == 3
    assert grown("kvsieve_requests_total", "sieve") == 4
    assert grown("kvsieve_sieved_requests_total") == 3
    assert grown("kvsieve_prompt_tokens_total") == prompts
    assert grown("kvsieve_kept_tokens_total") == kept
    assert grown("kvsieve_dropped_tokens_total") == prompts - kept
    assert (prompts - kept) * layers == sum(report["dropped_tokens"] for report in sieved)
    assert grown("kvsieve_freed_blocks_total") == sum(report["blocks_freed"] for report in sieved)
    assert grown("kvsieve_compactions_total") == 3 * layers
    assert 0 < grown("kvsieve_compaction_seconds_total", "sieve") < 60


def test_attention_lost_is_observed_per_request_and_per_layer(server: Server) -> None:
    samples = settled(server)

    requests = samples["kvsieve_sieved_requests_total", ""]
    assert requests
    assert samples["kvsieve_attention_mass_lost_count", "sieve"] == requests
    mean = samples["kvsieve_attention_mass_lost_sum", "sieve"] / requests
    assert 0 < mean < 1
    by_layer = {
        label: value
        for (name, label), value in samples.items()
        if name == "kvsieve_layer_attention_mass_lost_sum"
    }
    counts = {
        label: value
        for (name, label), value in samples.items()
        if name == "kvsieve_layer_attention_mass_lost_count"
    }
    # 3 of SmolLM2's 30 layers are full.
    assert set(by_layer) == {f"{layer} sieve" for layer in range(3, 30)}
    assert set(counts.values()) == {requests}
    assert math.isclose(sum(by_layer.values()) / len(by_layer) / requests, mean, rel_tol=1e-6)


def test_held_blocks_rise_and_fall(server: Server) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    stream = client.completions.create(
        model=model, prompt=LONG[2000:7000], max_tokens=400, temperature=0, stream=True
    )
    held: list[tuple[float, float]] = []
    for index, _ in enumerate(stream):
        if index % 20 == 0:
            samples = scrape(server)
            full, sieved = (samples["kvsieve_blocks_held", kind] for kind in ("full", "sieved"))
            held.append((full, sieved))
    after = settled(server)

    assert max(full for full, _ in held) > 0
    assert max(sieved for _, sieved in held) > 0
    assert max(full + sieved for full, sieved in held) <= after["kvsieve_pool_blocks", ""]
    assert after["kvsieve_blocks_held", "full"] == after["kvsieve_blocks_held", "sieved"] == 0


def test_nothing_in_the_log_says_that_numbers_are_missing(server: Server) -> None:
    log = server.log.read_text()

    assert "missing from /metrics" not in log
    assert "Traceback" not in log


def counting_processes(folder: Path) -> int:
    """How many API processes have counted a request of ours, from prometheus_client's files."""
    return sum(
        any(
            "kvsieve_requests_total" in key and value
            for key, value, *_ in MmapedDict.read_all_values_from_file(str(file))
        )
        for file in folder.glob("counter_*.db")
    )


@pytest.mark.long
def test_several_api_processes_show_one_sum(
    real_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM would take a folder of its own, which could not be looked into.
    folder = tmp_path / "counters"
    folder.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    port = free_port()
    command = [*SERVE, real_model, *SIEVE, *FLAGS, "--port", str(port)]
    command += ["--api-server-count", "2"]
    reports: list[dict[str, Any]] = []
    with Server(command, port, tmp_path / "log") as server:
        assert scrape(server)["kvsieve_mode", "sieve"] == 1
        # The kernel deals connections out: ask on new ones until both processes got some.
        while counting_processes(folder) < 2 and len(reports) < 40:
            reports += ask(server, [LONG[len(reports) * 100 :][:2000]])
        samples = settled(server)

        assert counting_processes(folder) == 2
    kept = sum(report["stored_tokens"]["sieved"] for report in reports)
    assert samples["kvsieve_requests_total", "sieve"] == len(reports)
    assert samples["kvsieve_prompt_tokens_total", ""] == sum(r["prompt_tokens"] for r in reports)
    assert samples["kvsieve_kept_tokens_total", ""] == kept
    assert samples["kvsieve_attention_mass_lost_count", "sieve"] == len(reports)


@pytest.mark.long
def test_a_stock_server_has_none_of_it(
    real_model: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    port = free_port()
    command = [*STOCK, "--model", real_model, *FLAGS, "--port", str(port)]
    with Server(command, port, tmp_path_factory.mktemp("metrics") / "log") as server:
        text = httpx.get(f"{server.url}/metrics", timeout=10).text

    assert "vllm:kv_cache_usage_perc" in text
    # The model's folder may have kvsieve in its name.
    assert "kvsieve_" not in text
