"""KV events: what routers are told of a manager's tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, OffloadingEvent

from nixl_tiers.vllm import compat, events
from nixl_tiers.vllm.connector import NixlTiersConnector
from tests.support.file_tier import file_tier
from tests.support.waiting import until
from tests.vllm.test_manager import GEOMETRY, ROWS, STEP, ManagerRig, keys_of

HOST, FILE = (Medium.CPU, None, None), (Medium.STORAGE, "file", Locality.LOCAL)


class FileRig(ManagerRig):
    """With a file tier, whose writes a test waits for."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        super().__init__(storage=[file_tier(folder, 64 * GEOMETRY.row_bytes)], **fields)
        until(lambda: self.coordinator.wait_ready(1.0), "the file tier")

    def told(self) -> list[tuple[tuple[Medium, str | None, Locality | None], bool, list[bytes]]]:
        taken = list(self.manager.take_events())
        assert all(event.removal_expected for event in taken), "vLLM would forget the tokens before the removal"
        return [((each.medium, each.ownership, each.locality), each.removed, each.keys) for each in taken]

    def flush(self) -> None:
        until(lambda: self.coordinator.flush(1.0), "writes")

    def find(self, name: str, *keys: bytes) -> None:
        """A request that comes back until it has found these keys."""
        context = self.request(name, *keys)

        def found() -> bool:
            answers = [self.manager.lookup(key, context) for key in keys]
            if answers == [LookupResult.HIT] * len(keys):
                return True
            self.manager.on_schedule_end(STEP)
            return False

        until(found, "hits")
        self.manager.on_schedule_end(STEP)
        self.manager.on_request_finished(context)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[FileRig]:
    rig = FileRig(tmp_path / "kv")
    yield rig
    rig.manager.shutdown()


def test_a_chunk_is_announced_once_in_each_tier_and_removed_once(rig: FileRig) -> None:
    old, new = keys_of(ROWS), keys_of(ROWS, first=100)
    rig.store(rig.request("r", *old), *old)
    rig.flush()
    assert rig.told() == [(HOST, False, old), (FILE, False, old)]
    rig.find("again", *old)
    assert rig.told() == []
    rig.store(rig.request("s", *new), *new)
    rig.flush()
    stored, on_disk, (place, removed, gone) = rig.told()
    assert (stored, on_disk) == ((HOST, False, new), (FILE, False, new))
    assert (place, removed, set(gone)) == (HOST, True, set(old))
    rig.find("found", old[0])
    assert (HOST, False, [old[0]]) in rig.told()


def test_what_was_stored_before_the_start_is_announced_when_it_is_found(rig: FileRig, tmp_path: Path) -> None:
    keys = keys_of(2)
    rig.store(rig.request("r", *keys), *keys)
    rig.flush()
    rig.manager.shutdown()
    again = FileRig(tmp_path / "kv")
    assert again.told() == []
    again.find("r", *keys)
    assert again.told() == [(HOST, False, keys), (FILE, False, keys)]
    again.manager.shutdown()


@pytest.mark.parametrize("on_reset", ["new_epoch", "keep"])
def test_a_reset_removes_all_and_what_stays_is_announced_anew(tmp_path: Path, on_reset: str) -> None:
    rig = FileRig(tmp_path / "kv", on_reset=on_reset)
    keys = keys_of(2)
    rig.store(rig.request("r", *keys), *keys)
    rig.flush()
    rig.told()
    rig.manager.reset_cache()
    assert rig.told() == [(HOST, True, keys), (FILE, True, keys)]
    if on_reset == "keep":
        rig.find("later", *keys)
        assert rig.told() == [(HOST, False, keys), (FILE, False, keys)]
    rig.manager.shutdown()


def test_connector_takes_removals_before_vllm_forgets_what_the_chunks_are(
    rig: FileRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(2)
    rig.store(rig.request("r", *keys), *keys)
    rig.told()
    connector = object.__new__(NixlTiersConnector)
    connector._withdrawn = []
    forgotten: list[bool] = []

    def reset() -> None:
        rig.manager.reset_cache()
        forgotten.append(True)

    def take() -> list[tuple[bool, OffloadingEvent]]:
        return [(bool(forgotten), event) for event in rig.manager.take_events()]

    connector.connector_scheduler = SimpleNamespace(  # type: ignore[assignment]
        manager=rig.manager, reset_cache=reset, take_events=take
    )
    monkeypatch.setattr(NixlTiersConnector, "_manager", lambda self: rig.manager)
    assert connector.reset_cache()
    assert connector.reset_cache(), "a second one before the next step"
    first, *_ = taken = list(connector.take_events())
    assert not any(late for late, _ in taken), "vLLM has forgotten what they are"
    assert (first[1].removed, first[1].keys) == (True, keys)
    assert list(connector.take_events()) == []


def test_versions_that_cannot_say_where_announce_host_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "STORAGE_EVENTS", False)
    rig = FileRig(tmp_path / "kv")
    keys = keys_of(2)
    rig.store(rig.request("r", *keys), *keys)
    rig.flush()
    assert list(rig.manager.take_events()) == [OffloadingEvent(keys, Medium.CPU, False)]
    rig.manager.shutdown()


def test_tokens_that_vllm_keeps_for_storage_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_TOKENS", 3 * 64)
    rig = FileRig(tmp_path / "kv")
    old, new = keys_of(2), keys_of(2, first=100)
    for name, keys in (("old", old), ("new", new)):
        rig.store(rig.request(name, *keys), *keys)
        rig.flush()
        told = rig.told()
    assert (FILE, True, old[:1]) in told
    rig.manager.shutdown()
