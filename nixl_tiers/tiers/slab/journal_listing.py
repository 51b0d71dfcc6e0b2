"""What a journal reads at open, until it is listed: keys in chunks, and which slot comes first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.tiers.slab.journal_file import CHUNK_RECORDS
from nixl_tiers.tiers.slab.journal_record import Records


class Listing:
    """What was read at open, until it is listed. `removed`: (slot, tag) of rows that were removed before."""

    def __init__(self, allocated: NDArray[np.bool_]) -> None:
        self.allocated = allocated
        self.removed: list[tuple[int, int]] = []
        self.order: NDArray[np.int64] | None = None  # slots, least recently used first; None: not all is read
        self.keys: list[tuple[bytes, int, bytes]] = []  # by chunk: lengths of keys, bytes from one to the next, keys

    def add(self, found: Records) -> None:
        width = int(found.lengths.max(initial=0))
        padded = found.keys.view(np.uint8).reshape(len(found.keys), -1)[:, :width]
        self.keys.append((found.lengths.tobytes(), width, padded.tobytes()))

    def key(self, slot: int) -> bytes:
        chunk, place = divmod(slot, CHUNK_RECORDS)
        lengths, width, keys = self.keys[chunk]
        return keys[place * width : place * width + lengths[place]]

    def clear(self) -> None:
        self.keys.clear()
        self.order, self.allocated = np.zeros(0, np.int64), np.zeros(0, np.bool_)


def older_duplicates(
    tags: NDArray[np.uint64], ticks: NDArray[np.int64], sealed_at: NDArray[np.uint32]
) -> NDArray[np.int64]:
    """Places of rows whose key another row has that was used later, or sealed later."""
    order = np.argsort(tags)
    (same,) = np.nonzero(tags[order[1:]] == tags[order[:-1]])
    among = np.unique(order[np.concatenate([same, same + 1])])
    among = among[np.lexsort((sealed_at[among], ticks[among], tags[among]))]
    older: NDArray[np.int64] = among[:-1][tags[among[1:]] == tags[among[:-1]]]
    return older
