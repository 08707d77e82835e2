"""The errors a user of kvsieve sees."""

from __future__ import annotations

from collections.abc import Sequence


class KvsieveError(Exception):
    """Base of every error that kvsieve raises on purpose."""


class ConfigError(KvsieveError, ValueError):
    """A setting that cannot work. Carries every reason found, not only the first.

    Args:
        reasons: One sentence each: what is wrong, what was given, what to do.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        if not reasons:
            raise ValueError("a ConfigError needs at least one reason")
        self.reasons = tuple(reasons)
        if len(self.reasons) == 1:
            text = f"kvsieve cannot start: {self.reasons[0]}"
        else:
            lines = "\n".join(f"  {i}. {reason}" for i, reason in enumerate(self.reasons, 1))
            text = f"kvsieve cannot start, for {len(self.reasons)} reasons:\n{lines}"
        super().__init__(text)


class SieveInvariantError(KvsieveError, RuntimeError):
    """The worker found a state that would give wrong text, and stopped instead."""
