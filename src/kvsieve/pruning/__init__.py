"""Pruning methods: which tokens of a prompt go deeper, and from which layer on.

Pure: they see one layer's evidence at a time and know nothing of the engine.
"""

from kvsieve.pruning.choice import LayerChoice
from kvsieve.pruning.method import PRUNE_METHODS, PruneMethod
from kvsieve.pruning.settings import (
    ModelPruning,
    PruneOptions,
    PruneSettings,
    check_prune_options,
    prune_settings,
    pruning_from_config,
)

__all__ = [
    "PRUNE_METHODS",
    "LayerChoice",
    "ModelPruning",
    "PruneMethod",
    "PruneOptions",
    "PruneSettings",
    "check_prune_options",
    "prune_settings",
    "pruning_from_config",
]
