"""The error of a benchmark that cannot go on."""

from __future__ import annotations

from kvsieve.core.errors import KvsieveError


class BenchError(KvsieveError, RuntimeError):
    """The benchmark cannot go on, or its figures would mislead: says why and what to do."""
