"""What is read from outside while the load runs: memory of the processes, and `/metrics`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from soaking.client import Server

_SERIES = re.compile(r"^([A-Za-z_:][\w:]*)(\{.*\})?\s+(\S+)", re.MULTILINE)
_NUM_BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')

USAGE, RUNNING, WAITING, PREEMPTIONS = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
)
WANTED = (USAGE, RUNNING, WAITING, PREEMPTIONS)
OURS = ("kvsieve_", "kvsieve:", "vllm:kvsieve")


def find_processes(url: str) -> list[psutil.Process]:
    """The processes that listen on a URL's port.

    Raises:
        LookupError: None does, or we may not see it.
    """
    port = urlsplit(url).port
    pids = {
        connection.pid
        for connection in psutil.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr.port == port
        and connection.pid is not None
    }
    if not pids:
        raise LookupError(f"no process of ours listens on port {port}; name it with --pid")
    return [psutil.Process(pid) for pid in sorted(pids)]


def read_tree(roots: Sequence[psutil.Process]) -> dict[str, float]:
    """Resident MB and CPU seconds of these processes and all they started, and their number.

    Pages that processes share count once for each.
    """
    seen: dict[int, psutil.Process] = {}
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            seen |= {process.pid: process for process in (root, *root.children(recursive=True))}
    rss = cpu = 0.0
    for process in seen.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            rss, cpu = rss + process.memory_info().rss, cpu + times.user + times.system
    return {"rss_mb": rss / 1e6, "cpu_s": cpu, "processes": len(seen)}


def parse_metrics(text: str) -> dict[str, float]:
    """Series that are watched, summed over their labels; ours are kept apart by label."""
    sums: dict[str, float] = defaultdict(float)
    for name, labels, value in _SERIES.findall(text):
        if name in WANTED:
            sums[name] += float(value)
        elif name.startswith(OURS) and not name.endswith(("_bucket", "_created")):
            sums[f"{name}{labels}"] += float(value)
    if blocks := _NUM_BLOCKS.search(text):
        sums["num_blocks"] = float(blocks.group(1))
    return dict(sums)


@dataclass
class Watch:
    """The samples of one server.

    Attributes:
        server: The server.
        roots: Its processes; their children are found anew at every sample.
        samples: Seconds since the start, what `read_tree` gives, and metrics.
        misses: Samples without metrics.
    """

    server: Server
    roots: list[psutil.Process]
    samples: list[dict[str, Any]] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)

    async def sample(self, began: float, http: httpx.AsyncClient) -> dict[str, Any]:
        """Take a sample; what could not be read is noted in `misses`."""
        sample: dict[str, Any] = {"at": time.monotonic() - began, **read_tree(self.roots)}
        try:
            answer = await http.get(f"{self.server.url}/metrics", timeout=60)
            answer.raise_for_status()
            sample |= parse_metrics(answer.text)
        except httpx.HTTPError as error:
            self.misses.append(f"{sample['at']:.0f} s: {type(error).__name__}: {error}")
        self.samples.append(sample)
        return sample

    async def drained(self, began: float, http: httpx.AsyncClient, patience_s: float) -> bool:
        """Wait until no request is left and no block is held; False if that never comes.

        vLLM renews its gauges when it takes a step, and takes none for a request that was
        aborted: a request of one token makes it tell.
        """
        deadline = time.monotonic() + patience_s
        while True:
            await self.server.client.completions.create(
                model=self.server.model, prompt=[1_000], max_tokens=1
            )
            await asyncio.sleep(1)
            sample = await self.sample(began, http)
            if all(sample.get(name) == 0 for name in (USAGE, RUNNING, WAITING)):
                return True
            if time.monotonic() > deadline:
                return False


@dataclass(frozen=True)
class Slope:
    """A straight line through samples: its rise per hour and the standard error of that."""

    per_hour: float
    error: float
    samples: int


def slope(samples: Sequence[dict[str, Any]], until: float, skip: float = 0.2) -> Slope | None:
    """Growth of the resident memory in MB per hour, after the first `skip` of the time.

    The error takes residuals for independent; memory that grows in steps has a larger one.
    """
    points = [
        (sample["at"] / 3600, sample["rss_mb"])
        for sample in samples
        if skip * until <= sample["at"] <= until and sample["rss_mb"]
    ]
    if len(points) < 4:
        return None
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    residuals = sum((y - mean_y - rise * (x - mean_x)) ** 2 for x, y in points)
    return Slope(rise, math.sqrt(residuals / (count - 2) / spread), count)
