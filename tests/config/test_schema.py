"""Valid configurations load; every invalid one raises one clear sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nixl_tiers.base import mounts
from nixl_tiers.config import schema
from nixl_tiers.config.errors import REMOVED, REMOVED_OF_TIERS
from nixl_tiers.config.fields import min_free_bytes
from nixl_tiers.config.schema import ConfigError, FileConfig, TiersConfig
from tests.support.refusals import refusal

CPU = {"type": "cpu", "capacity": "1GiB"}
FILE = {"type": "file", "path": "/mnt/nvme/kv", "capacity": "10GiB"}
S3 = {"type": "s3", "bucket": "kv-cache", "endpoint": "http://127.0.0.1:9000", "capacity": "1TiB"}


def full() -> dict[str, Any]:
    return {"tiers": [dict(CPU), dict(FILE), dict(S3)]}


def with_tier(tier: dict[str, Any], **fields: object) -> dict[str, Any]:
    return {"tiers": [dict(CPU), {**tier, **fields}]}


def test_bare_off_of_yaml_is_a_word(tmp_path: Path) -> None:
    """YAML 1.1 reads it as a boolean."""
    text = yaml.safe_dump(with_tier(FILE)).replace("type: file", "type: file\n  layout: files\n  write: off")
    (tmp_path / "tiers.yaml").write_text(text.replace("type: cpu", "type: cpu\n  huge_pages: off"))
    read = schema.load(str(tmp_path / "tiers.yaml"))
    tier = read.storage[0]
    assert isinstance(tier, FileConfig)
    assert (read.cpu.huge_pages, tier.write) == ("off", "off")


def test_dict_json_and_yaml_load_alike(tmp_path: Path) -> None:
    source = full() | {"model_id": "m@1", "salt": "s", "lora_storage": True, "on_reset": "keep", "wait_s": 2}
    read = schema.load(source)
    (tmp_path / "tiers.json").write_text(json.dumps(source))
    (tmp_path / "tiers.yaml").write_text(yaml.safe_dump(source))
    assert schema.load(tmp_path / "tiers.json") == read
    assert schema.load(str(tmp_path / "tiers.yaml")) == read
    assert schema.load({"config": str(tmp_path / "tiers.yaml")}) == read
    assert read.cpu.capacity == 2**30
    assert read.storage == (read.tiers[1], read.tiers[2])
    assert (read.model_id, read.salt, read.lora_storage, read.on_reset, read.wait_s) == ("m@1", "s", True, "keep", 2.0)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64GiB", 64 << 30), ("500GB", 500 * 10**9), ("1.5TiB", 3 << 39), (1073741824, 1 << 30), ("4096", 4096),
        (" 10 MiB ", 10 << 20), ("2kb", 2000), ("7B", 7), ("1EiB", 1 << 60), ("0.1KiB", 102),
        ("64G", 64 * 10**9), ("64Gi", 64 << 30), ("64 G", 64 * 10**9), ("2k", 2000), ("2Ki", 2048), ("1.5Ti", 3 << 39),
        ("500M", 500 * 10**6), ("1P", 10**15), ("1Ei", 1 << 60),
    ],
)  # fmt: skip
def test_sizes_are_parsed(text: object, size_bytes: int) -> None:
    assert schema.parse_size(text) == size_bytes
    assert schema.load({"tiers": [CPU | {"capacity": text}]}).cpu.capacity == size_bytes


@pytest.mark.parametrize(
    "size", [0, -1, "0GiB", "0.5B", "1.1EiB", 1 << 61, "-5GiB", "64Gb/s", "64X", "64i", "i", "lots", "",
             1.5, 1e12, True, None, "1e12", "nan", [], {}, "\uff19GiB"],
)  # fmt: skip
def test_invalid_size_is_refused(size: object) -> None:
    assert refusal({"tiers": [CPU | {"capacity": size}]}).startswith("tiers[0].capacity: ")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7d", 604800), ("12h", 43200), ("90m", 5400), ("30s", 30), ("1500ms", 1.5), (" 0.5 d ", 43200), ("1s", 1),
     (None, None)],
)  # fmt: skip
@pytest.mark.parametrize("tier", [FILE, S3], ids=["file", "s3"])
def test_ages_are_parsed(tier: dict[str, Any], text: object, seconds: float | None) -> None:
    read = schema.load(with_tier(tier, max_age=text)).storage[0]
    assert read.max_age == schema.parse_age(text) == seconds
    assert schema.tier_to_dict(read)["max_age"] == seconds
    assert schema.tier_from_dict(json.loads(json.dumps(schema.tier_to_dict(read)))) == read


@pytest.mark.parametrize(
    ("value", "of_100_gib", "of_10_tib"),
    [
        (None, 5 << 30, 50 << 30), (0, 0, 0), ("0%", 0, 0), ("10%", 10 << 30, 1 << 40), (" 2.5 % ", 5 << 29, 1 << 38),
        ("1GiB", 1 << 30, 1 << 30), (4096, 4096, 4096),
    ],
)  # fmt: skip
def test_min_free_is_a_size_or_a_percentage_of_the_file_system(value: object, of_100_gib: int, of_10_tib: int) -> None:
    read = schema.load(with_tier(FILE, min_free=value)).storage[0]
    assert isinstance(read, FileConfig)
    assert schema.tier_from_dict(json.loads(json.dumps(schema.tier_to_dict(read)))) == read
    assert [min_free_bytes(read.min_free, size) for size in (100 << 30, 10 << 40)] == [of_100_gib, of_10_tib]


@pytest.mark.parametrize(
    "age", [0, -1, 0.5, "0s", "0.5s", "101y", "40000d", 1e12, float("inf"), float("nan"), True, "week", "7 days", "",
            "-7d", "7D", "1e3s", "nan", [], {}, "\uff17d"],
)  # fmt: skip
def test_invalid_age_is_refused(age: object) -> None:
    for tier in (FILE, S3):
        assert refusal(with_tier(tier, max_age=age)).startswith("tiers[1].max_age: ")


@pytest.mark.parametrize("age", [7, 1.5, "7", "3600", " 30 "])
def test_age_without_a_unit_is_refused(age: object) -> None:
    """7 was taken for seconds without a word, where seven days were meant: all that is stored went at once."""
    for tier in (FILE, S3):
        sentence = refusal(with_tier(tier, max_age=age))
        assert sentence.startswith("tiers[1].max_age: ")
        assert '"7d", "12h"' in sentence
    with pytest.raises(ValueError, match="with its unit"):
        schema.parse_age(str(age))  # of `purge --older-than`


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["tiers", "type", "capacity", "path", "bucket", "config", "salt", "x"]),
                inner,
                max_size=4,
            )
        ),
    )
)
def test_junk_raises_only_config_errors(junk: object) -> None:
    for source in ({"tiers": junk}, {"tiers": [CPU, junk]}, with_tier(FILE, path=junk), with_tier(S3, endpoint=junk)):
        try:
            assert isinstance(schema.load(source), TiersConfig)
        except ConfigError as error:
            assert str(error).startswith("tiers")  # noqa: PT017 - most of the junk is refused, some of it is fine


@pytest.mark.parametrize(
    ("source", "start"),
    [
        ({}, "tiers: this field is missing"),
        ({"tiers": []}, "tiers: the first tier"),
        ({"tiers": "cpu"}, "tiers: must be a list"),
        ({"tiers": ["cpu"]}, "tiers[0]: must be a table"),
        ({"tiers": [CPU, {"type": "nfs"}]}, 'tiers[1].type: must be "cpu", "file" or "s3", not "nfs"'),
        ({"tiers": [CPU, {"type": "file", "path": "/a", "capcity": 5}]},
         'tiers[1].capcity: unknown field; did you mean "capacity"?'),
        ({"tiers": [CPU, {"type": "file", "path": "/a"}]}, "tiers[1].capacity: this field is missing"),
        (with_tier(FILE, path="kv"), 'tiers[1].path: must be an absolute path, and "kv" is relative'),
        (with_tier(FILE, path="/a\0b"), "tiers[1].path: must be an absolute path"),
        (with_tier(FILE, backend="gds"), 'tiers[1].backend: "gds" is refused, because NIXL ends a short read'),
        (with_tier(FILE, backend="posix", layout="files"), "tiers[1]: backend: posix is for layout: slabs: "),
        (with_tier(FILE, min_free="100%"), 'tiers[1].min_free: "100%" must be less than 100 %'),
        (with_tier(FILE, min_free="5 percent"), 'tiers[1].min_free: "5 percent" is neither a size such as "50GiB" nor'),
        (with_tier(FILE, write="back"), 'tiers[1].write: must be "through", "on_evict" or "off", not "back"'),
        (with_tier(S3, bucket="a"), 'tiers[1].bucket: "a" is not a bucket name'),
        (with_tier(S3, prefix="a//b"), "tiers[1].prefix: "),
        (with_tier(S3, endpoint="127.0.0.1:9000"), "tiers[1].endpoint: must be http://host:port"),
        (with_tier(S3, profile="p", credentials_file="/c"), "tiers[1]: profile and credentials_file are different"),
        (with_tier(S3, ca_file="/ca"), "tiers[1]: ca_file has no use"),
        (full() | {"wait_s": 0}, "wait_s: must be more than 0"),
        (full() | {"replicas": 0}, "replicas: must be at least 1"),
        (full() | {"replicas": "2"}, 'replicas: must be a whole number, not "2"'),
        (full() | {"wait_s": "soon"}, 'wait_s: "soon" is not a time; write a number of seconds, or "10s"'),
        (full() | {"wait_s": float("nan")}, "wait_s: must be a finite number"),
        (full() | {"model_id": "m" * 513}, "model_id: must have at most 512 characters"),
        (full() | {"lora_storage": "yes"}, 'lora_storage: must be true or false, not "yes"'),
        (full() | {"on_reset": "drop"}, 'on_reset: must be "new_epoch" or "keep", not "drop"'),
        (full() | {"probe_s": -1}, "probe_s: must be at least 0"),
        (with_tier(FILE, path=["/a", "/a/b"]), "tiers[1]: path: /a and /a/b overlap"),
        (with_tier(FILE, path=["/a", "b"]), 'tiers[1]: must be an absolute path, and "b" is relative'),
        (with_tier(FILE, path=["/a", "/b"], layout="files"), "tiers[1]: path is one directory with layout: files"),
        (with_tier(FILE, path=[f"/{n}" for n in range(33)]), "tiers[1]: path has 33 directories"),
        ({"tiers": [CPU, FILE | {"path": ["/a", "/b"]}, FILE | {"path": ["/c", "/b/d"]}]}, "tiers[2]: overlaps"),
        ({"tiers": [CPU, FILE, FILE | {"path": "/mnt/nvme/kv/below"}]}, "tiers[2]: overlaps tiers[1]"),
        ({"tiers": [CPU, S3, S3 | {"prefix": "nixl-tiers/below"}]}, "tiers[2]: overlaps tiers[1]"),
        ({"config": "/nowhere/tiers.toml"}, "/nowhere/tiers.toml: a configuration file must end in"),
        ({"config": "/nowhere/tiers.json"}, "/nowhere/tiers.json: cannot be read (No such file or directory)"),
        (with_tier(FILE, write="off"), "tiers[1]: write: off needs layout: files"),
        (with_tier(S3, bucket="s3://kv/llama/3"),
         'tiers[1].bucket: is an s3:// URL; use bucket and prefix (bucket: "kv", prefix: "llama/3")'),
        (with_tier(S3, endpoint="s3://kv"),
         'tiers[1].endpoint: is an s3:// URL; use bucket and prefix (bucket: "kv"), and no endpoint for AWS'),
        (with_tier(FILE, path="s3://kv/a"), 'tiers[1].path: is no path but an s3:// URL; use a tier of type "s3" with'),
        ({"tiers": [CPU, "s3://kv/a"]},
         'tiers[1]: use a tier of type "s3" with bucket and prefix (bucket: "kv", prefix: "a")'),
        ({"tiers": [CPU | {"max_age": "7d"}]}, 'tiers[0].max_age: unknown field here; it belongs to "file" and "s3"'),
        (with_tier(FILE, wait_s=1), "tiers[1].wait_s: unknown field here; it belongs to the top level"),
        (with_tier(FILE, ttl="1d"), 'tiers[1].ttl: unknown field; did you mean "max_age"?'),
        ({"config": "/a.yaml", "salt": "x"}, "config: excludes all other fields; write them into the file"),
        (with_tier(FILE, write=True), 'tiers[1].write: must be "through", "on_evict" or "off", not True'),
    ],
)  # fmt: skip
def test_error_is_one_sentence_that_names_the_field(source: dict[str, Any], start: str) -> None:
    assert refusal(source).startswith(start)


def test_times_are_parsed() -> None:
    for text, seconds in (("10s", 10.0), ("250ms", 0.25), ("1m", 60.0), ("2", 2.0), (" 1.5 s", 1.5), (7, 7.0)):
        read = schema.load(full() | {"wait_s": text, "flush_on_exit_s": text, "probe_s": text})
        assert read.wait_s == read.flush_on_exit_s == read.probe_s == seconds


def test_a_list_of_directories_is_one_tier_of_equal_members() -> None:
    read = schema.load(with_tier(FILE, path=["/mnt/a/kv", "/mnt/b/kv"], capacity=2 * 10**9, max_age="1h"))
    (tier,) = read.storage
    assert read.names == ("file",)
    assert (tier.capacity, tier.place) == (2 * 10**9, "/mnt/a/kv, /mnt/b/kv")
    for each, path in zip(tier.members, ("/mnt/a/kv", "/mnt/b/kv"), strict=True):
        one = schema.load(with_tier(FILE, path=path, capacity=10**9, max_age="1h")).storage[0]
        assert each == one == schema.tier_from_dict(schema.tier_to_dict(each)), "its mover knows of no other"
    assert schema.load(with_tier(FILE, path=["/mnt/nvme/kv"])) == schema.load(with_tier(FILE))
    with pytest.raises(ConfigError, match=r"capacity: .* for each of 2 directories, does not hold one chunk"):
        schema.check_rows(read, 10**9 + 1)


SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEYxx"


@pytest.mark.parametrize(
    ("source", "place"),
    [
        (with_tier(S3, access_key=SECRET), "tiers[1].access_key"),
        (with_tier(S3, secret_key=SECRET), "tiers[1].secret_key"),
        (with_tier(S3, aws_secret_access_key=SECRET), "tiers[1].aws_secret_access_key"),
        (with_tier(S3, **{"AWS-Session-Token": SECRET}), "tiers[1].AWS-Session-Token"),
        (with_tier(S3, password=SECRET), "tiers[1].password"),
        (with_tier(S3, credentials={"key": SECRET}), "tiers[1].credentials"),
        (with_tier(S3, profile="AKIAIOSFODNN7EXAMPLE"), "tiers[1].profile"),
        (with_tier(S3, endpoint=f"http://me:{SECRET}@host:9000"), "tiers[1].endpoint"),
        (with_tier(S3, endpoint=f"me:{SECRET}@host:9000"), "tiers[1].endpoint"),
        (with_tier(S3, bucket=SECRET + "/x"), "tiers[1].bucket"),
        (with_tier(S3, write=SECRET), "tiers[1].write"),
        (full() | {"s3_secret": SECRET}, "s3_secret"),
        (full() | {"nested": [{"access_key_id": "AKIAIOSFODNN7EXAMPLE"}]}, "nested[0].access_key_id"),
    ],
)
def test_secret_is_refused_and_not_repeated(source: dict[str, Any], place: str) -> None:
    text = refusal(source)
    assert text.startswith(f"{place}: ")
    for secret in (SECRET, "AKIAIOSFODNN7EXAMPLE"):
        assert secret not in text


def test_tier_round_trips_as_json() -> None:
    for tier in schema.load(full()).storage:
        assert schema.tier_from_dict(json.loads(json.dumps(schema.tier_to_dict(tier)))) == tier
    with pytest.raises(ConfigError, match=r"^type: .cpu. is not a storage tier"):
        schema.tier_from_dict(CPU)
    with pytest.raises(ConfigError, match=r"^capacity: this field is missing"):
        schema.tier_from_dict({"type": "file", "path": "/a"})
    with pytest.raises(ConfigError, match=r"^secret_key: a secret must not"):
        schema.tier_from_dict(S3 | {"secret_key": SECRET})


def test_refused_configuration_creates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    tiers = full() | {"tiers": [CPU, FILE | {"path": str(path)}, S3 | {"credentials_file": str(tmp_path / "missing")}]}
    with pytest.raises(ConfigError, match=r"^tiers\[2\]\.credentials_file: "):
        schema.check_paths(schema.load(tiers))
    assert not path.exists()


def test_missing_mount_is_reported_and_nothing_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "ROOT", tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "nvme" / "kv")
    reads = {
        path: schema.load(with_tier(FILE, path=str(path), require_mount=True))
        for path in (tmp_path / "nvme" / "kv", tmp_path / "link")
    }
    for path, read in reads.items():
        with pytest.raises(ConfigError) as error:
            schema.check_paths(read, create=False)
        assert str(error.value) == (
            f"tiers[1].path: {path} lies on the file system of {tmp_path}, and require_mount wants another: mount it"
        )
        schema.check_paths(read)  # the tier waits for the mount
        assert not (tmp_path / "nvme").exists()
    monkeypatch.setattr(mounts, "ROOT", Path("/proc"))  # as if the machine's own file system were elsewhere
    schema.check_paths(reads[tmp_path / "nvme" / "kv"], create=False)


def test_capacity_below_one_row_is_refused() -> None:
    read = schema.load({"tiers": [CPU, FILE | {"capacity": "1MiB"}]})
    schema.check_rows(read, 1 << 20)
    with pytest.raises(ConfigError, match=r"^tiers\[1\]\.capacity: 1 MiB does not hold one chunk, which takes 2 MiB"):
        schema.check_rows(read, 2 << 20)


@pytest.mark.parametrize("name", [*REMOVED, *REMOVED_OF_TIERS])
def test_a_field_that_was_removed_is_refused_before_secrets_are_read(name: str) -> None:
    if name in REMOVED:
        assert refusal(full() | {name: SECRET, "secret_key": SECRET}) == f"{name}: was removed: {REMOVED[name]}"
    for tier in (FILE, FILE | {"layout": "files"}, S3) if name in REMOVED_OF_TIERS else ():
        text = refusal({"tiers": [CPU, {"secret_key": SECRET, name: SECRET} | tier]})
        assert text == f"tiers[1].{name}: was removed: {REMOVED_OF_TIERS[name]}"
