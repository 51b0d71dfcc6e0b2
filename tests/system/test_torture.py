"""The torture suite's descriptions, results and page agree. It itself is `make torture`."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import moto_server
from tests.support.waiting import until
from tools.torture.__main__ import CELLS, COLUMNS, finished, write
from tools.torture.cells import STEPS
from tools.torture.places import Bucket, Folder, Place, flip, swap
from tools.torture.rig import Models, Run, carry_out, runs, started_by
from tools.torture.sides import SIDES

ROOT = Path(__file__).parents[2]
ROW = 512 << 10


def test_each_cell_has_steps_links_with_states_and_sides() -> None:
    assert list(CELLS) == list(STEPS)
    for cell in CELLS.values():
        assert cell["sides"]
        assert set(cell["sides"]) <= set(SIDES)
        assert all(re.fullmatch(r"\w+#\d+", number) for number, _, _ in cell["links"])
        assert all(kind in ("issue", "RFC", "PR") and state for _, kind, state in cell["links"])


def test_page_says_date_versions_and_commit() -> None:
    result = json.loads((ROOT / "bench/results/torture.json").read_text())
    page = (ROOT / "docs/guide/torture.md").read_text()
    for part in ("date", "versions", "machine"):
        assert result[part]
        assert result[part] in page
    assert all(row[-1] and row[-1] in page for row in result["tables"][0]["rows"])


def test_each_result_has_a_control_that_was_right_with_hits_or_is_no_result() -> None:
    table = json.loads((ROOT / "bench/results/torture.json").read_text())["tables"][0]
    assert table["columns"] == COLUMNS
    for row in (dict(zip(COLUMNS, row, strict=True)) for row in table["rows"]):
        assert row["cell"] in CELLS
        assert row["side"] in CELLS[row["cell"]]["sides"]
        untried = row["class"] == "void" or row["class"].startswith("not run")
        assert untried or (row["control"] == "right" and int(row["hits"].partition(";")[0]) > 0), row


@pytest.mark.parametrize("change", [flip, swap])
def test_change_of_rows_changes_each_of_them(change: object, tmp_path: Path) -> None:
    rows = [tmp_path / f"{number}.bin" for number in range(4)]
    for number, row in enumerate(rows):
        row.write_bytes(bytes([number]) * ROW)
    assert callable(change)
    assert change(Folder(tmp_path)) == 4
    changed = [row.read_bytes() for row in rows]
    assert all(content != bytes([number]) * ROW for number, content in enumerate(changed))
    assert {len(content) for content in changed} == {ROW}


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_what_is_stored_can_be_put_back(kind: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        places: list[Place] = [Folder(tmp_path / "one"), Folder(tmp_path / "other")]
        if kind == "bucket":
            server = stack.enter_context(moto_server())
            places = [Bucket(server, server.make_bucket(name), server.endpoint) for name in ("one", "other")]
        else:
            for folder in ("one", "other"):
                (tmp_path / folder / "a").mkdir(parents=True)
        one, other = places
        rows = [tmp_path / "one/a/1.bin", tmp_path / "one/2.bin"] if kind == "folder" else ["a/1", "2"]
        for number, row in enumerate(rows):
            one.write(row, bytes([number]) * ROW)
        one.keep(tmp_path / "copy")
        other.put_back(tmp_path / "copy")
        assert len(other.rows()) == 2
        assert [one.read(row) for row in one.rows()] == [other.read(row) for row in other.rows()]


def test_processes_of_an_engine_are_found_and_seen_to_outlive_it() -> None:
    shell = subprocess.Popen(["sh", "-c", "sleep 1000 & wait"])
    until(lambda: started_by(shell.pid), "the shell to start sleep")
    (sleep,) = started_by(shell.pid)
    shell.kill()
    shell.wait()
    assert not runs(shell.pid)
    assert runs(sleep)
    os.kill(sleep, signal.SIGKILL)
    until(lambda: not runs(sleep), "sleep to end")


@pytest.mark.parametrize(
    ("fault", "met", "name"), [(True, 1, "right, recomputed"), (True, 0, "void"), (False, 0, "right")]
)
def test_run_that_never_met_its_fault_says_nothing(fault: bool, met: int, name: str, tmp_path: Path) -> None:
    def step(run: Run, fault: bool) -> None:
        run.met = lambda: met

    models = Models(tmp_path / "models")
    (models.folder / "first").mkdir(parents=True)
    about: dict[str, Any] = {"side": SIDES["slabs"], "folder": tmp_path, "base": tmp_path, "models": models}
    assert carry_out(step, fault, 5120 if fault else None, limit_s=1.0, **about).name == name


def test_interrupted_run_goes_on_with_what_its_commit_has_not_measured(tmp_path: Path) -> None:
    def row(cell: str, side: str, **other: object) -> list[object]:
        about = {
            "class": "right",
            "runs": "3 of 3",
            "control": "right",
            "hits": "5; 0, 0, 0",
            "date": "2026-11-28",
            "commit": "a1",
        }
        return [{"cell": cell, "side": side, "seconds": "", "note": "", **about, **other}[name] for name in COLUMNS]

    out = tmp_path / "torture.json"
    write([row("kill-9", "slabs"), row("kill-9", "files", runs="1 of 1")], out)
    write([row("reset", "slabs", commit="b2"), row("reset", "files", **{"class": "void", "control": "error"})], out)
    write(
        [row("dead-mover", "vllm-fs", runs="", **{"class": "n/a"}), row("reset", "vllm-fs", **{"class": "void"})], out
    )
    options = argparse.Namespace(out=out, commit="a1", repeats=3)
    assert finished(options) == {("kill-9", "slabs"), ("dead-mover", "vllm-fs")}
    write([row("kill-9", "slabs", commit="a1-dirty")], out)
    assert not finished(argparse.Namespace(out=out, commit="a1-dirty", repeats=3))
    assert json.loads(out.read_text())["commit"] == "a1, a1-dirty, b2"
