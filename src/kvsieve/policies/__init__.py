"""What to keep: pure functions on tensors, one file per step, one file per method.

A policy is data (`Policy`) over the steps score, reduce heads, smooth, refine, protect and
select. A method (`Method`) is a published policy under its name, one row of `table.py`. What a
score looks at (`Evidence`) is computed elsewhere; nothing here knows of vLLM.
"""

from kvsieve.policies.evidence import Accumulator, Chunk, Evidence, Rotary
from kvsieve.policies.mass import attention_mass_lost
from kvsieve.policies.method import Method
from kvsieve.policies.options import read_count, read_number, read_switch
from kvsieve.policies.policy import Policy
from kvsieve.policies.protect import protect
from kvsieve.policies.select import select_positions
from kvsieve.policies.smooth import smooth
from kvsieve.policies.table import (
    METHODS,
    find_method,
    method_names,
    parse_settings,
    policy_from_config,
)

__all__ = [
    "METHODS",
    "Accumulator",
    "Chunk",
    "Evidence",
    "Method",
    "Policy",
    "Rotary",
    "attention_mass_lost",
    "find_method",
    "method_names",
    "parse_settings",
    "policy_from_config",
    "protect",
    "read_count",
    "read_number",
    "read_switch",
    "select_positions",
    "smooth",
]
