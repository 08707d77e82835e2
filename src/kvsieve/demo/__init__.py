"""The demonstration: one long prompt, answered by stock vLLM and by a sieved server.

`run_demo` is the whole of it; `ensure_demo_model` makes the model that it serves,
offline, from a package of PyPI. Nothing here imports vLLM: the servers are
processes of their own, and what the table shows comes from them over HTTP.
"""

from kvsieve.demo.errors import DemoError
from kvsieve.demo.model import ensure_demo_model
from kvsieve.demo.run import run_demo

__all__ = ["DemoError", "ensure_demo_model", "run_demo"]
