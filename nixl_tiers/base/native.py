"""The package's C libraries, for ctypes: each is optional, and one of another machine or version is not called."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec


def location(module: str) -> str | None:
    """Where the library lies that was built as this module (its full name), or None."""
    spec = find_spec(module)
    return spec.origin if spec else None


def opened(path: str | None, name: str, abi: int, *, keeps_lock: bool = False) -> ctypes.CDLL | None:
    """The library at `path`, or None where there is none, it cannot be loaded, or its function `name` returns another
    number than `abi`. Other threads run during a call, unless it `keeps_lock`, the interpreter's."""
    if not path:
        return None
    try:
        library = ctypes.PyDLL(path) if keeps_lock else ctypes.CDLL(path)
        return library if library[name]() == abi else None
    except (OSError, AttributeError):
        return None
