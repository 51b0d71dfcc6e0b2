"""Which weights these are, told from what lies on disk: two engines may share KV only if they run the same ones."""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
SAMPLES: Final = 64
SAMPLE_BYTES: Final = 16 << 10
MAX_HEADER_BYTES: Final = 64 << 20
_SNAPSHOT: Final = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})/*$")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


class UnknownWeights(Exception):
    """The weights cannot be told apart from others; the text continues "storage tiers are refused ... because"."""


def identify(model: str, commit: str | None) -> str:
    """A text that is equal for equal weights: the hub snapshot's commit, or a digest of the files in a directory.

    `model` is a directory, a single file or a hub name, `commit` what the engine resolved a hub name to.
    Raises UnknownWeights.
    """
    path = Path(model)
    if path.exists():
        snapshot = _SNAPSHOT.search(str(path.absolute()))
        if snapshot:
            return f"hub:{snapshot[1]}@{snapshot[2]}"
        return f"files:{digest_of_files(path)}"
    if commit and _COMMIT.fullmatch(commit):
        return f"hub:{model.replace('/', '--')}@{commit}"
    raise UnknownWeights(f"neither a directory nor the commit of a hub snapshot is known for the model {model}")


def digest_of_files(path: Path) -> str:
    """A digest over config.json and every weight file's name, header, size and samples of its content.

    Costs about 1 MiB of reading a file, whatever the file's size. Raises UnknownWeights if there is no weight file.
    """
    folder = path if path.is_dir() else path.parent
    files = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise UnknownWeights(f"there is no weight file ({', '.join(SUFFIXES)}) in {folder}")
    digest = hashlib.blake2b(digest_size=16)
    config = folder / "config.json"
    if config.exists():
        digest.update(b"config.json" + hashlib.blake2b(config.read_bytes()).digest())
    try:
        with ThreadPoolExecutor(max_workers=8, thread_name_prefix="nixl_tiers-weights") as pool:
            for file, part in zip(files, pool.map(_digest_of_file, files), strict=True):
                digest.update(file.name.encode() + b"\0" + part)
    except OSError as error:
        raise UnknownWeights(f"a weight file cannot be read: {error}") from None
    return digest.hexdigest()


def _digest_of_file(file: Path) -> bytes:
    digest = hashlib.blake2b()
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        digest.update(size.to_bytes(8, "little"))
        opened.seek(0)
        start = opened.read(SAMPLE_BYTES)
        digest.update(start)
        if file.suffix == ".safetensors":
            # The header names every tensor with its type, shape and place.
            header_bytes = int.from_bytes(start[:8], "little")
            digest.update(opened.read(min(max(header_bytes + 8 - SAMPLE_BYTES, 0), MAX_HEADER_BYTES)))
        last = max(size - SAMPLE_BYTES, 0)
        for place in sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)}):
            opened.seek(place)
            digest.update(opened.read(SAMPLE_BYTES))
    return digest.digest()
