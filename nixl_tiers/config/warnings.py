"""Warnings about configurations that are valid but surely wrong: one sentence each, beginning with the field's name.

`warnings_of` needs the configuration only. `warnings_here` also reads files of this machine; it changes nothing.
Neither uses the network.
"""

from __future__ import annotations

import configparser
import os
import shlex
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from nixl_tiers.base.mounts import memory_at
from nixl_tiers.config import source as config_source
from nixl_tiers.config.schema import CpuConfig, FileConfig, S3Config, TiersConfig, Write, format_size

# Smaller than a chunk of any model in use.
LEAST_BYTES: Final = 1 << 20
_LEAST_PREFILL: Final = 10  # tokens/s; slower is no engine
_MEMORY_PATHS: Final = (Path("/dev/shm"),)  # noqa: S108 - compared only
_KERNEL_PATHS: Final = (Path("/proc"), Path("/sys"), Path("/dev"))
_LOOPBACK: Final = {"localhost", "127.0.0.1", "::1"}
_ROOT: Final = (
    "is the whole machine's: every file of it would be measured, and counts towards the capacity; name a directory for "
    "the tier alone"
)
_OWN_MEMORY: Final = (
    "is memory of this machine, not a disk; chunks in memory belong to the cpu tier, or, for all replicas of a node, "
    "to a file tier with layout: files"
)


def warnings_of(config: TiersConfig) -> list[str]:
    return [
        *_tiny(config),
        *_smaller_than_cpu(config),
        *_s3_before_file(config),
        *_unfit_paths(config),
        *_bucket_in_endpoint(config),
        *_same_bucket(config),
        *_no_effect(config),
        *_trial(config),
    ]


def warnings_given(config: TiersConfig, source: Mapping[str, Any] | str | Path) -> list[str]:
    """Of what it was loaded from, which may say by which connector vLLM uses it."""
    if config.quotas and config_source.connector_of(source) == config_source.CONNECTORS[0]:
        return [
            f"quotas: have no effect with {config_source.CONNECTORS[0]}: use kv_connector {config_source.CONNECTORS[1]}"
        ]
    return []


def warnings_here(config: TiersConfig) -> list[str]:
    return [*_memory_mounts(config), *_same_directory(config), *_missing_profiles(config)]


def _tiny(config: TiersConfig) -> Iterator[str]:
    for i, tier in enumerate(config.tiers):
        if tier.capacity < LEAST_BYTES:
            unit = '; a number without a unit is bytes: did you mean "64GiB"?' if tier.capacity < 1 << 16 else ""
            yield f"tiers[{i}].capacity: {format_size(tier.capacity)} holds no chunk of a usual model{unit}"


def _smaller_than_cpu(config: TiersConfig) -> Iterator[str]:
    for i, tier in enumerate(config.tiers):
        if not isinstance(tier, CpuConfig) and tier.write is Write.THROUGH and tier.capacity < config.cpu.capacity:
            yield (
                f"tiers[{i}].capacity: {format_size(tier.capacity)} is less than the cpu tier's "
                f"{format_size(config.cpu.capacity)}, so until a restart all that it holds is in host memory too; "
                "make it larger"
            )


def _s3_before_file(config: TiersConfig) -> Iterator[str]:
    files = [i for i, tier in enumerate(config.tiers) if isinstance(tier, FileConfig)]
    for i, tier in enumerate(config.tiers):
        if isinstance(tier, S3Config) and files and files[-1] > i:
            behind = next(j for j in files if j > i)
            yield (
                f"tiers[{i}]: this s3 tier is searched before the file tier tiers[{behind}]; tiers are searched in the "
                "order of the list, so put the nearer one first"
            )


def _unfit_paths(config: TiersConfig) -> Iterator[str]:
    for i, member in _members(config):
        if what := _unfit(member.path, member):
            yield f"tiers[{i}].path: {member.path} {what}"


def _members(config: TiersConfig) -> list[tuple[int, FileConfig]]:
    """Of file tiers, by their directories."""
    files = [(i, tier) for i, tier in enumerate(config.tiers) if isinstance(tier, FileConfig)]
    return [(i, member) for i, tier in files for member in tier.members]


def _unfit(path: Path, member: FileConfig) -> str:
    """Memory that replicas share is as good as a directory of a server; as slabs it would be one engine's."""
    if path.parent == path:
        return _ROOT
    if any(path.is_relative_to(place) for place in _MEMORY_PATHS):
        return _OWN_MEMORY if member.layout == "slabs" else ""
    if any(path.is_relative_to(place) for place in _KERNEL_PATHS):
        return "is the kernel's, and no place for files"
    return ""


def _bucket_in_endpoint(config: TiersConfig) -> Iterator[str]:
    for i, tier in enumerate(config.tiers):
        if isinstance(tier, S3Config) and tier.endpoint:
            host = urlsplit(tier.endpoint).hostname or ""
            if host.startswith((f"{tier.bucket.lower()}.s3.", f"{tier.bucket.lower()}.s3-")):
                yield f'tiers[{i}].endpoint: names the bucket "{tier.bucket}" too; leave it out of the host name'


def _same_bucket(config: TiersConfig) -> Iterator[str]:
    tiers = [(i, tier) for i, tier in enumerate(config.tiers) if isinstance(tier, S3Config)]
    for (i, one), (j, other) in combinations(tiers, 2):
        nested = f"{one.prefix}/".startswith(f"{other.prefix}/") or f"{other.prefix}/".startswith(f"{one.prefix}/")
        if one.bucket == other.bucket and nested and _server(one) == _server(other):
            yield (
                f"tiers[{j}].endpoint: is another name for the server of tiers[{i}], so both tiers use the same place "
                f'in bucket "{one.bucket}" and neither capacity is kept; keep one, or give each its own prefix'
            )


def _server(tier: S3Config) -> str:
    """An identity of the server, from names alone: without a bucket in the host name, one name for AWS."""
    if tier.endpoint is None:
        return "aws-cn" if (tier.region or "").startswith("cn-") else "aws"
    parts = urlsplit(tier.endpoint)
    host = (parts.hostname or "").rstrip(".")
    if host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return "aws-cn" if host.endswith(".cn") else "aws"
    host = "localhost" if host in _LOOPBACK else host.removeprefix(f"{tier.bucket.lower()}.")
    usual = {"http": 80, "https": 443}[parts.scheme]
    return f"{host}:{parts.port}" if parts.port not in (None, usual) else host


def _no_effect(config: TiersConfig) -> Iterator[str]:
    if config.flush_on_exit_s and all(tier.write is not Write.ON_EVICT for tier in config.storage):
        yield "flush_on_exit_s: has no effect, because no tier has write: on_evict"
    if not config.probe_s and any(tier.asked for tier in config.storage):
        yield (
            "probe_s: 0 is withdrawn for a bucket and for layout: files, which are not listed: only what this engine "
            "stored itself, since it started, is found there"
        )


# --- on this machine -------------------------------------------------------------------------------------------


def _trial(config: TiersConfig) -> Iterator[str]:
    if (speed := config.prefill_tokens_per_s) is not None and speed < _LEAST_PREFILL:
        yield f"prefill_tokens_per_s: with {speed} every hit is loaded, however slow its tier is: for trials only"


def _memory_mounts(config: TiersConfig) -> Iterator[str]:
    for i, member in _members(config):
        if not _unfit(member.path, member):
            real = _real(member.path)
            kind = memory_at(real) if member.layout == "slabs" else ""
            if what := _unfit(real, member) or (f"is on {kind}, which {_OWN_MEMORY}" if kind else ""):
                yield f"tiers[{i}].path: {member.path} {what}"


def _same_directory(config: TiersConfig) -> Iterator[str]:
    tiers = [(i, _real(member.path)) for i, member in _members(config)]
    for (i, one), (j, other) in combinations(tiers, 2):
        if one.is_relative_to(other) or other.is_relative_to(one):
            yield f"tiers[{j}].path: is another name for the directory of tiers[{i}], so neither capacity is kept"


def _missing_profiles(config: TiersConfig) -> Iterator[str]:
    for i, tier in enumerate(config.tiers):
        if isinstance(tier, S3Config) and tier.profile is not None and tier.profile not in _profiles():
            files = " nor ".join(str(path) for path in _aws_files())
            yield f'tiers[{i}].profile: there is no profile "{tier.profile}" in {files}'


def _real(path: Path) -> Path:
    """Resolve links; parts that do not exist stay as written."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return path


def _aws_files() -> tuple[Path, Path]:
    return (
        _expanded(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config"),
        _expanded(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"),
    )


def _expanded(path: str) -> Path:
    return Path(os.path.expanduser(path))  # noqa: PTH111 - no error for a user without a home directory, like botocore


def _profiles() -> set[str]:
    """Profile names in AWS's two files, found as botocore does: this process must not import it."""
    profiles: set[str] = set()
    for path, named in zip(_aws_files(), (True, False), strict=True):
        parser = configparser.RawConfigParser(default_section="", strict=False)
        try:
            parser.read(path, encoding="utf-8")
            for section in parser.sections():
                words = shlex.split(section) if named else [section]
                if not named or words == ["default"]:
                    profiles.update(words)
                elif len(words) == 2 and words[0] == "profile":
                    profiles.add(words[1])
        except (configparser.Error, ValueError):
            continue
    return profiles
