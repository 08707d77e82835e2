"""Settings that must stand before torch is imported."""

from __future__ import annotations

import os

# Threads that spin at barriers make everything several times slower when cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
