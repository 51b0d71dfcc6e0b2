"""From what a command was given to the places that it means, and what is stored there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer
from pydantic import ValidationError

from nixl_tiers.cli.output import InputError, progress
from nixl_tiers.config import schema
from nixl_tiers.config.schema import FileConfig, S3Config, StorageConfig, TiersConfig
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.disk import INCOMING, SLAB_LOCK
from nixl_tiers.tiers.stored import StoredNamespace, find_stored

Place = Annotated[
    str | None,
    typer.Argument(
        metavar="PATH | s3://BUCKET/PREFIX", help="A file tier's directory, or where an s3 tier's objects are."
    ),
]
Endpoint = Annotated[str | None, typer.Option(metavar="URL", help="The S3 server. By default AWS, or as in --config.")]
ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="FILE", help="A configuration: its storage tiers, or the credentials for a bucket in it."
    ),
]


class NothingThere(InputError):
    """No engine has stored anything at this place yet."""


_ANY: Final = 1 << 40  # of a tier that is only looked at
_WAY: Final = ("endpoint", "region", "profile", "credentials_file", "ca_file")  # to a bucket


def found_at(
    place: str | None, endpoint: str | None, config: str | None, before_s: float | None = None
) -> list[StoredNamespace]:
    """All namespaces there. `before_s`: see `find_stored`. Raises InputError, ConfigError."""
    tiers = [*_tiers(place, endpoint, config)]
    try:
        with progress("listing"):
            return [each for tier in tiers for each in find_stored(tier, before_s)]
    except (TierDown, TierRefused) as error:
        raise InputError(str(error)) from None


def _tiers(place: str | None, endpoint: str | None, config: str | None) -> Iterator[StorageConfig]:
    given = None if config is None else schema.load(config)
    if place is None:
        if given is None:
            raise InputError("give a PATH, s3://BUCKET/PREFIX or --config FILE")
        yield from _configured(given)
    elif place.startswith("s3://"):
        yield _bucket(place, endpoint, given)
    elif endpoint is not None:
        raise InputError("--endpoint: is for s3://BUCKET/PREFIX")
    else:
        yield _directory(FileConfig.model_construct(type="file", path=Path(place).absolute(), capacity=_ANY))


def _configured(given: TiersConfig) -> Iterator[StorageConfig]:
    """Those that commands can look at; others are named on stderr."""
    left_out = [
        f'tier "{name}" cannot be looked at: its type "{tier.type}" has no stored_rows'
        for name, tier in zip(given.names, given.storage, strict=True)
        if not tier.stored_rows
    ]
    found: list[StorageConfig] = []
    for tier in (member for each in given.storage for member in each.members):
        try:
            if tier.stored_rows:
                found.append(_directory(tier) if isinstance(tier, FileConfig) else tier)
        except NothingThere as nothing:
            left_out.append(str(nothing))
    if not found:
        raise InputError("; ".join(left_out) or "there is no storage tier in that configuration")
    for sentence in left_out:
        print(f"nixl-tiers: {sentence}", file=sys.stderr)
    yield from found


def _directory(tier: FileConfig) -> FileConfig:
    """The same with the layout that is there."""
    try:
        with os.scandir(tier.path) as entries:
            names = {entry.name for entry in entries if entry.name in (SLAB_LOCK, INCOMING)}
    except FileNotFoundError:
        raise NothingThere(f"{tier.path} does not exist: an engine makes it when it starts") from None
    except OSError as error:
        raise InputError(f"{tier.path} cannot be read ({error.strerror})") from None
    if not names:
        raise NothingThere(f"{tier.path} was never a file tier's path: it has neither {SLAB_LOCK} nor {INCOMING}")
    return tier.model_copy(update={"layout": "slabs" if SLAB_LOCK in names else "files"})


def _bucket(place: str, endpoint: str | None, given: TiersConfig | None) -> S3Config:
    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    try:
        tier = S3Config.model_validate({"type": "s3", "bucket": bucket, "endpoint": endpoint, "capacity": _ANY})
    except ValidationError as error:
        reason = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise InputError(f"{place}: {reason}") from None
    there = tier.model_copy(update={"prefix": prefix.strip("/")})
    return there if given is None else _as_configured(place, there, given)


def _as_configured(place: str, there: S3Config, given: TiersConfig) -> S3Config:
    """`there` with the server and the credentials of its tier: a bucket of that name may be on several servers."""
    known = [tier for tier in given.storage if isinstance(tier, S3Config) and tier.bucket == there.bucket]
    known = [tier for tier in known if there.endpoint in (None, tier.endpoint)]
    if not known:
        at = f" at {there.endpoint}" if there.endpoint else ""
        raise InputError(f'--config: no tier in it has the bucket "{there.bucket}"{at}')
    own = [tier for tier in known if tier.prefix == there.prefix] or [
        tier for tier in known if tier.shares_place(there.model_copy(update={"endpoint": tier.endpoint}))
    ]
    ways = {tuple(getattr(tier, field) for field in _WAY): tier for tier in own or known}
    if len(ways) > 1:
        tiers = " or ".join(tier.place for tier in ways.values())
        raise InputError(f"{place}: may be of {tiers}; give the --endpoint, or a prefix of one of them")
    return next(iter(ways.values())).model_copy(update={"prefix": there.prefix})
