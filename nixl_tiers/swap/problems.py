"""What can be wrong with one of a step's jobs: verdicts of csrc/swap_step.c."""

from collections.abc import Mapping
from typing import Final

GOOD, MISMATCH, ROW_RANGE, BLOCK_RANGE, NOT_HELD, COPY_FAILED = range(6)
PROBLEMS: Final[Mapping[int, str]] = {
    MISMATCH: "its blocks and rows do not match",
    ROW_RANGE: "a row is not one of the region's",
    BLOCK_RANGE: "a block is not one of the engine's",
    NOT_HELD: "blocks are requested that their rows do not hold",
    COPY_FAILED: "its copy failed",
}
UNEQUAL: Final = "a step's jobs have not as many rows or blocks as they say"
