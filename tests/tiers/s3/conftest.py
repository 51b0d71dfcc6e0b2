"""Credentials that no server has to know."""

from __future__ import annotations

import pytest

from tests.support.servers import ACCESS_KEY, SECRET_KEY


@pytest.fixture
def server_credentials(shared_aws_models: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the servers on this machine accept, and no search for others."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
