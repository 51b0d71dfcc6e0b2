"""Quotas in the configuration, and which tenant a request's salt belongs to."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from nixl_tiers.config import schema
from nixl_tiers.config.quotas import Tenants
from tests.support.refusals import refusal

CPU = {"type": "cpu", "capacity": "1GiB"}


def digest(salt: str) -> str:
    return hashlib.sha256(salt.encode()).hexdigest()


def config(quotas: object) -> dict[str, Any]:
    return {"tiers": [CPU], "quotas": quotas}


def tenant(salt: str, share: object = "20%") -> dict[str, object]:
    return {"share": share, "salt_sha256": digest(salt)}


def test_each_salt_has_its_tenant_and_all_others_share_one() -> None:
    read = schema.load(config({"a": tenant("pepper"), "*": {"share": "10 %"}, "b": tenant("chilli", "2.5%")}))
    assert [quota.share for quota in read.quotas.values()] == [0.2, 0.1, 0.025]
    tenants = Tenants(read.quotas)
    assert [tenants.number_of(salt) for salt in ("pepper", "chilli", "other", "", None)] == [1, 3, 2, 2, 2]
    some = Tenants(schema.load(config({"a": tenant("pepper")})).quotas)
    assert [some.number_of(salt) for salt in ("pepper", "other", "", None)] == [1, 0, 0, 0]
    assert Tenants({}).number_of("pepper") == 0


@pytest.mark.parametrize(
    ("quotas", "sentence"),
    [
        ({"a": {"salt_sha256": digest("x")}}, "quotas.a.share: this field is missing"),
        ({"a": tenant("x", 20)}, 'quotas.a.share: 20 is not a percentage such as "20%"'),
        ({"a": tenant("x", "0%")}, 'quotas.a.share: "0%" must be more than 0 and at most 100 %'),
        ({"a": tenant("x", "101%")}, 'quotas.a.share: "101%" must be more than 0 and at most 100 %'),
        ({"a": {"share": "20%"}}, "quotas: a: salt_sha256 is missing"),
        ({"*": tenant("x")}, "quotas: *: must have no salt_sha256"),
        ({"a": tenant("x"), "b": tenant("x")}, "quotas: b has the same salt_sha256 as a"),
        (
            {"a b": tenant("x")},
            "quotas: has a name that is neither * nor up to 64 letters, digits, dots, dashes and underscores",
        ),
        ({f"t{number}": tenant(str(number)) for number in range(65)}, "quotas: has more than 64 names"),
        (["a"], "quotas: input should be a valid dictionary"),
    ],
)
def test_a_mistake_is_one_sentence(quotas: object, sentence: str) -> None:
    assert refusal(config(quotas)) == sentence


def test_a_salt_in_the_place_of_its_digest_is_refused_and_not_repeated() -> None:
    found = refusal(config({"a": {"share": "20%", "salt_sha256": "pepper"}}))
    assert found == "quotas.a.salt_sha256: must be the SHA-256 digest of the salt: 64 hexadecimal digits"


def test_quotas_show_names_and_digests_alone() -> None:
    assert "pepper" not in repr(schema.load(config({"a": tenant("pepper")})))
