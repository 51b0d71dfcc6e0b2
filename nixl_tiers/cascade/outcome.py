"""How one row's move between the region and a storage tier ended."""

from __future__ import annotations

from enum import IntEnum


class Outcome(IntEnum):
    """Anything but OK is a miss to whoever waits for the row."""

    OK = 0
    MISSING = 1  # nothing stored there
    CORRUPT = 2  # something is there, and its seal says that it is not ours, or not whole
    FAILED = 3  # an I/O error: the bytes may still be good
    NO_SPACE = 4  # a store that the medium has no room for
