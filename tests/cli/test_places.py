"""From what `inspect` and `purge` were given to the places that they look at."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nixl_tiers.cli.output import InputError
from nixl_tiers.cli.places import _tiers
from nixl_tiers.config.schema import S3Config

A, B = "http://a.example:9000", "http://b.example:9000"


def bucket(prefix: str, endpoint: str | None = A, **fields: Any) -> dict[str, Any]:
    return {"type": "s3", "bucket": "kv-cache", "prefix": prefix, "endpoint": endpoint, "capacity": "1GiB", **fields}


def looked_at(place: str | None, *tiers: dict[str, Any], endpoint: str | None = None) -> list[S3Config]:
    config = json.dumps({"tiers": [{"type": "cpu", "capacity": "64MiB"}, *tiers]})
    found = list(_tiers(place, endpoint, config))
    assert all(isinstance(tier, S3Config) for tier in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("prefix", "endpoint", "server"),
    [
        ("old", None, A),
        ("new", None, B),  # the first tier with the bucket's name is on another server
        ("new/", None, B),
        ("new/namespace", None, B),  # within the prefix of one tier only
        ("both", A, A),
        ("both", B, B),
    ],
)
def test_prefix_of_a_bucket_is_looked_at_on_the_server_of_its_tier(
    prefix: str, endpoint: str | None, server: str
) -> None:
    """Two servers may have buckets of one name: on the wrong one a purge has "nothing to delete"."""
    tiers = [bucket("old"), bucket("new", B, profile="of-b"), bucket("both"), bucket("both", B)]
    (found,) = looked_at(f"s3://kv-cache/{prefix}", *tiers, endpoint=endpoint)
    assert (found.endpoint, found.prefix) == (server, prefix.strip("/"))
    assert found.profile == ("of-b" if prefix.startswith("new") else None)


@pytest.mark.parametrize("prefix", ["both", "", "of-neither"])
def test_prefix_that_may_be_on_either_server_is_an_error(prefix: str) -> None:
    with pytest.raises(InputError, match=f"s3://kv-cache/{prefix}: .*{A}.*{B}.*--endpoint"):
        looked_at(f"s3://kv-cache/{prefix}", bucket("both"), bucket("both", B))


def test_credentials_of_one_server_are_never_sent_to_another() -> None:
    with pytest.raises(InputError, match=f'--config: no tier in it has the bucket "kv-cache" at {B}'):
        looked_at("s3://kv-cache/old", bucket("old", profile="mine"), endpoint=B)
