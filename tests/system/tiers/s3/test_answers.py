"""Answers of the server are parsed once, and in pieces that do not hold the interpreter lock for long."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

import pytest
from botocore.exceptions import ClientError

from nixl_tiers.tiers.s3.answers import PIECE_BYTES
from tests.system.tiers.s3.harness import FaultyS3, client_of

ERROR = b"<Error><Code>InternalError</Code><Message>no</Message></Error>"


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what each call of the XML parser was given."""
    sizes: list[int] = []
    parser = ET.XMLParser

    class Counted:
        def __init__(self, **fields: Any) -> None:
            self._parser = parser(**fields)

        def feed(self, data: bytes) -> None:
            sizes.append(len(data))
            self._parser.feed(data)

        def close(self) -> Any:
            return self._parser.close()

    monkeypatch.setattr(ET, "XMLParser", Counted)
    return sizes


def test_page_is_parsed_once_and_in_small_pieces(faulty: FaultyS3, fed: list[int]) -> None:
    names = [f"p/{number:0100d}" for number in range(1000)]
    faulty.objects.update(dict.fromkeys(names, b"1"))
    client = client_of(faulty)
    fed.clear()
    answer = client.list_objects_v2(Bucket="kv-cut", Prefix="p/")
    assert [each["Key"] for each in answer["Contents"]] == names
    assert len(fed) > 3
    assert max(fed) <= PIECE_BYTES
    assert sum(fed) == int(answer["ResponseMetadata"]["HTTPHeaders"]["content-length"])


@pytest.mark.parametrize("request_of", ["list_objects_v2", "delete_objects"])
def test_error_with_status_200_is_an_error(faulty: FaultyS3, request_of: str) -> None:
    client = client_of(faulty)
    faulty.fault = lambda _: ERROR
    fields = {"Delete": {"Objects": [{"Key": "p/1"}]}} if request_of == "delete_objects" else {"Prefix": "p/"}
    with pytest.raises(ClientError, match="InternalError"):
        getattr(client, request_of)(Bucket="kv-cut", **fields)


def test_page_that_is_no_xml_is_an_error(faulty: FaultyS3) -> None:
    client = client_of(faulty)
    faulty.fault = lambda _: b"<ListBucketResult><Contents>" + b"x" * (2 * PIECE_BYTES)
    with pytest.raises(Exception, match="Unable to parse response"):
        client.list_objects_v2(Bucket="kv-cut", Prefix="p/")
