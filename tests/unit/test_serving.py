"""Servers as child processes, without starting vLLM."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from kvsieve.serving import server
from kvsieve.serving.metrics import parse_metrics


def test_servers_differ_in_the_sieve_only() -> None:
    flags = ("--dtype", "float32")
    stock = server.ServerSpec("stock", "m", None, flags).command(1234)
    sieved = server.ServerSpec("sieved", "m", {"budget": 256}, flags).command(1234)
    shared = ["--host", "127.0.0.1", "--port", "1234", "--served-model-name", "model", *flags]
    assert stock[-len(shared) :] == sieved[-len(shared) :] == shared
    given = ["--additional-config", '{"kvsieve": {"budget": 256}}']
    assert sieved[1 : -len(shared)] == ["-m", "kvsieve", "serve", "m", *given]
    assert not any("kvsieve" in part for part in stock[1:])


def test_stock_loads_no_plugin_and_only_a_folder_is_read_offline(tmp_path: Path) -> None:
    stock = server.ServerSpec("stock", str(tmp_path), None).environment
    sieved = server.ServerSpec("sieved", "some/name", {}).environment
    assert stock["VLLM_PLUGINS"] == "" and stock["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_PLUGINS" not in sieved and "HF_HUB_OFFLINE" not in sieved


def test_a_taken_port_is_refused_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind((server.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(server.ServerError, match=f"port {port} on 127.0.0.1 cannot be used"):
            server.pick_port(port)
    assert server.pick_port(None) > 0


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the servers' logs go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_server_that_dies_is_reported_with_its_last_lines(logs: Path) -> None:
    dead = server.Server(server.ServerSpec("full", "m", None), 1)
    assert dead.log.parent == logs
    dead.start([sys.executable, "-c", "print('bad flag'); raise SystemExit(3)"], {})
    with pytest.raises(server.ServerError, match="exited with status 3") as caught:
        dead.raise_if_dying(patience_s=30.0)
    assert "  | bad flag" in str(caught.value) and str(dead.log) in str(caught.value)
    dead.stop()


@pytest.mark.usefixtures("logs")
def test_stopping_ends_the_children_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GRACE_S", 0.5)
    child = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        " print('ready', flush=True); time.sleep(600)"
    )
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    stubborn = server.Server(server.ServerSpec("full", "m", None), 1)
    stubborn.start([sys.executable, "-c", parent], {})
    assert stubborn._process is not None
    while "ready" not in stubborn.log.read_text():
        stubborn.check_alive()
        time.sleep(0.05)
    stubborn.stop()
    with pytest.raises(ProcessLookupError):
        os.killpg(stubborn._process.pid, 0)


def test_metrics_are_read_with_their_labels() -> None:
    text = textwrap.dedent(
        """
        # HELP vllm:kv_cache_usage_perc KV-cache usage.
        vllm:kv_cache_usage_perc{engine="0",model_name="demo"} 0.125
        vllm:cache_config_info{block_size="32",num_gpu_blocks="729",path="a\\"b"} 1.0
        plain_total 3
        """
    )
    metrics = parse_metrics(text)
    assert metrics["vllm:kv_cache_usage_perc"] == (0.125, {"engine": "0", "model_name": "demo"})
    assert metrics["vllm:cache_config_info"][1]["num_gpu_blocks"] == "729"
    assert metrics["plain_total"] == (3.0, {})


@pytest.mark.usefixtures("logs")
def test_the_first_error_of_a_long_log_is_told_too() -> None:
    noisy = server.Server(server.ServerSpec("full", "m", None), 1)
    noise = "print('ValueError: too small a cache'); [print('then', i) for i in range(60)]"
    noisy.start([sys.executable, "-c", f"{noise}; raise SystemExit(1)"], {})
    with pytest.raises(server.ServerError) as caught:
        noisy.raise_if_dying(patience_s=30.0)
    said = str(caught.value)
    assert said.index("too small a cache") < said.index("then 59") and "then 10" not in said
    noisy.stop()
