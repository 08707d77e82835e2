"""Key-value retrieval: one value of a JSON object of UUIDs.

The kind of Liu et al. 2023 (Lost in the Middle, arXiv:2307.03172, section 3) and of InfiniteBench
(arXiv:2402.13718): every pair looks like every other, so nothing but the question says which
one matters.
"""

from __future__ import annotations

import json
import random

from kvsieve.evals.example import Example
from kvsieve.evals.tasks.fit import Build, fit
from kvsieve.evals.tasks.haystack import spread_depths
from kvsieve.evals.tasks.task import CountTokens, Task
from kvsieve.evals.tasks.words import draw_uuid


def generate(count_tokens: CountTokens, length: int, count: int, seed: int) -> list[Example]:
    """See `kvsieve.evals.tasks.task.Generate`."""
    depths = spread_depths(count)
    builds = [_build(length, depth, index, seed) for index, depth in enumerate(depths)]
    return fit(KV_RETRIEVAL.name, builds, count_tokens, length)


def _build(length: int, depth: float, index: int, seed: int) -> Build:
    source = f"kv_retrieval/{length}/{seed}/{index}"
    rng = random.Random(source)
    key, value = draw_uuid(rng), draw_uuid(rng)

    def build(units: int) -> Example:
        others = random.Random(f"{source}/others")
        pairs = [(draw_uuid(others), draw_uuid(others)) for _ in range(units)]
        pairs.insert(round(depth * units), (key, value))
        listed = json.dumps(dict(pairs), indent=0)
        return Example(
            example_id=f"kv_retrieval/{length}/{depth:.2f}/{index}",
            task="kv_retrieval",
            context=f"Look up one value in this JSON object.\n\n{listed}",
            question=f'Which value does the key "{key}" have?',
            references=(value,),
            scorer="contains_all",
            max_tokens=48,
            answer_prefix=f'"{key}": "',
            tags={"length": length, "depth": depth},
        )

    return build


KV_RETRIEVAL = Task("kv_retrieval", "one value of a JSON object of UUIDs", generate)
