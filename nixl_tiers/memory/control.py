"""Control words: what the ranks' stores say of their cells of a row (base/control_words.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nixl_tiers.base.control_words import (
    FAILED,
    INCOMPLETE,
    MAX_MISSING,
    MISSING_AT,
    STORE_SEQ_AT,
    WRITTEN,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.integer[Any]]


class ControlWords:
    """Of a region's rows. `control`: uint64 (rows, cells)."""

    control: NDArray[np.uint64]

    def mark(self, rows: Numbers | Sequence[int], cell: int, store_seq: int, ok: bool) -> None:
        """Record that store job `store_seq` has written its cell of these rows whole, or failed to. Of rows that lack
        something csrc/swap_step.c says so.

        Called by the rank that owns the cell, after its bytes are in memory (streaming stores fenced). A late word of
        an older job is never taken for a newer one's: store_seqs (0 to 2**40 - 1) are never reused in a region.
        Raises OverflowError for a larger one.
        """
        if store_seq >> 64 - STORE_SEQ_AT:
            raise OverflowError(f"a store_seq of more than {64 - STORE_SEQ_AT} bits")
        self.control[rows, cell] = np.uint64(store_seq << STORE_SEQ_AT | (WRITTEN if ok else FAILED))

    def written(self, rows: NDArray[np.integer[Any]] | Sequence[int], store_seq: int) -> NDArray[np.bool_]:
        """bool (len(rows),): True where every cell's word says that job `store_seq` has written it."""
        word = np.uint64(store_seq << STORE_SEQ_AT | WRITTEN)
        words = self.control[rows] & ~np.uint64(MAX_MISSING << MISSING_AT)
        good: NDArray[np.bool_] = (words == word).all(axis=1)
        return good

    def ended(self, rows: NDArray[np.integer[Any]] | Sequence[int], store_seqs: Sequence[int]) -> NDArray[np.bool_]:
        """bool (len(rows),): True where every cell's word says that its row's job has ended, well or not."""
        words = self.control[rows]
        of_job = words >> np.uint64(STORE_SEQ_AT) == np.asarray(store_seqs, np.uint64)[:, None]
        done: NDArray[np.bool_] = (of_job & (words & np.uint64((1 << MISSING_AT) - 1) != 0)).all(axis=1)
        return done

    def copied(self, rows: NDArray[np.integer[Any]] | Sequence[int], store_seq: int) -> NDArray[np.bool_]:
        """bool (len(rows),): True where every cell's word says that job `store_seq` has copied what was there to copy,
        whole or not."""
        words = self.control[rows] & ~np.uint64(MAX_MISSING << MISSING_AT)
        known = np.array([store_seq << STORE_SEQ_AT | WRITTEN, store_seq << STORE_SEQ_AT | INCOMPLETE], np.uint64)
        good: NDArray[np.bool_] = np.isin(words, known)
        return np.asarray(good.all(axis=1))

    def missing(self, rows: NDArray[np.integer[Any]] | Sequence[int]) -> NDArray[np.uint64]:
        """(len(rows),): how many sub-blocks at the beginning some cell of a written row lacks."""
        words: NDArray[np.uint64] = self.control[rows] >> np.uint64(MISSING_AT) & np.uint64(MAX_MISSING)
        most: NDArray[np.uint64] = words.max(axis=1, initial=0)
        return most
