"""What a connection learns from the server's answers."""

from __future__ import annotations

import pytest

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.s3.connection import S3Connection


def answer(**headers: str) -> dict[str, object]:
    return {"ResponseMetadata": {"HTTPHeaders": headers}}


@pytest.mark.parametrize(
    "headers",
    [{}, {"date": "Mon, 2? Nov 2026"}, {"date": "23 Nov 99999999999 12:00:00 GMT"}],
    ids=["none", "damaged", "far"],
)
def test_an_answer_without_a_readable_date_leaves_the_server_s_time_alone(headers: dict[str, str]) -> None:
    connection = S3Connection(S3Config(type="s3", bucket="kv-cache", capacity=1 << 30))
    connection._on_response(parsed=answer(date="Mon, 23 Nov 2026 12:00:00 GMT"))
    before = connection._server_time
    assert before is not None
    connection._on_response(parsed=answer(**headers))
    assert connection._server_time == before
