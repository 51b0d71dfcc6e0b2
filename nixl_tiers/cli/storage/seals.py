"""Verifying one row by its seal alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.chunk import PAGE, Geometry, Key
from nixl_tiers.memory import seal
from nixl_tiers.memory.seal import Sealer, SealHeader, Verdict

_TAILS = (PAGE, 64 << 10)  # in which a seal is looked for
_REASONS = {
    Verdict.NOT_A_SEAL: "it has no seal",
    Verdict.VERSION: "its seal has a format that this version does not know",
    Verdict.NAMESPACE: "it belongs to another namespace",
    Verdict.KEY: "it is another chunk",
    Verdict.SHAPE: "it has another size than its seal says",
    Verdict.DIGEST: "its bytes are not those that were sealed",
}


def find_seal(row: NDArray[np.uint8]) -> SealHeader | None:
    return next((found for tail in _TAILS if (found := seal.read(row[-tail:])) is not None), None)


def defect(row: NDArray[np.uint8], namespace: bytes, key: Key, geometry: Geometry | None = None) -> str:
    """Why this is not the row of that key, in words; "": it is. `geometry`: as it must be; None: as its seal says."""
    found = find_seal(row)
    if found is None:
        return _REASONS[Verdict.NOT_A_SEAL]
    # The namespace covers the epoch, so the seal's own epoch is the one to compare with.
    verdict = Sealer(geometry or found.geometry, namespace, found.epoch).verify(row, key)
    return "" if verdict is Verdict.OK else _REASONS[verdict]
