"""Names of rows: digests of namespaces and names of objects are parts of formats."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_tiers.base.chunk import MAX_KEY_BYTES, Namespace, check_keys, key_of_object, object_name

FACTS = {"dtype": "bfloat16", "model": "m", "salt": ""}


def test_namespaces_that_differ_have_other_digests() -> None:
    """Also those whose texts read the same one after the other."""
    assert Namespace.of(FACTS).digest.hex() == "a5f2229ec76ac4913584202f8981b5cf"
    others = [
        FACTS | {"salt": "s"},
        FACTS | {"model": "ms", "salt": ""},
        {"dtype": "bfloat16", "models": "", "alt": "m"},
        {"dtype": "bfloat16m", "odel": "m", "salt": ""},
        {"dtype": "bfloat16", "model": "msalt"},
    ]
    namespaces = [Namespace.of(FACTS), Namespace.of(FACTS, 1), *map(Namespace.of, others)]
    assert len({namespace.digest for namespace in namespaces}) == len(namespaces)
    assert Namespace.of(dict(reversed(FACTS.items()))) == Namespace.of(FACTS)


@given(st.binary(min_size=1, max_size=MAX_KEY_BYTES))
def test_name_of_an_object_is_that_of_its_key_alone(key: bytes) -> None:
    assert key_of_object(object_name(key)) == key


@pytest.mark.parametrize(
    "name", ["", "ab", "00/6b", "0d/6B", "0d/6b0", "0d/zz", "0d/6b/6b", "0d/", f"0d/{'6b' * (MAX_KEY_BYTES + 1)}"]
)
def test_only_names_of_keys_have_a_key(name: str) -> None:
    assert key_of_object(name) is None


def test_keys_have_one_to_112_bytes() -> None:
    check_keys([b"k", bytes(MAX_KEY_BYTES)])
    for key in (b"", bytes(MAX_KEY_BYTES + 1)):
        with pytest.raises(ValueError, match="1 to 112 bytes"):
            check_keys([b"k", key])
    with pytest.raises(TypeError, match="must be bytes"):
        check_keys(["k"])  # type: ignore[list-item]
