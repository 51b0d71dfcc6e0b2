"""The control connection's queue of deletes."""

from __future__ import annotations

from unittest import mock

import pytest
from botocore.exceptions import EndpointConnectionError

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.s3.control import S3Control

pytestmark = pytest.mark.usefixtures("server_credentials")


@pytest.fixture
def control() -> S3Control:
    control = S3Control(S3Config(type="s3", bucket="kv-control", endpoint="http://127.0.0.1:1", capacity="1GiB"))
    control.connection.client = control.connection.delete_client = mock.Mock()
    return control


def test_versioning_is_asked_for_after_all_else(control: S3Control) -> None:
    control.delete(["nixl-tiers/row"])
    assert control._next(0.0) == control._delete_some
    control._delete_queue.clear()
    assert control._next(0.0) == control._check_versioning


def test_a_delete_that_fails_is_not_tried_again(control: S3Control) -> None:
    """By then another engine may have stored the row anew. Who finds the bad one again deletes it again."""
    control.connection.delete_client.delete_objects.side_effect = EndpointConnectionError(endpoint_url="gone")
    control.delete(["nixl-tiers/row"])
    control._do(control._delete_some)
    assert not control._delete_queue
    assert control.cancel_delete("nixl-tiers/row")
