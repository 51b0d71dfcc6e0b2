"""Odd foreign directories below a tier's path: deep, with long names, with names that are no UTF-8."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.mover.protocol import Down, decode_to_coordinator, encode, sendable_text
from nixl_tiers.tiers.folder import REMEASURE_S, ForeignTrees, tree_bytes
from tests.tiers.slab.test_quota import MIB


def test_tree_is_measured_again_after_a_while(tmp_path: Path) -> None:
    now = [0.0]
    trees = ForeignTrees(lambda: now[0])
    (tmp_path / "photos").mkdir()

    def nbytes() -> int:
        return sum(trees.nbytes(entry) for entry in os.scandir(tmp_path))

    before = nbytes()
    (tmp_path / "photos/cat").write_bytes(bytes(MIB))
    assert nbytes() == before
    now[0] = REMEASURE_S
    assert nbytes() >= before + MIB


@pytest.mark.parametrize("call", ["scandir", "stat"])
@pytest.mark.parametrize("gone", ["a", "b", "c"])
def test_directory_that_goes_or_is_closed_meanwhile_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str, call: str
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / "top" / name).mkdir(parents=True)
        (tmp_path / "top" / name / "file").write_bytes(bytes(MIB if name != gone else 0))
    real = getattr(os, call)

    def fail(*args: Any, dir_fd: int = -1, **more: Any) -> Any:
        descriptor = args[0] if call == "scandir" else dir_fd
        if descriptor >= 0 and os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"/{gone}"):  # noqa: PTH115
            raise FileNotFoundError if call == "scandir" else PermissionError
        return real(*args, **more, **({"dir_fd": dir_fd} if dir_fd >= 0 else {}))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        nbytes = tree_bytes(str(tmp_path / "top"))
    assert nbytes >= 2 * MIB


def test_text_with_a_name_that_is_no_utf8_can_be_sent() -> None:
    reason = sendable_text(f"{os.fsdecode(bytes([255]))} cannot be read" + "x" * 5000)
    found = decode_to_coordinator(encode(Down(reason, 0)))
    assert isinstance(found, Down)
    assert found.reason.startswith("\\udcff cannot be read")
