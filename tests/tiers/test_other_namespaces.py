"""What a tier says at its start of the rows of other namespaces that its medium holds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nixl_tiers.base.manifest import Description, Manifest
from nixl_tiers.tiers.manifests import MAX_READ, Other, differences, others_sentence, sentence

ABOUT = Description(model="org/model", revision="abc", dtype="bfloat16", chunk_tokens=256, vllm="0.32.0", salt="11")
OWN = Manifest("00" * 16, ABOUT, row_bytes=4096)


def other(nbytes: int = 1 << 30, last_used: int = 0, **changed: Any) -> Other:
    manifest = msgspec.structs.replace(OWN, namespace="11" * 16, last_used=last_used)
    fields = {name: changed.pop(name) for name in list(changed) if name in Manifest.__struct_fields__}
    about = msgspec.structs.replace(ABOUT, **changed)
    return Other(nbytes, msgspec.structs.replace(manifest, description=about, **fields))


def test_nothing_is_said_where_there_are_no_rows_of_others() -> None:
    assert sentence(OWN, []) == ""


def test_only_the_manifests_of_the_largest_are_read_and_what_is_empty_is_left_out() -> None:
    read: list[str] = []
    assert others_sentence(OWN, {"empty": 0}, read.append) == ""
    said = others_sentence(OWN, {f"{n:02}": n << 20 for n in range(100)}, read.append)
    assert read == [f"{n:02}" for n in range(99, 99 - MAX_READ, -1)]
    assert "99 other namespaces" in said


def test_manifest_that_cannot_be_read_is_as_good_as_none() -> None:
    def fail(_: str) -> bytes:
        raise OSError

    assert "without a manifest" in others_sentence(OWN, {"11" * 16: 4096}, fail)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "org/old"}, "model org/old, now org/model"),
        ({"revision": "def"}, "revision def, now abc"),
        ({"chunk_tokens": 128}, "chunk size 128, now 256"),
        ({"vllm": "0.31.2"}, "vLLM 0.31, now 0.32"),
        ({"salt": ""}, "another salt"),
        ({"row_bytes": 8192}, "rows of 8192 bytes, now 4096"),
        ({"epoch": 3}, "weights that were replaced while the engine ran"),
    ],
)
def test_it_says_in_what_the_other_namespace_differs(changed: dict[str, Any], words: str) -> None:
    found = other(**changed)
    assert found.manifest is not None
    assert differences(OWN, found.manifest) == [words]
    assert words in sentence(OWN, [found])


@pytest.mark.parametrize("changed", [{"vllm": "0.32.4"}, {"note": "mine"}, {"nixl_tiers": "9"}, {"dtype": ""}, {}])
def test_what_makes_no_other_namespace_or_is_unknown_is_no_difference(changed: dict[str, Any]) -> None:
    found = other(**changed)
    assert found.manifest is not None
    assert differences(OWN, found.manifest) == []
    assert "the weights, or an option" in sentence(OWN, [found])


def test_the_last_used_are_named_first_and_only_a_few() -> None:
    others = [other(last_used=day * 86400, model=f"m{day}") for day in range(5)]
    said = sentence(OWN, [Other(1 << 30, None), *others])
    assert said.startswith("6 GiB here are of 6 other namespaces, which this engine does not find: ")
    assert [said.index(f"model m{day}") for day in (4, 3, 2)] == sorted(
        said.index(f"model m{day}") for day in (4, 3, 2)
    )
    assert said.endswith("; 3 more")
    assert "1970-01-05" in said
    assert "without a manifest" not in said


@pytest.mark.parametrize(("last_used", "day"), [(-1, "1970-01-01"), (10**18, "9999-12-31"), (1 << 62, "9999-12-31")])
def test_time_that_no_calendar_has_is_no_error(last_used: int, day: str) -> None:
    written = other(last_used=last_used).manifest
    assert written is not None
    assert f"last used on {day} (" in sentence(OWN, [Other(4096, Manifest.decode(written.encode()))])


@pytest.mark.parametrize("raw", [b"", b"no json", b'{"format": 1}', b"[" * 100_000])
def test_damaged_manifest_is_none(raw: bytes) -> None:
    said = others_sentence(OWN, {"11" * 16: 4096}, lambda _: raw)
    assert said == "4 KiB here are of another namespace, which this engine does not find: without a manifest"
