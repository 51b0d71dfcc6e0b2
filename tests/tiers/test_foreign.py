"""Names that are no UTF-8, as foreign files may have below a tier's path."""

from __future__ import annotations

import os

from nixl_tiers.mover.protocol import Down, decode_to_coordinator, encode, sendable_text


def test_text_with_a_name_that_is_no_utf8_can_be_sent() -> None:
    reason = sendable_text(f"{os.fsdecode(bytes([255]))} cannot be read" + "x" * 5000)
    found = decode_to_coordinator(encode(Down(reason, 0)))
    assert isinstance(found, Down)
    assert found.reason.startswith("\\udcff cannot be read")
