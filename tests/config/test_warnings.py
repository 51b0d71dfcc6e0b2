"""Mistakes in a valid configuration are warned about, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base import mounts
from nixl_tiers.config import schema, warnings
from nixl_tiers.config.warnings import warnings_here, warnings_of

CPU = {"type": "cpu", "capacity": "64GiB"}
FILE = {"type": "file", "path": "/mnt/nvme/kv", "capacity": "1TiB"}
S3 = {"type": "s3", "bucket": "kv-cache", "capacity": "10TiB"}
AT = S3 | {"endpoint": "https://s3.example:9000"}


MEMORY = warnings._OWN_MEMORY


def warned(*tiers: dict[str, Any], **fields: object) -> list[str]:
    return warnings_of(schema.load({"tiers": list(tiers), **fields}))


@pytest.mark.parametrize(
    "tiers",
    [
        (CPU,),
        (CPU, FILE, AT),
        (CPU, FILE | {"capacity": "64GiB"}),
        (CPU, FILE | {"capacity": "1GiB", "write": "on_evict"}),  # adds to the host
        (CPU, AT | {"capacity": "1GiB", "write": "off"}),  # others fill it
        (CPU, AT, AT | {"endpoint": "https://s3.example:9001"}),
        (CPU, S3, AT),
        (CPU, S3, S3 | {"endpoint": "https://s3.cn-north-1.amazonaws.com.cn"}),  # another AWS
        (CPU, S3 | {"bucket": "minio", "endpoint": "http://minio.default.svc:9000"}),
    ],
)
def test_plausible_configuration_has_no_warning(tiers: tuple[dict[str, Any], ...]) -> None:
    assert warned(*tiers) == []


@pytest.mark.parametrize(
    ("tiers", "starts"),
    [
        ((CPU | {"capacity": 64},), ["tiers[0].capacity: 64 B holds no chunk of a usual model; a number without a un"]),
        ((CPU, AT | {"capacity": "900KiB", "write": "off"}), ["tiers[1].capacity: 900 KiB holds no chunk"]),
        ((CPU, FILE | {"capacity": "63GiB"}), ["tiers[1].capacity: 63 GiB is less than the cpu tier's 64 GiB"]),
        ((CPU, AT, FILE), ["tiers[1]: this s3 tier is searched before the file tier tiers[2]"]),
        ((CPU, FILE | {"path": "/dev/shm/kv"}), ["tiers[1].path: /dev/shm/kv is memory of this machine, not a disk"]),
        ((CPU, FILE | {"path": "/dev/shm/kv", "layout": "files"}), []),
        ((CPU, FILE | {"path": "/proc/kv"}), ["tiers[1].path: /proc/kv is the kernel's, and no place for files"]),
        ((CPU, FILE | {"path": "/"}), ["tiers[1].path: / is the whole machine's: "]),
        ((CPU, FILE | {"path": "/mnt/../sys/kv"}), ["tiers[1].path: /sys/kv is the kernel's"]),
        ((CPU, S3 | {"endpoint": "https://kv-cache.s3.eu-west-1.amazonaws.com"}),
         ['tiers[1].endpoint: names the bucket "kv-cache" too']),
    ],
)  # fmt: skip
def test_mistakes_are_warned_about(tiers: tuple[dict[str, Any], ...], starts: list[str]) -> None:
    lines = warned(*tiers)
    assert len(lines) == len(starts), lines
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)
        assert "\n" not in line


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("https://s3.example", "https://s3.example:443"),
        ("https://s3.example", "http://s3.example"),
        ("http://minio.lan:9000", "http://kv-cache.minio.lan:9000"),
        ("http://localhost:9000", "http://127.0.0.1:9000"),
        (None, "https://kv-cache.s3.eu-central-1.amazonaws.com"),
        ("https://s3.eu-central-1.amazonaws.com", "https://s3.dualstack.eu-central-1.amazonaws.com"),
    ],
)
@pytest.mark.parametrize("prefix", ["nixl-tiers", "nixl-tiers/deeper"])
def test_same_bucket_by_two_endpoints_is_warned_about(one: str | None, other: str, prefix: str) -> None:
    for first, second in ((one, other), (other, one)):
        lines = warned(CPU, S3 | {"endpoint": first}, S3 | {"endpoint": second, "prefix": prefix})
        assert (
            sum(line.startswith("tiers[2].endpoint: is another name for the server of tiers[1]") for line in lines) == 1
        )
        assert warned(CPU, S3 | {"endpoint": first}, S3 | {"endpoint": second, "prefix": "other"}) == [
            line for line in lines if "names the bucket" in line
        ]


@pytest.mark.parametrize(
    ("tiers", "fields", "start"),
    [
        ((CPU, FILE), {"flush_on_exit_s": "10s"}, "flush_on_exit_s: has no effect, because no tier has write"),
        ((CPU, FILE | {"write": "on_evict"}), {"flush_on_exit_s": "10s"}, ""),
        ((CPU, S3, S3 | {"prefix": "other"}), {"probe_s": 0}, "probe_s: 0 is withdrawn for a bucket and for"),
        ((CPU, FILE), {"probe_s": 0}, ""),
        ((CPU, FILE), {"prefill_tokens_per_s": 1}, "prefill_tokens_per_s: with 1 every hit is loaded"),
        ((CPU, FILE), {"prefill_tokens_per_s": 100}, ""),
    ],
)
def test_field_without_effect_is_warned_about(
    tiers: tuple[dict[str, Any], ...], fields: dict[str, Any], start: str
) -> None:
    lines = warned(*tiers, **fields)
    assert [line.startswith(start) for line in lines] == [True] * bool(start)


@pytest.fixture
def here() -> Callable[..., list[str]]:
    return lambda *tiers: warnings_here(schema.load({"tiers": [CPU, *tiers]}))


def test_memory_path_is_found_through_links_and_before_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Callable[..., list[str]]
) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    assert here(FILE | {"path": str(tmp_path / "link" / "kv")}) == [f"tiers[1].path: {tmp_path}/link/kv {MEMORY}"]
    assert here(FILE | {"path": "/dev/shm/kv"}) == [], "known by the path alone"
    assert here(FILE | {"path": str(tmp_path / "link" / "kv"), "layout": "files"}) == [], "which replicas share"
    place = tmp_path / "not" / "yet"
    sentence = f"tiers[1].path: {place} is on tmpfs, which {MEMORY}"
    for kind, lines in (("tmpfs", [sentence]), ("ext4", [])):
        mount = ["1", "0", "0:1", "/", str(tmp_path), "rw", "-", kind, "none", "rw"]
        monkeypatch.setattr(mounts, "_mounts", lambda mount=mount: iter([mount]))
        assert here(FILE | {"path": str(place)}) == lines
        assert here(FILE | {"path": str(place), "layout": "files"}) == []
    assert [path.name for path in tmp_path.iterdir()] == ["link"], "nothing was made"


def test_same_directory_by_two_names_is_warned_about(tmp_path: Path, here: Callable[..., list[str]]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for path in (tmp_path / "link", tmp_path / "link" / "below"):
        lines = here(FILE | {"path": str(tmp_path / "real")}, FILE | {"path": str(path)})
        assert lines == ["tiers[2].path: is another name for the directory of tiers[1], so neither capacity is kept"]
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert here(FILE | {"path": str(tmp_path / "circle")}, FILE | {"path": str(tmp_path / "real")}) == []
