"""README and guide: examples are read without a warning, quoted lines are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.test_guide import ROOT


def test_python_example_runs_when_pasted(tmp_path: Path) -> None:
    """As it is printed, but for the directory and the sizes."""
    page = (ROOT / "docs/reference/python-api.md").read_text()
    (code,) = re.findall(r"```python\n(import .*?)```", page, re.DOTALL)
    code, changed = re.subn(
        r'"/[\w/]+", "capacity": "10GiB"', f'"{tmp_path}/kv", "capacity": "64MiB", "min_free": 0', code
    )
    assert changed == 1
    names: dict[str, Any] = {}
    exec(code.replace('"1GiB"', '"16MiB"'), names)
    assert names["found"] == len(names["keys"])
    assert names["hits"] == [True] * len(names["keys"])
