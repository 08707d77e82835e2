"""kvsieve: stock vLLM, keeping only the KV entries that matter.

Importing this package imports neither torch nor vLLM. The plugin entry point
(`kvsieve.engine.plugin:register`) is what vLLM loads; it changes nothing until
`additional_config={"kvsieve": {...}}` asks for it.
"""

from kvsieve.core.budget import BudgetRule
from kvsieve.core.config import SieveConfig
from kvsieve.core.errors import ConfigError, KvsieveError
from kvsieve.core.report import SieveReport

__version__ = "0.1.0"

__all__ = [
    "BudgetRule",
    "ConfigError",
    "KvsieveError",
    "SieveConfig",
    "SieveReport",
    "__version__",
]
