"""The sieve's numbers on vLLM's `/metrics`.

They arrive as an entry of `SchedulerStats.kv_connector_stats`, the one free dict that vLLM
carries from the scheduler to the API process with every step. `StatLoggerManager.record`
is where it arrives; the entry is taken out before vLLM's own loggers, which take the field
for a connector's, see it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from kvsieve.core.config import CONFIG_KEY
from kvsieve.core.counters import SieveCounters
from kvsieve.core.pruning import NO_PRUNING
from kvsieve.core.treatment import MODES
from kvsieve.engine.activation import is_configured
from kvsieve.engine.settings import sieve_config
from kvsieve.engine.wrapping import wrap
from kvsieve.pruning import PRUNE_METHODS

logger = logging.getLogger("vllm.kvsieve.metrics")

SHARE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
"""Upper bounds of a histogram of shares."""

LAYER_BUCKETS = (*range(41), 44, 48, 56, 64, 80, 96, 127)
"""Upper bounds of a histogram of layer numbers: each layer its own, as far as most models go."""

LAYER_CLASSES = ("full", "sieved")
SCORED_MODES = ("sieve", "shadow")

_LABELS = ("model_name", "engine")
_ONCE = " A request that is recomputed after a preemption is counted once."
_AGAIN = " A request that is recomputed after a preemption counts again."
_PER_HEAD = " Per KV head of one sieved layer, not summed over layers."
_COUNTERS = {
    "requests": (
        "Requests that arrived, by the mode they are served in: sieve, shadow (scored, nothing"
        " dropped) or full (left alone).",
        ("mode",),
    ),
    "sieved_requests": (
        "Requests whose sieved layers were compacted, counted on the worker." + _ONCE,
        (),
    ),
    "prompt_tokens": (
        "Prompt tokens of sieved requests, counted on the worker when the prompt is sieved: each"
        " prompt once, not once per layer. Prompts within their budget are not in it." + _ONCE,
        (),
    ),
    "kept_tokens": ("Prompt tokens kept of sieved requests." + _PER_HEAD + _ONCE, ()),
    "dropped_tokens": (
        "Prompt tokens dropped of sieved requests: kvsieve_prompt_tokens_total less"
        " kvsieve_kept_tokens_total." + _PER_HEAD + _ONCE,
        (),
    ),
    "freed_blocks": (
        "KV-cache blocks that went back to the pool because their tokens were dropped, summed"
        " over sieved layer groups. A block that another request shares is not freed." + _AGAIN,
        (),
    ),
    "compactions": (
        "Compactions, each of one request's cache in one sieved layer." + _AGAIN,
        (),
    ),
    "shadow_dropped_tokens": (
        "Prompt tokens that would have been dropped of requests in shadow mode."
        + _PER_HEAD
        + _ONCE,
        (),
    ),
    "compaction_seconds": (
        "Host time that the worker spent on scoring and compaction, in seconds, by mode; in shadow"
        " mode on scoring alone." + _AGAIN,
        ("mode",),
    ),
    "pruned_requests": (
        "Requests that pruning looked at while their prompt was read, by method and by what"
        " decided where: fixed (the method's layer), threshold (ranks of tokens had settled),"
        " deepest (the operator's max_layer), last (the last layer of a first pass) or never"
        " (ranks did not settle, and no token was pruned)." + _ONCE,
        ("method", "reason"),
    ),
    "prune_seconds_saved": (
        "Prefill time that pruning has saved, in seconds. An estimate from the layers that ran:"
        " each pruned layer is taken to cost, per token, what the layers of the same step cost"
        " that read everything." + _ONCE,
        (),
    ),
}
_GAUGES = {
    "blocks_held": (
        "KV-cache blocks in the block tables of requests, by class of layer: sieved, or full for"
        " all others. A block that requests share counts for each of them.",
        ("layer_class",),
    ),
    "pool_blocks": ("KV-cache blocks that the pool can give to requests.", ()),
    "mode": ("1 for the mode that new requests are served in, 0 for the others.", ("mode",)),
}
_LOST = (
    "Share of the attention of the prompt's last queries (the observation window) that falls on"
    " tokens that are dropped, or in shadow mode would be; mean over heads, "
)
_HISTOGRAMS: dict[str, tuple[str, tuple[str, ...], Sequence[float]]] = {
    "attention_mass_lost": (
        _LOST + "and over sieved layers. One observation per request that was scored, by mode.",
        ("mode",),
        SHARE_BUCKETS,
    ),
    "layer_attention_mass_lost": (
        _LOST + "in one sieved layer. One observation per request and layer, by mode.",
        ("mode", "layer"),
        SHARE_BUCKETS,
    ),
    "prune_layer": (
        "Number of the last layer that read the whole prompt, by method. One observation per"
        " request that was pruned." + _ONCE,
        ("method",),
        LAYER_BUCKETS,
    ),
}

_Metric = TypeVar("_Metric", bound=MetricWrapperBase)


def exported_names() -> dict[str, tuple[str, ...]]:
    """Every metric name that a PromQL expression can use, with its labels."""
    names: dict[str, tuple[str, ...]] = {}
    for name, (_, labels) in _COUNTERS.items():
        names[f"kvsieve_{name}_total"] = (*_LABELS, *labels)
    for name, (_, labels) in _GAUGES.items():
        names[f"kvsieve_{name}"] = (*_LABELS, *labels)
    for name, (_, labels, _) in _HISTOGRAMS.items():
        names[f"kvsieve_{name}_bucket"] = (*_LABELS, *labels, "le")
        names[f"kvsieve_{name}_count"] = names[f"kvsieve_{name}_sum"] = (*_LABELS, *labels)
    return names


class _Families:
    """The metrics without their labels' values. They can be registered once per process."""

    def __init__(self) -> None:
        self.counters = {
            name: Counter(f"kvsieve_{name}", text, (*_LABELS, *labels))
            for name, (text, labels) in _COUNTERS.items()
        }
        self.gauges = {
            # With several API processes each step's numbers reach one of them: the latest
            # to be told is right, as for vLLM's own gauges.
            name: Gauge(
                f"kvsieve_{name}", text, (*_LABELS, *labels), multiprocess_mode="mostrecent"
            )
            for name, (text, labels) in _GAUGES.items()
        }
        self.histograms = {
            name: Histogram(f"kvsieve_{name}", text, (*_LABELS, *labels), buckets=buckets)
            for name, (text, labels, buckets) in _HISTOGRAMS.items()
        }


@functools.cache
def _families() -> _Families:
    return _Families()


class SieveMetrics:
    """The sieve's metrics of one model, for the engines that a process talks to.

    They go to the registry that vLLM's `/metrics` shows: prometheus_client's own, or the
    files of its multi-process mode with several API processes. Making it again, for
    another engine or model, adds labels and keeps what was counted.

    Args:
        model_name: Value of the label `model_name`.
        engines: Values of the label `engine`.
        mode: The engine's mode at start.
        pool_blocks: Blocks that the pool can give to requests, if known yet.
        is_pruning: Whether the engine's requests may be pruned.
    """

    def __init__(
        self,
        model_name: str,
        engines: Iterable[int],
        mode: str,
        pool_blocks: int | None = None,
        *,
        is_pruning: bool = False,
    ) -> None:
        self._model_name = model_name
        start = SieveCounters(
            requests=dict.fromkeys(MODES, 0),
            compaction_seconds=dict.fromkeys(SCORED_MODES, 0.0),
            attention_mass_lost={mode: [] for mode in SCORED_MODES},
            pruned_requests=_no_pruned_requests() if is_pruning else {},
            prune_layers={name: [] for name in PRUNE_METHODS} if is_pruning else {},
            blocks_held=dict.fromkeys(LAYER_CLASSES, 0),
            pool_blocks=pool_blocks,
            mode=mode,
        )
        for engine in engines:
            # A rate can be computed from a series only if it exists before it grows.
            self.add(start, engine)

    def add(self, counters: SieveCounters, engine: int) -> None:
        """Add sums and set gauges of one engine."""
        families = _families()
        for mode, count in counters.requests.items():
            self._of(families.counters["requests"], engine, mode).inc(count)
        for mode, seconds in counters.compaction_seconds.items():
            self._of(families.counters["compaction_seconds"], engine, mode).inc(seconds)
        for name, (_, labels) in _COUNTERS.items():
            if not labels:
                self._of(families.counters[name], engine).inc(getattr(counters, name))
        for key, count in counters.pruned_requests.items():
            method, reason = key.split("/")
            self._of(families.counters["pruned_requests"], engine, method, reason).inc(count)
        for method, numbers in counters.prune_layers.items():
            histogram = self._of(families.histograms["prune_layer"], engine, method)
            for number in numbers:
                histogram.observe(number)
        for layer_class, blocks in (counters.blocks_held or {}).items():
            self._of(families.gauges["blocks_held"], engine, layer_class).set(blocks)
        if counters.pool_blocks is not None:
            self._of(families.gauges["pool_blocks"], engine).set(counters.pool_blocks)
        if counters.mode is not None:
            for mode in MODES:
                gauge = self._of(families.gauges["mode"], engine, mode)
                gauge.set(mode == counters.mode)
        for mode, means in counters.attention_mass_lost.items():
            histogram = self._of(families.histograms["attention_mass_lost"], engine, mode)
            for share in means:
                histogram.observe(share)
        by_layer = families.histograms["layer_attention_mass_lost"]
        for mode, layers in counters.layer_mass_lost.items():
            for layer, shares in layers.items():
                histogram = self._of(by_layer, engine, mode, layer)
                for share in shares:
                    histogram.observe(share)

    def _of(self, family: _Metric, engine: int, *labels: str) -> _Metric:
        return family.labels(self._model_name, str(engine), *labels)


def _no_pruned_requests() -> dict[str, int]:
    """Zero for everything that can be counted of pruned requests."""
    return {
        f"{name}/{reason}": 0 for name, method in PRUNE_METHODS.items() for reason in method.reasons
    }


_ATTRIBUTE = "_kvsieve_metrics"


def install_metrics() -> None:
    """Put the sieve's numbers on `/metrics` wherever vLLM makes its stat loggers."""
    from vllm.v1.metrics.loggers import StatLoggerManager

    wrap(StatLoggerManager, "__init__", init_stat_logger_manager)
    wrap(StatLoggerManager, "record", record)


def init_stat_logger_manager(
    stock: Callable[..., None], manager: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    """`StatLoggerManager.__init__`, which also makes the sieve's metrics where it is configured."""
    stock(manager, vllm_config, *args, **kwargs)
    if not is_configured(vllm_config.additional_config):
        return
    # Known here: the engine core has answered. One of the pool's blocks is vLLM's null block.
    num_blocks = vllm_config.cache_config.num_gpu_blocks
    config = sieve_config(vllm_config)
    metrics = SieveMetrics(
        model_name=vllm_config.model_config.served_model_name,
        engines=manager.engine_indexes,
        mode=config.mode,
        pool_blocks=num_blocks - 1 if num_blocks else None,
        is_pruning=config.prune != NO_PRUNING,
    )
    setattr(manager, _ATTRIBUTE, metrics)


def record(
    stock: Callable[..., None],
    manager: Any,
    scheduler_stats: Any,
    iteration_stats: Any,
    mm_cache_stats: Any = None,
    engine_idx: int | None = None,
) -> None:
    """`StatLoggerManager.record`, which first takes out and counts the sieve's entry."""
    metrics: SieveMetrics | None = getattr(manager, _ATTRIBUTE, None)
    if metrics is not None and scheduler_stats is not None and scheduler_stats.kv_connector_stats:
        rest = dict(scheduler_stats.kv_connector_stats)
        entry = rest.pop(CONFIG_KEY, None)
        scheduler_stats.kv_connector_stats = rest or None
        if entry is not None:
            try:
                metrics.add(SieveCounters.from_dict(entry), engine_idx or 0)
            except Exception:
                # vLLM answers an error in here by failing every request.
                logger.exception("kvsieve: these numbers are missing from /metrics: %s", entry)
    stock(
        manager,
        scheduler_stats,
        iteration_stats,
        mm_cache_stats=mm_cache_stats,
        engine_idx=engine_idx,
    )
