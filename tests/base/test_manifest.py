"""The manifest of a namespace: what it holds, when it is written again, and that no bytes can break its reader."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_tiers.base.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_TEXT_BYTES,
    MAX_TIME_S,
    Description,
    Manifest,
    renewed,
    salt_digest,
)

NOW = 1_800_000_000
TEXTS = st.text(max_size=20) | st.sampled_from(["\\" * 400, "é" * 300, "https://me:secret@host/x?y", "\0" * 300])
DESCRIPTIONS = st.builds(
    Description,
    model=TEXTS,
    revision=TEXTS,
    dtype=TEXTS,
    layout=TEXTS,
    chunk_tokens=st.integers(-1, 1 << 40),
    vllm=TEXTS,
    nixl_tiers=TEXTS,
    salt=st.sampled_from(["", salt_digest("tenant")]),
    note=TEXTS,
)
TIMES = st.integers(0, MAX_TIME_S)  # later ones are read as that
MANIFESTS = st.builds(
    Manifest,
    namespace=st.binary(min_size=16, max_size=16).map(bytes.hex),
    description=DESCRIPTIONS.map(Description.checked),
    row_bytes=st.integers(1, 1 << 40),
    epoch=st.integers(0, 2**63 - 1),
    engine=st.sampled_from(["", "node-1/4711/0badcafe"]),
    created=TIMES,
    last_used=TIMES,
)


@given(MANIFESTS)
def test_manifest_survives_a_round_trip(manifest: Manifest) -> None:
    raw = manifest.encode()
    assert len(raw) <= MAX_MANIFEST_BYTES
    assert Manifest.decode(raw) == manifest
    assert json.loads(raw)["format"] == 1


@given(DESCRIPTIONS)
def test_texts_of_a_checked_description_are_short_single_lines(description: Description) -> None:
    checked = description.checked()
    for name in Description.__struct_fields__:
        value = getattr(checked, name)
        assert not isinstance(value, str) or (value.isprintable() and len(value.encode()) <= MAX_TEXT_BYTES)
    assert checked.checked() == checked


@given(st.binary(max_size=200) | MANIFESTS.flatmap(lambda m: st.integers(0, 400).map(lambda at: m.encode()[:at])))
def test_damaged_manifest_is_none_or_a_manifest_and_never_an_error(raw: bytes) -> None:
    found = Manifest.decode(raw)
    assert found is None or isinstance(found, Manifest)


def test_manifest_of_another_format_is_none() -> None:
    raw = Manifest("00" * 16, Description(), 4096).encode()
    assert Manifest.decode(raw) is not None
    assert Manifest.decode(raw.replace(b'"format": 1', b'"format": 2')) is None


def test_user_and_password_and_query_of_a_url_are_left_out() -> None:
    model = "https://me:hunter2@models.example:8443/a/b?X-Amz-Signature=0123abcd"
    assert Description(model=model).checked().model == "https://models.example:8443/a/b"
    assert "hunter2" not in Description(note="s3://key:hun?ter2@bucket/x").checked().note


def test_salt_is_a_short_digest_and_none_without_a_salt() -> None:
    described = Description(model="m").of("tenant-7")
    assert described.salt == salt_digest("tenant-7") != salt_digest("tenant-8")
    assert len(described.salt) == 8
    assert b"tenant-7" not in Manifest("00" * 16, described, 4096).encode()
    assert Description().of(None).salt == Description().of("").salt == ""


def _wanted(now: int, **changes: object) -> Manifest:
    manifest = Manifest("00" * 16, Description(model="m"), 4096, engine="e", created=now, last_used=now)
    return msgspec.structs.replace(manifest, **changes)


@pytest.mark.parametrize(
    ("found", "created"),
    [
        (None, NOW),
        (_wanted(NOW - 9, namespace="11" * 16), NOW),
        (_wanted(NOW - 9, description=Description(model="older")), NOW - 9),
        (_wanted(NOW + 1_000_000), NOW),  # its clock was ahead
    ],
)
def test_a_manifest_that_is_written_again_keeps_when_it_was_made(found: Manifest | None, created: int) -> None:
    assert renewed(found, _wanted(NOW)) == _wanted(NOW, created=created)
