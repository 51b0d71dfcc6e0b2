"""Where the tests' file tiers come from."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
OPENS_NONE = (
    HERE / "config",
    HERE / "cli/test_config_schema.py",
    HERE / "cli/test_main.py",
    HERE / "runtime/test_here.py",
    HERE / "system/vllm/test_fleet_numbers.py",
    Path(__file__),
)


def test_file_tiers_of_tests_store_on_a_nearly_full_disk() -> None:
    """tests/support/file_tier.py makes them with `min_free`, 0 unless it is what is tested. Without it each test that
    waits for a row fails where less than 5 % of the disk is free, and nowhere else."""
    files = [path for path in HERE.rglob("*.py") if not {path, *path.parents} & {*OPENS_NONE}]
    lines = [(path, line) for path in files for line in path.read_text().splitlines()]
    default = [
        each for each in lines if re.search(r'"type": "file"|type="file"', each[1]) and "min_free" not in each[1]
    ]
    assert default == []
