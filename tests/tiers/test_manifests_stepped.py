"""The keeper of a manifest, step by step: when it is written, and that a medium that hangs holds up nothing."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from nixl_tiers.base.manifest import RETRY_S, Description, Manifest
from nixl_tiers.tiers import manifests
from nixl_tiers.tiers.manifests import CHECK_S, CLOSE_S, ManifestKeeper, ManifestMedium
from tests.support.fake_movers import Clock

NAMESPACE = bytes(range(16)).hex()
ABOUT = Description(model="org/model", revision="abc", dtype="bfloat16", vllm="0.32.0", note="test rows")


class Medium(ManifestMedium):
    """`fails`: what each call raises."""

    def __init__(self) -> None:
        self.rows = True
        self.fails: Exception | None = None
        self.raw: bytes | None = None

    def _called(self) -> None:
        if self.fails is not None:
            raise self.fails

    def is_wanted(self) -> bool:
        self._called()
        return self.rows

    def read(self) -> bytes | None:
        self._called()
        return self.raw

    def write(self, raw: bytes) -> bool:
        self._called()
        self.raw = raw
        return True


class Rig:
    def __init__(self) -> None:
        self.medium = Medium()
        self.clock = Clock(1_800_000_000.0)
        self.keeper = ManifestKeeper(4096, "node/1/abcd")
        self.own = Manifest(NAMESPACE, ABOUT.checked(), 4096, 0, "node/1/abcd")

    def step(self, after_s: float = 0.0) -> float | None:
        """The pause that it asks for."""
        self.clock.now += after_s
        return self.keeper.step(self.own, self.medium, self.clock)

    @property
    def written(self) -> Manifest:
        assert self.medium.raw is not None
        found = Manifest.decode(self.medium.raw)
        assert found is not None
        return found


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_it_is_written_as_soon_as_there_are_rows(rig: Rig) -> None:
    rig.medium.rows = False
    assert rig.step() == CHECK_S
    assert rig.medium.raw is None
    rig.medium.rows = True
    assert rig.step(CHECK_S) is None, "it is not written again before the close"
    assert (rig.written.namespace, rig.written.description) == (NAMESPACE, ABOUT)
    assert (rig.written.engine, rig.written.row_bytes) == ("node/1/abcd", 4096)
    assert rig.written.last_used == int(rig.clock.now)


def test_a_medium_that_fails_is_logged_once_and_tried_again(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for error in (OSError(30, "Read-only file system"), ZeroDivisionError(), OSError(30, "Read-only file system")):
        rig.medium.fails = error
        assert rig.step(RETRY_S) == RETRY_S
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "cannot be written (Read-only file system)" in caplog.text
    rig.medium.fails = None
    rig.step(RETRY_S)
    assert rig.written.namespace == NAMESPACE


def test_a_medium_that_hangs_is_left_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    hung = SimpleNamespace(start=lambda: None, join=waited.append, is_alive=lambda: True)
    monkeypatch.setattr(manifests, "threading", SimpleNamespace(Thread=lambda **_: hung))
    rig.keeper.description = ABOUT
    rig.keeper.serve(NAMESPACE, 0, rig.medium, rig.clock)
    assert not rig.keeper.stop(last=True)
    assert waited == [CLOSE_S]
    assert rig.keeper.stop(), "nothing is kept any more"
