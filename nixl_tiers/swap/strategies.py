"""The copy strategies, by name; csrc/swap_copies.h carries them out.

copy_engine  one descriptor per layer and block, for the copy engine: takes no SM, slow for small pages
staged       gather on the GPU into a slot of a buffer, whole rows over the bus by the copy engine; loads: the reverse
"""

from __future__ import annotations

import os
from typing import Final

# Both measured on an H100: docs/internals/gpu.md.
SLOT_BYTES: Final = 8 << 20  # of the staging buffer: 150 us of PCIe 5, in which the next slot is gathered
STAGE_BLOCKS: Final = 64  # blocks of threads that gather
NAMES: Final = ("copy_engine", "staged")
BATCHES: Final = "NIXL_TIERS_SWAP_BATCHES"  # auto, on or off
BLACKWELL: Final = (10, 0)  # compute capability from which on repeated batches were seen to hang: vllm#49276


def may_batch(capability: tuple[int, int]) -> bool:
    """Whether copies may be handed over in batches (cuMemcpyBatchAsync). Raises ValueError for a setting unknown."""
    wanted = os.environ.get(BATCHES, "auto")
    if wanted not in {"auto", "on", "off"}:
        raise ValueError(f"{BATCHES} is {wanted!r}; it can be auto, on, off")
    return wanted == "on" or (wanted == "auto" and capability < BLACKWELL)
