"""When it is believed that a server has no conditional writes, and when it is asked again."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from nixl_tiers.tiers.s3.conditional import RACERS, most_winners, put_if
from tests.support.servers import S3Server


def test_a_server_that_writes_after_it_has_tested_lets_all_racers_through() -> None:
    objects: dict[str, str] = {}
    etags, tested = itertools.count(), threading.Barrier(RACERS)

    def put(name: str, body: bytes, **condition: str) -> dict[str, Any] | None:
        holds = name not in objects if "IfNoneMatch" in condition else objects.get(name) == condition["IfMatch"]
        tested.wait(60)
        if holds:
            objects[name] = str(next(etags))
            return {"ETag": objects[name]}
        return None

    assert most_winners(put, "race") == RACERS


@pytest.mark.parametrize("s3_server", ["seaweedfs"], indirect=True)  # moto may let two through
def test_a_server_lets_one_racer_through(place: dict[str, Any], s3_server: S3Server) -> None:
    client = s3_server.client()

    def put(name: str, body: bytes, **condition: str) -> dict[str, Any] | None:
        return put_if(client, place["bucket"], f"{place['prefix']}/{name}", body, condition)

    assert most_winners(put, "race") == 1
