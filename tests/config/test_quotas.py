"""Quotas in the configuration, and which tenant a request's salt belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.config import schema
from nixl_tiers.config.quotas import Tenants
from nixl_tiers.config.warnings import warnings_given
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
    assert {name: tenants.shares[number - 1] for name, number in tenants.named.items()} == {
        "a": 0.2,
        "*": 0.1,
        "b": 0.025,
    }
    assert [tenants.named[name] for name in ("a", "b", "*")] == [1, 3, 2]
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
        (
            {"a": {"share": "20%", "salt_sha256": "pepper"}},
            "quotas.a.salt_sha256: must be the SHA-256 digest of the salt: 64 hexadecimal digits",
        ),
        (["a"], "quotas: input should be a valid dictionary"),
    ],
)
def test_a_mistake_is_one_sentence(quotas: object, sentence: str) -> None:
    assert refusal(config(quotas)) == sentence


OFFLOADING, OURS = "OffloadingConnector", "NixlTiersConnector"


def transfer(connector: str, **fields: Any) -> dict[str, Any]:
    extra = {"spec_name": "NixlTiersSpec", **fields}
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def beside(child: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "x"}, child]},
    }


@pytest.mark.parametrize("wrapped", [dict, beside], ids=["alone", "multi"])
@pytest.mark.parametrize("given", ["text", "file", "pointer"])
def test_quotas_without_effect_are_warned_about(
    given: str, wrapped: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    quotas = config({"a": tenant("pepper")})
    (tmp_path / "tiers.json").write_text(json.dumps(quotas))
    fields = {"config": str(tmp_path / "tiers.json")} if given == "pointer" else quotas

    def warned(connector: str, fields: dict[str, Any]) -> list[str]:
        source: Any = wrapped(transfer(connector, **fields))
        if given != "pointer":
            source = json.dumps(source)
        if given == "file":
            (tmp_path / "transfer.json").write_text(source)
            source = str(tmp_path / "transfer.json")
        return warnings_given(schema.load(source), source)

    assert warned(OFFLOADING, fields) == [f"quotas: have no effect with {OFFLOADING}: use kv_connector {OURS}"]
    assert warned(OURS, fields) == warned(OFFLOADING, {"tiers": [CPU]}) == []
    assert warnings_given(schema.load(quotas), quotas) == []  # no connector is named
