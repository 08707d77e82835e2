"""The operations that touch cached keys and values, each behind one call.

`reference` is plain torch in float32 and defines what is correct; `cpu` works on
vLLM's CPU cache layout. An implementation is chosen by name; none falls back.
"""
