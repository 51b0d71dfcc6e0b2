"""A library that is missing, broken or of another build is never called: one sentence names it, and what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import nixl_tiers
from nixl_tiers.base import native
from nixl_tiers.base.native import ALL, Library, NotBuilt


def test_all_that_is_built_is_required_and_there() -> None:
    package = Path(nixl_tiers.__file__).parent
    names = re.findall(r'^ {8}native\("([\w.]+)"', (package.parent / "setup.py").read_text(), re.MULTILINE)
    assert {library.path for library in ALL} == {str(package / f"{name.replace('.', '/')}.abi3.so") for name in names}
    native.require()


@pytest.mark.parametrize("library", ALL, ids=lambda library: Path(library.path).name)
@pytest.mark.parametrize("problem", ["missing", "broken", "another library", "another version"])
def test_one_that_cannot_be_used_refuses_the_start(
    library: Library, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").write_bytes(b"\x7fELF but no more")
    others = {
        "missing": {"path": str(tmp_path / "missing")},
        "broken": {"path": str(tmp_path / "broken")},
        "another library": {"function": "nixl_tiers_other_abi"},
        "another version": {"abi": library.abi + 1},
    }
    changed = library._replace(**others[problem])
    monkeypatch.setattr(native, "ALL", tuple(changed if each == library else each for each in ALL))
    with pytest.raises(NotBuilt) as refused:
        native.require()
    assert changed.path in str(refused.value)
    assert str(refused.value).endswith(": install nixl_tiers again, as a wheel or with a C compiler")
