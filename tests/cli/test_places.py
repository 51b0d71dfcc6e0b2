"""From what `inspect` and `purge` were given to the places that they look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.cli import BAD_INPUT, main
from nixl_tiers.cli.output import InputError
from nixl_tiers.cli.places import _tiers
from nixl_tiers.config.schema import S3Config
from tests.support.file_tier import file_tier

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


def test_credentials_of_the_only_server_are_used_for_any_prefix_of_its_bucket() -> None:
    (found,) = looked_at("s3://kv-cache/another", bucket("old", profile="mine"), bucket("new", profile="mine"))
    assert (found.endpoint, found.prefix, found.profile) == (A, "another", "mine")


def test_tiers_that_have_stored_nothing_yet_are_named_and_the_others_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that has not been started hid all that stand behind it."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "used" / ".incoming").mkdir(parents=True)
    tiers = [file_tier(tmp_path / name, "1GiB") for name in ("none", "empty", "used")]
    config = json.dumps({"tiers": [{"type": "cpu", "capacity": "64MiB"}, *tiers]})
    assert [tier.path for tier in _tiers(None, None, config)] == [tmp_path / "used"]  # type: ignore[attr-defined]
    none, empty = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'none'} does not exist: an engine makes it when it starts" in none
    assert f"{tmp_path / 'empty'} was never a file tier's path" in empty
    config = json.dumps({"tiers": [{"type": "cpu", "capacity": "64MiB"}, *tiers[:2]]})
    with pytest.raises(InputError, match=r"/none does not exist.*; .*/empty was never"):
        list(_tiers(None, None, config))


def test_credentials_of_one_server_are_never_sent_to_another() -> None:
    with pytest.raises(InputError, match=f'--config: no tier in it has the bucket "kv-cache" at {B}'):
        looked_at("s3://kv-cache/old", bucket("old", profile="mine"), endpoint=B)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["inspect"], "give a PATH"),
        (["inspect", "{}/none"], "does not exist: an engine makes it"),
        (["inspect", "--verify", "{}"], "was never a file tier's path"),
        (["inspect", "s3://no"], "s3://no: "),
        (["inspect", "{}", "--endpoint", "http://127.0.0.1:1"], "--endpoint: is for s3"),
    ],
)
def test_wrong_places_are_one_sentence(
    given: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([text.format(tmp_path) for text in given]) == BAD_INPUT
    output = capsys.readouterr()
    assert output.out == ""
    assert sentence in output.err
    assert output.err.count("\n") == 1
