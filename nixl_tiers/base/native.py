"""The package's native libraries (csrc/): nothing else does what they do, so a start without one is refused."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final, NamedTuple

AGAIN: Final = "install nixl_tiers again, as a wheel or with a C compiler"


class NotBuilt(RuntimeError):
    """One sentence: `problem`, which names the file, and what to do."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}: {AGAIN}")
        self.problem = problem


class Library(NamedTuple):
    path: str
    function: str  # returns `abi`
    abi: int


def _library(name: str, function: str, abi: int) -> Library:
    return Library(str(Path(__file__).parents[1] / f"{name}.abi3.so"), f"nixl_tiers_{function}_abi", abi)


HASH_COPY: Final = _library("memory/_hash_copy", "hash_copy", 3)
ROW_FILES: Final = _library("tiers/rowfile/_row_files", "row_files", 2)
ROW_WORKER: Final = _library("tiers/slab/_row_worker", "row_worker", 4)
SWAP_CPU: Final = _library("swap/_swap_cpu", "swap", 4)
SWAP_SUBMIT: Final = _library("swap/_swap_submit", "submit", 5)
TIER_ROWS: Final = _library("core/_tier_rows", "tier_rows", 4)
ALL: Final = (HASH_COPY, ROW_FILES, ROW_WORKER, SWAP_CPU, SWAP_SUBMIT, TIER_ROWS)


def opened(library: Library, *, keeps_lock: bool = False) -> ctypes.CDLL:
    """Other threads run during a call, unless it `keeps_lock`, the interpreter's. Raises NotBuilt."""
    try:
        found = ctypes.PyDLL(library.path) if keeps_lock else ctypes.CDLL(library.path)
        abi = found[library.function]()
    except (OSError, AttributeError) as error:  # both name the file
        raise NotBuilt(f"a library of nixl_tiers cannot be used ({error})") from None
    if abi != library.abi:
        raise NotBuilt(f"{library.path} is of another version of nixl_tiers")
    return found


def require() -> None:
    """Raise NotBuilt unless all libraries can be used."""
    for library in ALL:
        opened(library)
