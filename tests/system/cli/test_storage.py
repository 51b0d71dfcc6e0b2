"""`inspect` and `purge` on directories: of closed tiers, and of tiers that are open meanwhile."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Geometry, Outcome, object_name
from nixl_tiers.base.manifest import Description
from nixl_tiers.cli import BAD_INPUT, FAILED, OK, main
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers import manifests
from nixl_tiers.tiers.stored import find_stored
from tests.support.file_tier import file_config, file_tier
from tests.support.times import changed
from tests.support.waiting import until_up
from tests.system.tiers.file_tiers import FileTier, load, make_tier, run_until, store

LAYOUTS = pytest.mark.parametrize("layout", ["slabs", "files"])
NAMESPACE, OTHER = bytes(range(16)), bytes(range(16, 32))
GEOMETRY = Geometry(1, 50_000)
ROWS = 6


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with HostRegion.create(GEOMETRY, 16) as region:
        yield region


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "RETRY_S", 0.01)
    monkeypatch.setattr(manifests, "CHECK_S", 0.01)
    monkeypatch.setattr("nixl_tiers.tiers.slab.stored._PAUSE_S", 0.01)


def now() -> float:
    """As a test may have moved it."""
    return time.time()


@contextmanager
def opened(
    layout: str,
    path: Path,
    region: HostRegion,
    namespace: bytes = NAMESPACE,
    *,
    salt: str = "blue",
    engine: int = 0,
    **fields: Any,
) -> Iterator[FileTier]:
    """A tier with ROWS rows and a manifest, of this process unless another one is given as `engine`."""
    path.mkdir(exist_ok=True)
    tier = make_tier(layout, path, region, times=changed(disk_check_s=0.01), **fields)
    tier._clock = now
    tier.identify(f"{os.uname().nodename}/{engine or os.getpid()}/abcd")
    tier.describe(Description(model="org/model", note="test rows").of(salt))
    try:
        tier.open(namespace, 0)
        for batch in tier.list_rows():
            time.sleep(0.0 if batch else 0.001)
        assert store(tier, region, range(ROWS)) == [Outcome.OK] * ROWS
        run_until(tier, lambda: bool(list(path.rglob(f"{namespace.hex()}/about.json"))))
        yield tier
    finally:
        tier.close()


def write(layout: str, path: Path, region: HostRegion, namespace: bytes = NAMESPACE, salt: str = "blue") -> Path:
    """By an engine that has ended."""
    with opened(layout, path, region, namespace, salt=salt, engine=1 << 30):
        pass
    return path


def run(capsys: pytest.CaptureFixture[str], *given: object) -> tuple[int, Any]:
    """The exit code, and what was printed as JSON, else the error."""
    code = main([*map(str, given), "--json"])
    output = capsys.readouterr()
    return code, json.loads(output.out) if output.out else output.err


def snapshot(path: Path) -> dict[str, tuple[int, int, bytes]]:
    files = {str(each): each.lstat() for each in sorted(path.rglob("*"))}
    return {
        name: (status.st_ino, status.st_mtime_ns, Path(name).read_bytes() if Path(name).is_file() else b"")
        for name, status in files.items()
    }


@LAYOUTS
def test_inspect_verify_and_a_dry_run_change_nothing(
    layout: str, tmp_path: Path, region: HostRegion, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(write(layout, tmp_path / "t", region))
    for command in (["inspect"], ["inspect", "--verify"], ["purge", "--all"], ["purge", "--older-than", "1s"]):
        assert run(capsys, command[0], tmp_path / "t", *command[1:])[0] == OK
    assert snapshot(tmp_path / "t") == before


@LAYOUTS
def test_verify_finds_each_damaged_row_and_deletes_none(
    layout: str, tmp_path: Path, region: HostRegion, capsys: pytest.CaptureFixture[str]
) -> None:
    write(layout, tmp_path, region)
    code, shown = run(capsys, "inspect", "--verify", tmp_path)
    assert (code, shown["namespaces"][0]["ok"], shown["namespaces"][0]["damaged"]) == (OK, ROWS, [])
    victim = next(iter(sorted(tmp_path.rglob("*.row" if layout == "files" else "slab-*.kv"))))
    with victim.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    code, shown = run(capsys, "inspect", "--verify", tmp_path)
    (found,) = shown["namespaces"]
    assert (code, found["ok"], found["corrupt"], found["missing"]) == (FAILED, ROWS - 1, 1, 0)
    assert "not those that were sealed" in found["damaged"][0]["reason"]
    assert victim.exists()
    assert main(["inspect", "--verify", str(tmp_path)]) == FAILED
    assert "1 corrupt" in capsys.readouterr().out


@LAYOUTS
def test_purge_deletes_what_is_chosen_and_proves_it(
    layout: str, tmp_path: Path, region: HostRegion, capsys: pytest.CaptureFixture[str]
) -> None:
    write(layout, tmp_path, region)
    write(layout, tmp_path, region, OTHER, salt="red")
    assert run(capsys, "purge", tmp_path, "--salt", "green", "--yes") == (OK, {"deleted": True, "namespaces": []})
    code, shown = run(capsys, "purge", tmp_path, "--salt", "red", "--yes")
    (report,) = shown["namespaces"]
    assert (code, report["namespace"], report["rows"], report["left"]) == (OK, OTHER.hex(), ROWS, 0)
    assert [each["namespace"] for each in run(capsys, "inspect", tmp_path)[1]["namespaces"]] == [NAMESPACE.hex()]
    assert run(capsys, "inspect", "--verify", tmp_path)[0] == OK
    code, shown = run(capsys, "purge", tmp_path, "--namespace", NAMESPACE.hex()[:10], "--yes")
    assert (code, shown["namespaces"][0]["left"]) == (OK, 0)
    assert run(capsys, "inspect", tmp_path)[1]["namespaces"] == []
    assert not list(tmp_path.rglob("*.row")) + list(tmp_path.rglob("*.kv"))


@LAYOUTS
def test_purge_leaves_what_no_tier_has_made(
    layout: str, tmp_path: Path, region: HostRegion, capsys: pytest.CaptureFixture[str]
) -> None:
    write(layout, tmp_path, region)
    (home,) = [path.parent for path in tmp_path.rglob("about.json")]
    row = object_name(b"another key")
    names = ["notes/my-thesis.row", "ab/my-thesis.row", "0a/notes/draft", f"zz/{row[3:]}.row", f"{row}.bak", "todo.txt"]
    for name in [*names, "empty/x"]:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        if name in names:
            (home / name).write_text("precious")
    for command in (["inspect", "--verify"], ["purge", "--all", "--yes"]):
        code, shown = run(capsys, command[0], tmp_path, *command[1:])
        assert code == OK, shown
    assert (shown["namespaces"][0]["rows"], shown["namespaces"][0]["left"]) == (ROWS, 0)
    left = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
    assert left == {*names}
    assert (home / "empty").is_dir()
    assert run(capsys, "purge", tmp_path, "--all", "--yes")[0] == OK
    assert {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()} == left


def test_purge_refuses_slabs_that_an_engine_holds_and_deletes_free_parts(
    tmp_path: Path, region: HostRegion, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened("slabs", tmp_path, region, replicas=2) as first:
        with opened("slabs", tmp_path, region, OTHER, replicas=2):
            pass
        code, shown = run(capsys, "purge", tmp_path, "--all", "--yes")
        by_name = {report["namespace"]: report for report in shown["namespaces"]}
        assert code == FAILED
        assert by_name[OTHER.hex()]["left"] == 0
        assert not by_name[OTHER.hex()]["refused"]
        refusal = by_name[NAMESPACE.hex()]["refused"]
        assert by_name[NAMESPACE.hex()]["rows"] == by_name[NAMESPACE.hex()]["left"] == ROWS, "what stays is told"
        assert "is held by process" in refusal
        assert str(os.getpid()) in refusal
        assert not list(tmp_path.glob(f"part-*/{OTHER.hex()}"))
        assert main(["purge", str(tmp_path), "--all"]) == FAILED
        assert "nor would it be with --yes" in capsys.readouterr().out
        assert load(first, region, range(ROWS)) == [Outcome.OK] * ROWS


def test_rows_purged_under_an_open_tier_are_misses(
    tmp_path: Path, region: HostRegion, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened("files", tmp_path, region) as tier:
        code, shown = run(capsys, "purge", tmp_path, "--all", "--yes")
        assert (code, shown["namespaces"][0]["left"]) == (OK, 0)
        assert list(tmp_path.rglob("about.json"))  # of the engine that goes on
        assert load(tier, region, range(ROWS)) == [Outcome.MISSING] * ROWS
        assert store(tier, region, range(ROWS)) == [Outcome.OK] * ROWS
        assert load(tier, region, range(ROWS)) == [Outcome.OK] * ROWS


def test_rows_stored_after_a_purge_has_begun_stay(tmp_path: Path, region: HostRegion) -> None:
    with opened("files", tmp_path, region) as tier:
        tier_config = file_config(tmp_path, 1 << 30, layout="files")
        (found,) = find_stored(tier_config, math.inf)
        assert store(tier, region, range(ROWS, ROWS + 2)) == [Outcome.OK] * 2
        found.delete(lambda _: None)
        assert [each.rows for each in find_stored(tier_config)] == [2]
        assert len(list(tmp_path.rglob("*.row"))) == 2


def at_age(path: Path, age_s: float) -> None:
    """All files are as old, and so is what manifests say."""
    then_s = time.time() - age_s
    for about in path.rglob("about.json"):
        about.write_text(json.dumps(json.loads(about.read_text()) | {"last_used": int(then_s)}))
    for file in path.rglob("*"):
        os.utime(file, (then_s, then_s))


@pytest.mark.parametrize("written", ["manifest.journal", "namespace.json", "about.json"])
def test_slabs_are_as_young_as_what_their_engine_wrote_last(
    written: str, tmp_path: Path, region: HostRegion, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was killed, or its manifest could not be written."""
    write("slabs", tmp_path, region)
    at_age(tmp_path, 3 * 3600)
    os.utime(tmp_path / "part-0" / NAMESPACE.hex() / written)
    assert run(capsys, "purge", tmp_path, "--older-than", "1h", "--yes") == (OK, {"deleted": True, "namespaces": []})
    assert list(tmp_path.rglob("*.kv"))


@LAYOUTS
def test_verify_is_right_while_an_engine_overwrites_rows(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real movers, a tier with room for a quarter of the rows: slots and files are replaced all the time."""
    tiers = {
        "tiers": [
            {"type": "cpu", "capacity": "16MiB"},
            file_tier(tmp_path, "4MiB", layout=layout),
        ]
    }
    chunk = 60_000
    with nixl_tiers.open(tiers, chunk, "live", description="overwritten") as engine:
        until_up(engine)
        stop = threading.Event()

        def overwrite() -> None:
            number = 0
            while not stop.is_set():
                keys = [b"key-%d" % (number + i) for i in range(32)]
                engine.put(keys, np.full((32, chunk), number % 251, np.uint8))
                engine.flush(60.0)
                number += 32

        thread = threading.Thread(target=overwrite)
        thread.start()
        try:
            checked = 0
            deadline = time.monotonic() + 60
            while checked < 100:
                assert time.monotonic() < deadline
                code, shown = run(capsys, "inspect", "--verify", tmp_path)
                assert code == OK, shown
                checked += sum(each["ok"] for each in shown["namespaces"])
                assert run(capsys, "inspect", tmp_path)[0] == OK
        finally:
            stop.set()
            thread.join()


def test_commands_of_the_guide_are_right(
    tmp_path: Path, region: HostRegion, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    write("slabs", tmp_path, region)
    (tmp_path / "tiers.yaml").write_text(
        f"tiers: [{{type: cpu, capacity: 1MiB}}, {{type: file, path: {tmp_path}, capacity: 1GiB}}]"
    )
    monkeypatch.chdir(tmp_path)
    guide = Path(__file__).parents[3] / "docs/guide/storage.md"
    commands = [line.split()[1:] for line in guide.read_text().splitlines() if line.startswith("nixl-tiers ")]
    assert len(commands) == 7
    for command in commands:
        here = {"/mnt/nvme/kv": str(tmp_path), "http://127.0.0.1:8333": "http://127.0.0.1:9"}  # no server
        code = main([here.get(word, word) for word in command])
        error = capsys.readouterr().err
        assert (code, error) == (OK, "") or (code == BAD_INPUT and "does not answer" in error), command


# --- what cannot be read or deleted -----------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
def test_purge_follows_no_link_that_was_put_in_a_directory_s_place(
    inside: bool, tmp_path: Path, region: HostRegion
) -> None:
    """By another user, in a directory that all may write to, between the listing and the deletion."""
    victim = write("files", tmp_path / "victim", region)
    kv = write("files", tmp_path / "kv", region)
    (found,) = find_stored(file_config(kv, 1 << 30, layout="files"), math.inf)
    home = Path(NAMESPACE.hex())
    names = [home / each.name for each in (kv / home).iterdir() if each.is_dir()] if inside else [home]
    for name in names:
        (kv / name).rename(tmp_path / name.name)
        (kv / name).symlink_to(victim / name)
    before = snapshot(victim)
    found.delete(lambda _: None)
    assert snapshot(victim) == before
