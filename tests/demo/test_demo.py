"""The demo's options: what was there before stays, and what cannot be used is one sentence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from demo import __main__ as demo
from demo.__main__ import BUCKET, BUCKET_VARIABLE, s3_server
from tests.support.servers import MotoServer, S3Server

LENGTH = "PROMPT_TOKENS (--prompt-tokens) must be from 512 to 8176, and no multiple of 128"


class Stop(Exception):
    pass


@contextmanager
def no_server() -> Any:
    raise Stop
    yield


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--prompt-tokens", "1024"], f"{LENGTH}, not '1024'"),
        (["--prompt-tokens", "9000"], f"{LENGTH}, not '9000'"),
        (["--prompt-tokens", "many"], f"{LENGTH}, not 'many'"),
        (["--s3", "minio"], "S3 (--s3) must be moto, seaweedfs, or the URL of a server, not 'minio'"),
    ],
)
def test_option_that_cannot_be_used_is_one_sentence(
    options: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main([*options, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert sentence in said.err
    assert not (tmp_path / "out").exists()


def test_directory_that_is_a_file_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("mine")
    assert demo.main(["--out", str(tmp_path / "out")]) == 2
    sentence = f"demo: OUT (--out) must be a directory to write to: {tmp_path}/out: File exists\n"
    assert capsys.readouterr() == ("", sentence)
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("bucket", [None, "somebodys"])
@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "http://"])
def test_server_that_does_not_answer_is_one_sentence(
    address: str,
    bucket: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    if bucket:
        monkeypatch.setenv(BUCKET_VARIABLE, bucket)
    assert demo.main(["--s3", address, "--out", str(tmp_path)]) == 1
    assert f"\nthe demo failed: {address} cannot be used: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_file_tier_that_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--out` may name a directory that has a file tier, as /mnt/nvme with /mnt/nvme/kv."""
    slab = tmp_path / "kv" / "slab"
    slab.parent.mkdir()
    slab.write_bytes(b"rows")
    monkeypatch.setattr(demo, "s3_server", lambda _: no_server())
    with pytest.raises(Stop):
        demo.main(["--out", str(tmp_path)])
    assert slab.read_bytes() == b"rows"
    assert [each.name for each in tmp_path.iterdir()] == ["kv"]


def test_bucket_on_a_server_that_runs_is_made_and_removed(
    moto: MotoServer, s3_credentials: Callable[[S3Server], None]
) -> None:
    s3_credentials(moto)
    with s3_server(moto.endpoint) as server:
        name = server.make_bucket(BUCKET)
        server.client().put_object(Bucket=name, Key="row", Body=b"row")
    assert name not in [bucket["Name"] for bucket in moto.client().list_buckets()["Buckets"]]


def test_bucket_that_is_named_is_kept(
    moto: MotoServer, s3_credentials: Callable[[S3Server], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_credentials(moto)
    monkeypatch.setenv(BUCKET_VARIABLE, moto.make_bucket("somebodys"))
    moto.client().put_object(Bucket="somebodys", Key="theirs", Body=b"theirs")
    with s3_server(moto.endpoint) as server:
        assert server.make_bucket(BUCKET) == "somebodys"
    assert [found["Key"] for found in moto.client().list_objects_v2(Bucket="somebodys")["Contents"]] == ["theirs"]
