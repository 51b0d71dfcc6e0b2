"""The identity of the weights, from the files on disk: two engines may share KV only if they run the same ones."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Final

SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
WHOLE_BYTES: Final = 256 << 10  # tensors of up to this size are hashed whole
SAMPLE_BYTES: Final = 4 << 10
STRIDE_BYTES: Final = 1 << 20  # larger tensors: a sample at both ends and one in every stride
READ_BYTES: Final = 4 << 20
MAX_HEADER_BYTES: Final = 64 << 20
THREADS: Final = 8
_SNAPSHOT: Final = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})/*$")
_SPLIT: Final = re.compile(r"(.*)-\d{5}(-of-\d{5}\.\w+)")  # one of several files that are named by any of them
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


class UnknownWeights(Exception):
    """The weights cannot be identified; the text continues "storage tiers are refused ... because"."""


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


def resolved_commit(model: str, revision: str | None, config_commit: str | None, cache: str | None) -> str | None:
    """The commit of a hub model that was loaded as `revision` (a commit, branch or tag; None is the default branch).

    `config_commit`: the commit that the model's configuration came from, if it is from the same repository as the
    weights. `cache`: the folder that weights are downloaded to, None for the hub's own; for another folder, its
    own reference takes precedence, because the configuration does not come from there.
    """
    if revision and _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(cache or HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "refs"
    try:
        local = (folder / (revision or "main")).read_text().strip()
    except (OSError, ValueError):
        local = ""
    return (local or config_commit) if cache else (config_commit or local)


def digest_of_files(path: Path) -> str:
    """A digest over config.json, what prepares images and sounds (`*processor_config.json`), and every weight file's
    name, size, header and content, most of it sampled.

    Of a safetensors file every tensor is hashed: whole up to WHOLE_BYTES, of larger ones SAMPLE_BYTES in each
    STRIDE_BYTES and at both ends. So a tensor that has changed throughout is always detected, and so is a matrix of two
    strides within a larger tensor. Zip archives (PyTorch's own format) contain a checksum of each tensor; all other
    files are sampled every STRIDE_BYTES. Raises UnknownWeights if there is no weight file.
    """
    folder = path if path.is_dir() else path.parent
    split = _SPLIT.fullmatch(path.name)
    if path.is_dir():
        files = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)
    elif split:
        others = ((_SPLIT.fullmatch(file.name), file) for file in folder.iterdir())
        files = sorted(file for match, file in others if match and match.groups() == split.groups())
    else:
        files = [path]
    if not files:
        raise UnknownWeights(f"there is no weight file ({', '.join(SUFFIXES)}) in {folder}")
    digest = hashlib.blake2b(digest_size=16)
    try:
        for config in (folder / "config.json", *sorted(folder.glob("*processor_config.json"))):
            if config.exists():
                digest.update(config.name.encode() + hashlib.blake2b(config.read_bytes()).digest())
        with ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="nixl_tiers-weights") as pool:
            for file, part in zip(files, pool.map(_digest_of_file, files), strict=True):
                digest.update(file.name.encode() + b"\0" + part)
    except OSError as error:
        raise UnknownWeights(f"a file of the model cannot be read: {error}") from None
    return digest.hexdigest()


def _digest_of_file(file: Path) -> bytes:
    digest = hashlib.blake2b()
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        digest.update(size.to_bytes(8, "little"))
        if file.suffix == ".safetensors":
            header = _header(descriptor, size)
            digest.update(header)  # names every tensor with its type, shape and place
            places = _tensors(header, size)
        else:
            digest.update(_checksums(file))
            places = [0, size]
        for start, end in _extents(places):
            digest.update(os.pread(descriptor, end - start, start))
    finally:
        os.close(descriptor)
    return digest.digest()


def _header(descriptor: int, size: int) -> bytes:
    """A safetensors file's header with its length; empty if it has none."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    return os.pread(descriptor, 8 + length, 0) if length <= min(size, MAX_HEADER_BYTES) else b""


def _tensors(header: bytes, size: int) -> list[int]:
    """Where the tensors of a safetensors file begin and end; without a header, the file."""
    try:
        fields = json.loads(header[8:])
        offsets = [field["data_offsets"] for name, field in fields.items() if name != "__metadata__"]
        places = {len(header) + int(at) for pair in offsets for at in pair}
    except (ValueError, TypeError, KeyError, AttributeError):
        places = set()
    return sorted(place for place in places | {len(header), size} if len(header) <= place <= size)


def _checksums(file: Path) -> bytes:
    """Name, size and CRC-32 of each member of a zip archive; nothing of another file."""
    try:
        with zipfile.ZipFile(file) as archive:
            return repr([(one.filename, one.file_size, one.CRC) for one in archive.infolist()]).encode()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return b""


def _extents(places: Iterable[int]) -> Iterator[tuple[int, int]]:
    """What to read of pieces that follow each other: (start, end), none longer than READ_BYTES."""
    begun = end = 0  # neighbours are read together: a file may have a hundred thousand small tensors
    for start, stop in sampled(places):
        if start > end or stop - begun > READ_BYTES:
            if end > begun:
                yield begun, end
            begun = start
        end = stop
    if end > begun:
        yield begun, end


def sampled(places: Iterable[int]) -> Iterator[tuple[int, int]]:
    for start, stop in pairwise(places):
        if stop - start <= WHOLE_BYTES:
            yield start, stop
            continue
        last = stop - SAMPLE_BYTES
        for place in range(start, last, STRIDE_BYTES):
            yield place, min(place + SAMPLE_BYTES, last)
        yield last, stop
