"""NIXL transfers, waited for."""

from __future__ import annotations

from nixl_tiers.tiers.nixl_agent import Transfer, TransferState
from tests.support.waiting import until


def end(transfer: Transfer) -> TransferState:
    """Its state, once it has ended and is released."""
    until(lambda: transfer.state() is not TransferState.PENDING, "a transfer to end")
    transfer.release()
    transfer.release()  # harmless
    return transfer.state()
