"""The wrapper around vLLM's stat loggers and the metrics behind it, without vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from kvsieve.core.counters import SieveCounters
from kvsieve.core.pruning import PrunedPrompt
from kvsieve.engine.frontend.metrics import exported_names, init_stat_logger_manager, record

SIEVED = {"prompt_tokens": 1000, "stored_tokens": 300, "num_layers": 2, "seconds": 0.5}
ROW = {**SIEVED, "mode": "sieve", "mass_lost": (0.1, 0.3), "layers": (1, 2)}


class Manager:
    """As much of `StatLoggerManager` as the wrapper touches."""

    engine_indexes = (0,)

    def __init__(self, settings: dict[str, Any] | None, model_name: str = "model") -> None:
        config = SimpleNamespace(
            additional_config={} if settings is None else {"kvsieve": settings},
            model_config=SimpleNamespace(served_model_name=model_name),
            cache_config=SimpleNamespace(num_gpu_blocks=101),
        )
        self.seen: list[Any] = []
        init_stat_logger_manager(lambda *args: None, self, config)

    def record(self, stats: dict[str, Any] | None, engine: int | None = None) -> None:
        scheduler_stats = SimpleNamespace(kv_connector_stats=stats)
        record(self._stock, self, scheduler_stats, None, engine_idx=engine)

    def _stock(self, manager: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        self.seen.append(scheduler_stats.kv_connector_stats)


def value(name: str, model_name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": model_name, "engine": "0", **labels})


def a_hand_over() -> dict[str, Any]:
    counters = SieveCounters(blocks_held={"full": 3, "sieved": 4}, freed_blocks=5)
    counters.add_request("sieve")
    counters.add_row(**ROW)
    return counters.take()


def test_metrics_are_there_with_zero_from_the_start() -> None:
    Manager({"mode": "shadow", "prune": "asl"}, "start")

    by_mode = {mode: value("kvsieve_mode", "start", mode=mode) for mode in MODES}
    assert by_mode == {"sieve": 0, "shadow": 1, "full": 0}
    assert value("kvsieve_pool_blocks", "start") == 100
    for name, labels in exported_names().items():
        if name in ("kvsieve_mode", "kvsieve_pool_blocks") or "layer" in labels:
            continue
        more = {"mode": "shadow"} if "mode" in labels else {}
        more |= {"layer_class": "sieved"} if "layer_class" in labels else {}
        more |= {"method": "asl-two-pass"} if "method" in labels else {}
        more |= {"reason": "last"} if "reason" in labels else {}
        more |= {"le": "+Inf"} if "le" in labels else {}
        assert value(name, "start", **more) == 0, name


MODES = ("sieve", "shadow", "full")


def test_an_entry_is_counted_and_stock_does_not_see_it() -> None:
    manager = Manager({}, "counted")

    for _ in range(2):
        manager.record({"kvsieve": a_hand_over()}, engine=0)
    manager.record({"kvsieve": {"mode": "full"}, "connector": {"x": 1}})
    manager.record(None)

    assert manager.seen == [None, None, {"connector": {"x": 1}}, None]
    names = {
        "kvsieve_sieved_requests_total": 2,
        "kvsieve_prompt_tokens_total": 2000,
        "kvsieve_kept_tokens_total": 600,
        "kvsieve_dropped_tokens_total": 1400,
        "kvsieve_freed_blocks_total": 10,
        "kvsieve_compactions_total": 4,
    }
    assert {name: value(name, "counted") for name in names} == names
    assert value("kvsieve_requests_total", "counted", mode="sieve") == 2
    sieve = {"mode": "sieve"}
    assert value("kvsieve_compaction_seconds_total", "counted", **sieve) == 1
    assert value("kvsieve_attention_mass_lost_count", "counted", **sieve) == 2
    assert value("kvsieve_attention_mass_lost_count", "counted", mode="shadow") == 0
    assert value("kvsieve_attention_mass_lost_sum", "counted", **sieve) == pytest.approx(0.4)
    assert value("kvsieve_attention_mass_lost_bucket", "counted", le="0.1", **sieve) == 0
    assert value("kvsieve_attention_mass_lost_bucket", "counted", le="0.2", **sieve) == 2
    layer = {"layer": "2", **sieve}
    assert value("kvsieve_layer_attention_mass_lost_count", "counted", **layer) == 2
    assert value("kvsieve_blocks_held", "counted", layer_class="sieved") == 4
    assert value("kvsieve_mode", "counted", mode="full") == 1
    assert value("kvsieve_mode", "counted", mode="sieve") == 0


def pruned(method: str, layer: int | None, reason: str) -> PrunedPrompt:
    return PrunedPrompt(method, layer, reason, 300, 0.5, seconds_saved=0.25)


def test_pruned_prompts_are_counted_by_method_and_reason_and_layers_one_by_one() -> None:
    counters = SieveCounters()
    for what in (
        pruned("asl", 12, "threshold"),
        pruned("asl", 13, "threshold"),
        pruned("asl", None, "never"),
        pruned("fastkv", 90, "fixed"),
    ):
        counters.add_row(**ROW, pruned=what)
    Manager({"prune": "asl"}, "pruned").record({"kvsieve": counters.take()})

    def requests(method: str, reason: str) -> float | None:
        return value("kvsieve_pruned_requests_total", "pruned", method=method, reason=reason)

    def layers_up_to(le: str, method: str = "asl") -> float | None:
        return value("kvsieve_prune_layer_bucket", "pruned", method=method, le=le)

    assert (requests("asl", "threshold"), requests("asl", "never")) == (2, 1)
    assert (requests("asl", "deepest"), requests("fastkv", "fixed")) == (0, 1)
    assert requests("fastkv", "threshold") is None
    assert [layers_up_to(f"{layer}.0") for layer in (11, 12, 13)] == [0, 1, 2]
    assert [layers_up_to(le, "fastkv") for le in ("80.0", "96.0", "+Inf")] == [0, 1, 1]
    assert value("kvsieve_prune_layer_count", "pruned", method="gemfilter") == 0
    assert value("kvsieve_prune_seconds_saved_total", "pruned") == 1


def test_a_server_that_prunes_nothing_has_no_series_by_method() -> None:
    Manager({}, "unpruned")

    assert value("kvsieve_prune_seconds_saved_total", "unpruned") == 0
    assert value("kvsieve_prune_layer_count", "unpruned", method="asl") is None


def test_a_second_manager_counts_on() -> None:
    Manager({}, "again").record({"kvsieve": a_hand_over()})
    Manager({}, "again").record({"kvsieve": a_hand_over()})

    assert value("kvsieve_prompt_tokens_total", "again") == 2000


def test_an_unconfigured_server_has_none_of_it() -> None:
    manager = Manager(None, "stock")
    manager.record({"connector": {"x": 1}})

    assert manager.seen == [{"connector": {"x": 1}}]
    assert value("kvsieve_pool_blocks", "stock") is None


def test_an_entry_that_cannot_be_read_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    manager = Manager({}, "bad")
    manager.record({"kvsieve": {"nonsense": 1}})

    assert manager.seen == [None]
    assert "missing from /metrics" in caplog.text


CONFIGURED_OR_NOT = """
import sys
from tests.unit.test_frontend_metrics import Manager, a_hand_over
from prometheus_client import CollectorRegistry, REGISTRY, generate_latest, multiprocess
manager = Manager({} if "configured" in sys.argv else None)
if "record" in sys.argv:
    manager.record({"kvsieve": a_hand_over()})
registry = REGISTRY
if "multiprocess" in sys.argv:
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def exposition(*arguments: str, **environment: str) -> str:
    """What /metrics shows in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", CONFIGURED_OR_NOT, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_metric_is_exported_without_configuration() -> None:
    assert "kvsieve_mode" in exposition("configured")
    assert "kvsieve" not in exposition()


def test_api_processes_add_up(tmp_path: Any) -> None:
    # What vLLM sets with --api-server-count above 1: every process writes, any one is asked.
    where = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    exposition("configured", "record", "multiprocess", **where)
    shown = exposition("configured", "record", "multiprocess", **where)

    labels = '{engine="0",model_name="model"}'
    assert f"kvsieve_prompt_tokens_total{labels} 2000.0" in shown
    by_mode = '{engine="0",mode="sieve",model_name="model"}'
    assert f"kvsieve_attention_mass_lost_count{by_mode} 2.0" in shown
    assert f"kvsieve_pool_blocks{labels} 100.0" in shown
    assert 'kvsieve_mode{engine="0",mode="sieve",model_name="model"} 1.0' in shown
