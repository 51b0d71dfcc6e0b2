"""TLS of an endpoint: which certificates are trusted, and whether a scheme is wrong."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from botocore.exceptions import ClientError, ConnectionClosedError
from botocore.httpsession import where

from nixl_tiers.config.schema import S3Config

TLS_S: Final = 0.5


def trusted_certificates(tier: S3Config) -> str | None:
    """The CA bundle to verify an https endpoint with; None for http.

    The AWS library in NIXL's wheel looks for it at its builder's path, which other distributions do not have.
    """
    if tier.endpoint is not None and tier.endpoint.startswith("http:"):
        return None
    candidates = (tier.ca_file, os.environ.get("AWS_CA_BUNDLE"), ssl.get_default_verify_paths().cafile)
    return next((str(path) for path in candidates if path and Path(path).is_file()), str(where()))


def accepts_tls_only(tier: S3Config, error: Exception) -> bool:
    """Whether `error`, from an endpoint configured as http, comes from a server that accepts https only.

    Tries a TLS handshake, which may take TLS_S.
    """
    bad_request = isinstance(error, ClientError) and error.response["ResponseMetadata"]["HTTPStatusCode"] == 400
    if tier.endpoint is None or not tier.endpoint.startswith("http:"):
        return False
    if not bad_request and not isinstance(error, ConnectionClosedError):
        return False
    place = urlsplit(tier.endpoint)
    assert place.hostname is not None
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent to the server or read from it
    try:
        with socket.create_connection((place.hostname, place.port or 80), TLS_S) as connection:
            context.wrap_socket(connection).close()
    except OSError:
        return False
    return True
