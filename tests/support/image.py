"""docker/Dockerfile without Docker: built by buildah upon a local base, and its containers, as root.

The base has vLLM for CPUs where vllm/vllm-openai has vLLM for GPUs: Debian, its Python, a C compiler, and vLLM in a
virtual environment. It stays in .cache/image (5 GB), as do the wheels, which pip of this machine downloads: the builds
themselves have no package index.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.support import vllm_cpu

ROOT: Final = Path(__file__).parents[2]
PLACE: Final = vllm_cpu.cache_directory() / "image"
WHEELS: Final = PLACE / "wheels"
SUITE: Final = "bookworm"
PYTHON: Final = "3.11"
DEBIAN: Final = f"python{PYTHON},python3,python3-dev,python3-venv,gcc,libc6-dev,libgomp1,libnuma1,ca-certificates"
VENV: Final = "/opt/venv"
PIP: Final = "[global]\nno-index = true\nfind-links = /wheels\ndisable-pip-version-check = true\n"
# vllm-cpu brings CUDA builds of these, which break transformers: as in the Makefile.
UNUSABLE: Final = ("torchvision", "torchaudio", "torchcodec")


def lacking() -> str:
    """Why no image can be built here; empty if one can."""
    if os.geteuid():
        return "needs root"
    programs = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    return f"needs {' and '.join(programs)}" if programs else ""


def buildah(*words: str | Path) -> str:
    """What it prints. Raises CalledProcessError."""
    done = subprocess.run(command(*words), check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return done.stdout.strip()


def command(*words: str | Path) -> list[str]:
    return ["buildah", "--root", str(PLACE / "storage"), "--runroot", str(PLACE / "run"), *map(str, words)]


def pinned(name: str) -> str:
    """A version in the Makefile."""
    (version,) = re.findall(rf"^{name} := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return str(version)


def engine() -> list[str]:
    return [f"torch=={pinned('TORCH')}", f"vllm-cpu=={pinned('VLLM_CPU')}"]


def wheels() -> None:
    """Downloads all that the base and the image install, unless it is there: vLLM, what we need, and what builds us."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    ours = [*project["project"]["dependencies"], *extras["cu13"], *project["build-system"]["requires"]]
    words = ["--python-version", PYTHON, "--only-binary", ":all:", *engine(), *ours]
    whole = WHEELS / "whole"
    if not whole.exists() or whole.read_text() != str(words):
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(WHEELS), *words], check=True)
        whole.write_text(str(words))


def base() -> str:
    """The name of the base image, which is built if it is not there."""
    name = f"localhost/vllm-cpu:{pinned('VLLM_CPU')}"
    if name in buildah("images", "--format", "{{.Name}}:{{.Tag}}").splitlines():
        return name
    container = buildah("from", "scratch")
    try:
        root = Path(buildah("mount", container))
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={DEBIAN}", SUITE, str(root)], check=True)
        shutil.rmtree(root / "var/cache/apt")
        _install_vllm(container, root)
        buildah("config", "--env", f"PATH={VENV}/bin:/usr/bin:/bin", container)
        buildah("config", "--entrypoint", '["vllm", "serve"]', container)  # as in vllm/vllm-openai
        buildah("commit", "--quiet", container, name)
    finally:
        buildah("rm", container)
    return name


def _install_vllm(container: str, root: Path) -> None:
    """As tests/support/vllm_cpu.py runs it, which stands for vLLM's command."""
    run(container, ["python3", "-m", "venv", VENV])
    python = f"{VENV}/bin/python"
    run(container, [python, "-m", "pip", "install", "--quiet", "--no-compile", *engine()], _pip())
    run(container, [python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNUSABLE])
    packages = root / VENV[1:] / f"lib/python{PYTHON}/site-packages"
    shutil.copy(vllm_cpu.__file__, packages)
    script = "import pathlib, vllm_cpu; print(vllm_cpu._metadata_only(pathlib.Path('/tmp')))"
    found = run(container, [python, "-c", script])
    for info in (root / found[1:]).iterdir():
        shutil.move(info, packages)
    (root / VENV[1:] / "bin/vllm").write_text(f'#!/bin/sh\nexec {python} -m vllm_cpu "$@"\n')


def _pip() -> dict[Path, str]:
    file = PLACE / "pip.conf"
    file.write_text(PIP)
    return {WHEELS: "/wheels:ro", file: "/etc/pip.conf:ro"}


def build(version: str) -> str:
    """The image of docker/Dockerfile upon the base, made by buildah with the words of the guide."""
    wheels()
    (words,) = re.findall(r"^docker build (.*)$", (ROOT / "docs/guide/deploy.md").read_text(), re.MULTILINE)
    *options, context = shlex.split(words)
    volumes = [word for host, inside in _pip().items() for word in ("--volume", f"{host}:{inside}")]
    given = [word for each in (f"BASE={base()}", f"VERSION={version}") for word in ("--build-arg", each)]
    buildah("bud", "--isolation", "chroot", "--quiet", *options, *volumes, *given, context)
    return f"localhost/{options[options.index('-t') + 1]}"


def run(container: str, words: Sequence[str], volumes: Mapping[Path, str] | None = None, **options: str) -> str:
    """What a command in a container prints."""
    done = subprocess.run(
        run_command(container, words, volumes or {}, **options), check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def run_command(
    container: str, words: Sequence[str], volumes: Mapping[Path, str], user: str = "root", **env: str
) -> list[str]:
    """In this machine's network and by chroot: as little of a container as there can be."""
    where = [word for host, inside in volumes.items() for word in ("--volume", f"{host}:{inside}")]
    env_words = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    return command("run", "--isolation", "chroot", "--user", user, *where, *env_words, container, "--", *words)


def entry_point(container: str) -> list[str]:
    config: Any = json.loads(buildah("inspect", container))["OCIv1"]["config"]
    return list(config["Entrypoint"])
