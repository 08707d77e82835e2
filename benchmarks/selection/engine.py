"""Prompts under settings, by engines in this process, one after the other, into a journal."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvsieve.evals.item import Item
from kvsieve.evals.metrics import SCORERS
from selection.plan import FULL, Job

TOGETHER = 4
"""Requests that are sent at once, and then noted."""


class SelectionError(RuntimeError):
    """A request was not treated as it asked to be."""


class Journal:
    """Records of requests, as JSON lines; what it has already is not run again.

    Args:
        path: The file. Records of another experiment in it are refused.
        settings: Everything that results depend on.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            head, *lines = path.read_text().splitlines()
            if json.loads(head) != settings:
                raise SelectionError(
                    f"{path} is of other settings: {head}. Give another --journal, or remove it"
                )
            noted = [json.loads(line) for line in lines]
            self.records = [one for one in noted if "run" not in one]
            self.runs = [one["run"] for one in noted if "run" in one]
        else:
            self._write(settings)

    def lacks(self, job: Job, items: Sequence[Item], options: Mapping[str, Any]) -> list[Item]:
        """Those of the items that the job has no record of.

        Raises:
            SelectionError: It has some that were pruned with other options.
        """
        key = (job.split, job.method, job.budget)
        mine = [
            record
            for record in self.records
            if (record["split"], record["method"], record["budget"]) == key
        ]
        if others := [record for record in mine if record["prune_options"] != options]:
            raise SelectionError(
                f"{self.path} has {len(others)} records of {job.method} at {job.budget} with"
                f" {others[0]['prune_options']}, and this run chose {options}: it has other tasks"
                " or budgets. Give those again, or another --journal"
            )
        have = {record["item"] for record in mine}
        return [item for item in items if item.item_id not in have]

    def add(self, record: dict[str, Any]) -> None:
        """Note one request."""
        self.records.append(record)
        self._write(record)

    def begin(self, run: dict[str, Any]) -> None:
        """Note that a run begins: when, from which source and on what machine."""
        self.runs.append(run)
        self._write({"run": run})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a") as out:
            out.write(json.dumps(line) + "\n")


def run_jobs(
    model: str,
    settings: dict[str, Any],
    max_model_len: int,
    work: Sequence[tuple[Job, Sequence[Item]]],
    journal: Journal,
    say: Callable[[str], None],
) -> None:
    """Serve what the journal lacks; starts no engine if it lacks nothing.

    Raises:
        SelectionError: A prompt was not pruned as it was to be, or had been with other options.
    """
    options = settings["prune_options"]
    todo = [
        (job, missing) for job, items in work if (missing := journal.lacks(job, items, options))
    ]
    if not todo:
        return
    with _engine(model, settings, max_model_len) as engine:
        for job, items in todo:
            began = time.process_time()
            for at in range(0, len(items), TOGETHER):
                for record in _serve(engine, job, items[at : at + TOGETHER]):
                    journal.add({**record, "prune_options": options})
            spent = time.process_time() - began
            say(f"{job.split}, {job.budget}, {job.method}: {len(items)} prompts, {spent:.0f} CPU s")


@contextmanager
def _engine(model: str, settings: dict[str, Any], max_model_len: int) -> Iterator[Any]:
    # In this process: its CPU time is then that of the requests.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    engine = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_num_seqs=TOGETHER,
        max_model_len=max_model_len,
        # A prompt is pruned only where a step is sure to read it at once.
        max_num_batched_tokens=2 * max_model_len,
        kv_cache_memory_bytes=2**28,
        enable_prefix_caching=False,
        disable_log_stats=True,
        additional_config={"kvsieve": settings},
    )
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


def _serve(engine: Any, job: Job, items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    from vllm import SamplingParams

    outputs = engine.generate(
        [{"prompt_token_ids": list(item.prompt_ids)} for item in items],
        [
            SamplingParams(
                temperature=0.0,
                max_tokens=1 if job.reads_only else item.max_tokens,
                extra_args=job.request,
            )
            for item in items
        ],
        use_tqdm=False,
    )
    for item, output in zip(items, outputs, strict=True):
        report = (output.kv_transfer_params or {}).get("kvsieve") or {}
        pruned = report.get("pruned") or {}
        if not pruned and job.method != FULL:
            raise SelectionError(f"{item.item_id} by {job.method}: {report.get('not_pruned')}")
        example = item.example
        assert example is not None
        text = output.outputs[0].text
        yield {
            "split": job.split,
            "method": job.method,
            "budget": job.budget,
            "task": item.task,
            "item": item.item_id,
            "item_sha256": item.sha256,
            "prompt_tokens": len(item.prompt_ids),
            "score": None if job.reads_only else SCORERS[example.scorer](text, example),
            "answer": text,
            "layer": pruned.get("layer"),
            "reason": pruned.get("reason"),
            "kept_tokens": pruned.get("kept_tokens", len(item.prompt_ids)),
            "computed_share": pruned.get("computed_share", 1.0),
            "relative_variance": pruned.get("relative_variance"),
        }
