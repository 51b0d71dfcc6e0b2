"""Every cell of docs/comparison.toml has an answer, a version and a source; where we lose is in it."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[1]
CELLS: Final = [
    (f"{feature}: {project}", cell)
    for feature, row in tomllib.loads((ROOT / "docs/comparison.toml").read_text()).items()
    for project, cell in row.items()
]


def test_every_feature_has_a_cell_for_each_project() -> None:
    projects = runpy.run_path(str(ROOT / "docs/generate.py"))["PROJECTS"]
    rows = tomllib.loads((ROOT / "docs/comparison.toml").read_text())
    assert len(rows) >= 14
    assert all(set(row) == set(projects) for row in rows.values())


@pytest.mark.parametrize("cell", [cell for _, cell in CELLS], ids=[name for name, _ in CELLS])
def test_cell_says_what_for_which_version_and_where_that_stands(cell: dict[str, Any]) -> None:
    assert set(cell) <= {"is", "version", "link", "note", "tried"}
    assert cell["is"] in {"yes", "no", "option"}
    assert re.search(r"\d+\.\d+|20\d\d-\d\d", cell["version"]) or cell["version"] in {"unreleased", "development docs"}
    if cell["link"].startswith("https://"):
        assert re.fullmatch(r"https://[\w.-]+/\S+", cell["link"])
    elif cell["link"] == "not found":
        assert cell["is"] == "no"
    else:  # a page of ours: test_docs.py follows the link in the page that is generated
        assert (ROOT / "docs/guide" / cell["link"].partition("#")[0]).is_file()
    assert not cell.get("tried") or not cell["link"].startswith("https://"), "what was tried has figures or tests here"


def test_rows_in_which_we_lose_are_there() -> None:
    rows = tomllib.loads((ROOT / "docs/comparison.toml").read_text())
    lost = {name for name, row in rows.items() if row["ours"]["is"] == "no"}
    assert len(lost) >= 7
    assert all(any(row[other]["is"] != "no" for other in row) for name, row in rows.items() if name in lost)
    assert all(row["ours"]["version"] == "unreleased" for row in rows.values()), "else there is a release to name"
