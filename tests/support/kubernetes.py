"""What kubectl makes of docker/kubernetes/, and the recorded renderings: `python -m tests.support.kubernetes` writes
them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
KUBERNETES: Final = ROOT / "docker/kubernetes"
RECORDED: Final = ROOT / "tests/rendered"
NAMES: Final = ("base", "hostpath", "ephemeral", "retained", "monitoring", "routing")


def folder(name: str) -> Path:
    return KUBERNETES / name if name == "base" else KUBERNETES / "overlays" / name


def kubectl() -> str | None:
    return shutil.which("kubectl")


def render(program: str, place: Path) -> str:
    """YAML. Asks no cluster. Raises CalledProcessError."""
    command = [program, "kustomize", str(place)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def parts(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def recorded(name: str) -> list[dict[str, Any]]:
    return parts((RECORDED / f"{name}.yaml").read_text())


if __name__ == "__main__":
    found = kubectl()
    assert found, "needs kubectl"
    RECORDED.mkdir(exist_ok=True)
    for each in NAMES:
        (RECORDED / f"{each}.yaml").write_text(render(found, folder(each)))
