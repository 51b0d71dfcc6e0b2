"""What a loaded row's word says: a uint32 a row in the region (docs/internals/streams.md). The core writes WAITING
before any mover knows of the row; its mover ARRIVED once all of it is verified and there, before it reports the row."""

from typing import Final

WAITING: Final = 1
ARRIVED: Final = 2  # as in csrc/arrive.c
MAX_STREAMS: Final = 64  # slots for limits
