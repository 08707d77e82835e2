"""Examples from files that users have, in the formats that benchmarks publish.

Nothing is downloaded and no benchmark's text is part of this package.
"""

from __future__ import annotations

from kvsieve.evals.files.format import Format, Limits
from kvsieve.evals.files.infinitebench import INFINITEBENCH
from kvsieve.evals.files.longbench import LONGBENCH
from kvsieve.evals.files.mmlu import MMLU
from kvsieve.evals.files.ruler import RULER

FORMATS: dict[str, Format] = {each.name: each for each in (LONGBENCH, INFINITEBENCH, MMLU, RULER)}
"""Every format by the name that `--data NAME:PATH` takes."""

__all__ = ["FORMATS", "Format", "Limits"]
