"""The torture suite's descriptions, results and page agree. It itself is `make torture`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tools.torture.__main__ import CELLS, COLUMNS
from tools.torture.cells import STEPS
from tools.torture.places import Folder, flip, swap
from tools.torture.rig import Models, Run, carry_out
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
