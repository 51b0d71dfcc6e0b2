"""From what a command was given to the places that it means."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from nixl_tiers.cli.output import InputError
from nixl_tiers.cli.storage.base import Storage
from nixl_tiers.config import schema
from nixl_tiers.config.schema import FileConfig, S3Config, TiersConfig

# The implementations are imported where they are needed: with NIXL and boto3, which other commands must not wait for.

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


def storages(place: str | None, endpoint: str | None, config: str | None) -> list[Storage]:
    """Raises InputError, ConfigError, Unusable."""
    tiers = None if config is None else schema.load(config)
    if place is None:
        if tiers is None:
            raise InputError("give a PATH, s3://BUCKET/PREFIX or --config FILE")
        found = [storage for tier in tiers.storage if (storage := _of_tier(tier)) is not None]
        if not found:
            raise InputError("there is no file or s3 tier in that configuration")
        return found
    if place.startswith("s3://"):
        return [_s3(place, endpoint, tiers)]
    if endpoint is not None:
        raise InputError("--endpoint: is for s3://BUCKET/PREFIX")
    return [_directory(Path(place))]


def _of_tier(tier: object) -> Storage | None:
    if isinstance(tier, FileConfig):
        return _directory(tier.path)
    return _bucket(tier, tier.prefix) if isinstance(tier, S3Config) else None


def _directory(path: Path) -> Storage:
    from nixl_tiers.cli.storage.rowfiles import RowFileStorage
    from nixl_tiers.cli.storage.slabs import SlabStorage
    from nixl_tiers.tiers.disk import INCOMING, SLAB_LOCK

    try:
        with os.scandir(path) as entries:
            names = {entry.name for entry in entries if entry.name in (SLAB_LOCK, INCOMING)}
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: an engine makes it when it starts") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    if SLAB_LOCK in names:
        return SlabStorage(path.absolute())
    if INCOMING in names:
        return RowFileStorage(path.absolute())
    raise InputError(f"{path} was never a file tier's path: it has neither {SLAB_LOCK} nor {INCOMING}")


def _s3(place: str, endpoint: str | None, tiers: TiersConfig | None) -> Storage:
    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    known = [tier for tier in tiers.storage if isinstance(tier, S3Config) and tier.bucket == bucket] if tiers else []
    if tiers is not None and not known:
        raise InputError(f'--config: no tier in it has the bucket "{bucket}"')
    if known and endpoint is None:
        return _bucket(known[0], prefix)
    try:
        config = S3Config.model_validate({"type": "s3", "bucket": bucket, "endpoint": endpoint, "capacity": 1 << 40})
        if known:
            config = known[0].model_copy(update={"endpoint": config.endpoint})
    except ValidationError as error:
        reason = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise InputError(f"{place}: {reason}") from None
    return _bucket(config, prefix)


def _bucket(config: S3Config, prefix: str) -> Storage:
    from nixl_tiers.cli.storage.s3 import S3Storage

    return S3Storage(config, prefix)
