"""The error that a user of the demonstration sees."""

from __future__ import annotations

from kvsieve.core.errors import KvsieveError


class DemoError(KvsieveError, RuntimeError):
    """The demonstration cannot go on: says what happened and what to do."""
