"""Denials: found out, reported in one sentence for each kind of request, and cleared when they are over."""

from __future__ import annotations

import logging

import boto3
import pytest

from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.tiers.s3.denials import Denials

DENIED_PAGE = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"

pytestmark = pytest.mark.usefixtures("server_credentials")


class TestDenials:
    @pytest.fixture
    def clock(self) -> list[float]:
        return [100.0]

    @pytest.fixture
    def recorder(self, clock: list[float]) -> Denials:
        return Denials("here", lambda: clock[0])

    def test_a_success_clears_a_denial_after_a_while_without_another(
        self, recorder: Denials, clock: list[float]
    ) -> None:
        """A server that denies every other request is reported once."""
        for _ in range(20):
            recorder.denied("put", "AccessDenied")
            clock[0] += 1
            recorder.succeeded("put")
            assert set(recorder.current()) == {"put"}
        clock[0] += PRODUCTION.s3_denial_s
        assert recorder.current() == {}

    def test_a_failure_of_unknown_cause_prolongs_a_known_denial(self, recorder: Denials, clock: list[float]) -> None:
        recorder.failed("put")
        assert recorder.current() == {}
        recorder.denied("put", "AccessDenied")
        clock[0] += 3600
        recorder.failed("put")
        recorder.succeeded("get")
        assert set(recorder.current()) == {"put"}

    def test_a_servers_text_is_reduced_to_a_code(self, recorder: Denials) -> None:
        recorder.denied("put", "Access\nDenied " + 1000 * "x")
        sentence = recorder.current()["put"]
        assert "\n" not in sentence
        assert len(sentence) < 200

    def test_an_error_page_is_a_denial_only_with_such_a_code(self, recorder: Denials) -> None:
        for page in (b"", b"\x00<Code>", b"<Code>NoSuchKey</Code>", b"<Code>SlowDown</Code>"):
            recorder.error_page("get", page)
        assert recorder.current() == {}
        recorder.error_page("get", DENIED_PAGE)
        assert set(recorder.current()) == {"get"}

    def test_the_botocore_event_has_the_expected_arguments(self, recorder: Denials) -> None:
        """The event is one of botocore's documented ones."""
        client = boto3.client("s3", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
        recorder.watch(client)
        logging.getLogger("botocore.hooks").setLevel(logging.WARNING)

        class Response:
            status_code = 403

        client.meta.events.emit(
            "after-call.s3.PutObject",
            http_response=Response(),
            parsed={"Error": {"Code": "AccessDenied"}},
            model=None,
            context={},
        )
        assert set(recorder.current()) == {"put"}
