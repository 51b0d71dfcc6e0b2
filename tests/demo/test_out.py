"""The demo's directory: what was there before stays."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.demo import run as demo


class Stop(Exception):
    pass


def test_file_tier_that_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--out` may name a directory that has a file tier, as /mnt/nvme with /mnt/nvme/kv."""
    slab = tmp_path / "kv" / "slab"
    slab.parent.mkdir()
    slab.write_bytes(b"rows")

    @contextmanager
    def no_server() -> Any:
        raise Stop
        yield

    monkeypatch.setattr(demo.Demo, "_build_model", lambda _: tmp_path)
    monkeypatch.setattr(demo, "_kv_bytes_per_token", lambda _: 1)
    monkeypatch.setattr(demo, "s3_server", lambda _: no_server())
    with pytest.raises(Stop):
        demo.run(tmp_path, 6032, "moto")
    assert slab.read_bytes() == b"rows"
    assert [each.name for each in tmp_path.iterdir()] == ["kv"]
