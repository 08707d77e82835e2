"""The operations that touch cached keys and values, each behind one call.

`call` has the calls and says what they take and return. `reference` is plain torch in float32
and defines what is correct; `cpu`, `cpu_scores` and `cpu_rows` work on vLLM's CPU caches;
`triton_scores` and `triton_move` on caches of any strides on GPUs. An implementation is
chosen by name; none falls back.
"""

from kvsieve.kernels.call import (
    Implementation,
    KernelError,
    attention_sums,
    compact_pages,
    grouped_window_mean,
    key_redundancy,
    output_norms,
    window_scores,
    window_scores_and_squares,
)
from kvsieve.kernels.pages import PagedRows, Rows

__all__ = [
    "Implementation",
    "KernelError",
    "PagedRows",
    "Rows",
    "attention_sums",
    "compact_pages",
    "grouped_window_mean",
    "key_redundancy",
    "output_norms",
    "window_scores",
    "window_scores_and_squares",
]
