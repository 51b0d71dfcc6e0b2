"""A mount that is no disk, as those of buckets are: a file tier keeps its rows, or says at once what is refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.disks import refusing_mount
from tests.support.file_tier import LAYOUTS
from tests.support.load import get, put
from tests.support.times import open_patient
from tests.support.waiting import until_up

SIZE = 60_000
KEYS = [b"key-%d" % number for number in range(8)]
FOREIGN = "notes.txt"


class Mount(NamedTuple):
    """What it refuses, and what each layout lacks there."""

    refused: dict[str, int]
    slabs: str = ""
    files: str = ""


RENAMED = f"no file can be renamed ({os.strerror(errno.ENOSYS)})"
IN_THE_MIDDLE = "no file can be written in the middle ({})"
MOUNTS = {
    "nothing": Mount({}),
    "rename": Mount({"rename": errno.ENOSYS}, slabs=RENAMED, files=RENAMED),
    "in place": Mount(
        {"in place": errno.EINVAL, "allocate": errno.ENOSYS}, slabs=IN_THE_MIDDLE.format(os.strerror(errno.EINVAL))
    ),
    "in place, not permitted": Mount(
        {"in place": errno.EPERM, "allocate": errno.EOPNOTSUPP}, slabs=IN_THE_MIDDLE.format(os.strerror(errno.EPERM))
    ),
    "direct": Mount({"direct": errno.EINVAL}),
    "allocate": Mount({"allocate": errno.ENOSYS}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mount", MOUNTS)
def test_tier_keeps_its_rows_or_says_what_is_refused(tmp_path: Path, mount: str, layout: str) -> None:
    with refusing_mount(tmp_path, MOUNTS[mount].refused) as disk:
        kept = disk.behind / "kv"
        kept.mkdir(mode=0o700)
        foreign = [disk.behind / FOREIGN, kept / FOREIGN]
        for file in foreign:
            file.write_text("foreign")
        disk_tier = LAYOUTS[layout](disk.place / "kv", 64 << 20)
        config: dict[str, Any] = {"tiers": [{"type": "cpu", "capacity": 4 << 20}, disk_tier]}
        if lacking := getattr(MOUNTS[mount], layout):
            with open_patient(config, SIZE, "n") as store:
                said = store.stats()["file"]
                assert said["problem"].endswith(f"is on a mount that does not work as a disk: {lacking}")
                put(store, KEYS)
                assert store.stats()["file"] | {"up": 0.0, "rows": 0, "full": 0} == store.stats()["file"]
        else:
            with open_patient(config, SIZE, "n") as store:
                until_up(store)
                put(store, KEYS)
                assert store.flush(60)
                file_tier = store.stats()["file"]
                assert (file_tier["problem"], file_tier["rows"]) == ("", len(KEYS))
            with open_patient(config, SIZE, "n") as store:
                until_up(store)
                assert get(store, KEYS) == ([True] * len(KEYS), [])
                assert store.stats()["file"]["hits"] == len(KEYS)
        assert [file.read_text() for file in foreign] == ["foreign", "foreign"]
        assert not list(disk.behind.rglob("probe-*"))
