"""What to keep: pure functions on tensors, one file per step, one table of policies.

A policy is data (`Policy`) plus the steps score, reduce heads, smooth, protect and
select. The score itself is a kernel (`kvsieve.kernels`), named by the policy;
everything after it lives here and knows nothing of vLLM.
"""

from kvsieve.policies.mass import attention_mass_lost
from kvsieve.policies.policy import Policy
from kvsieve.policies.protect import protect_sinks
from kvsieve.policies.reduce import reduce_heads
from kvsieve.policies.select import select_positions
from kvsieve.policies.smooth import smooth
from kvsieve.policies.snapkv import snapkv
from kvsieve.policies.table import policy_from_config

__all__ = [
    "Policy",
    "attention_mass_lost",
    "policy_from_config",
    "protect_sinks",
    "reduce_heads",
    "select_positions",
    "smooth",
    "snapkv",
]
