"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# No test measures time, and a busy machine is no fault.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
