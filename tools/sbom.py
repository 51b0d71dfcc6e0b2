"""The SBOM of a wheel, as CycloneDX: `python -m tools.sbom WHEEL OUT`, with cyclonedx-py in PATH.

A wheel names its dependencies and contains none. They are listed as this environment has them, which is what the tests
ran with: the packages that the wheel asks for, and what those ask for."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(asked: list[str], extras: frozenset[str]) -> dict[str, metadata.Distribution]:
    """What is installed of `asked`, and of what that needs, by name."""
    found: dict[str, metadata.Distribution] = {}
    todo = [(Requirement(text), extras) for text in asked]
    while todo:
        wanted, of = todo.pop()
        if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in (*of, "")):
            continue
        name = canonicalize_name(wanted.name)
        if name in found and not wanted.extras:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            print(f"not listed, since it is not installed here: {wanted}")
        else:
            todo += [(Requirement(text), frozenset(wanted.extras)) for text in found[name].requires or ()]
    return found


def main(wheel: Path, out: Path) -> None:
    with TemporaryDirectory() as folder:
        venv.create(folder)
        (packages,) = Path(folder).glob("lib/python*/site-packages")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages, [name for name in archive.namelist() if ".dist-info/" in name])
        (ours,) = metadata.distributions(path=[str(packages)])
        name = ours.name
        for dependency in closure(ours.requires or [], frozenset({"cli"})).values():
            described = Path(vars(dependency)["_path"])
            (packages / described.name).symlink_to(described)
        tool = ["cyclonedx-py", "environment", "--output-reproducible", "--output-format", "JSON"]
        made = subprocess.run([*tool, f"{folder}/bin/python"], check=True, capture_output=True, text=True).stdout
    bom = json.loads(made)
    (root,) = (component for component in bom["components"] if component["name"] == name)
    bom["components"].remove(root)
    bom["metadata"]["component"] = root
    out.write_text(json.dumps(bom, indent=1, sort_keys=True) + "\n")
    print(f"{out}: {len(bom['components'])} components")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
