"""What kubectl makes of docker/kubernetes/."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[2]
KUBERNETES: Final = ROOT / "docker/kubernetes"
NAMES: Final = ("base", "hostpath", "ephemeral", "retained", "monitoring", "routing")


def folder(name: str) -> Path:
    return KUBERNETES / name if name == "base" else KUBERNETES / "overlays" / name


def kubectl() -> str:
    """The program; skips the test where it is missing."""
    found = shutil.which("kubectl")
    if found is None:
        pytest.skip("needs kubectl")
    return found


def render(place: Path) -> list[dict[str, Any]]:
    """The objects of a kustomization. Asks no cluster. Raises CalledProcessError."""
    return parts(_render(place))


def rendered(name: str) -> list[dict[str, Any]]:
    """The objects of one of `NAMES`: a copy for each caller, and kubectl runs once."""
    return parts(_render_once(folder(name)))


def parts(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def _render(place: Path) -> str:
    command = [kubectl(), "kustomize", str(place)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


_render_once: Final = cache(_render)
