"""Replacing a function of vLLM by one that is given the original."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_WRAPPED = "_kvsieve_wrapped"


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method of a class, or a function of a module. A second call does nothing.

    Args:
        owner: The class or module.
        name: Name of the method or function.
        wrapper: Called instead, with the original before the caller's own arguments.
    """
    stock = getattr(owner, name)
    if getattr(stock, _WRAPPED, False):
        return

    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(stock, *args, **kwargs)

    setattr(wrapped, _WRAPPED, True)
    setattr(owner, name, wrapped)
