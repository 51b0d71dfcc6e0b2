"""Why an S3 tier cannot be opened: errors of boto3 as one sentence that names what to look at.

No sentence contains a server's text or a credential: error codes and class names only.
"""

from __future__ import annotations

from typing import Final

from botocore.exceptions import ClientError, HTTPClientError, SSLError
from botocore.exceptions import ConnectionError as BotoConnectionError

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.s3.tls import accepts_tls_only

# The answer to HEAD has no body, so the HTTP status serves as the error code.
_MEANINGS: Final = {
    "400": "does not accept the request, as with expired credentials or a wrong region (HTTP 400)",
    "401": "refuses these credentials (HTTP 401)",
    "403": "refuses these credentials (HTTP 403), or they lack the right s3:ListBucket",
}
# Errors of several OpenSSL versions for an answer that is not TLS.
_PLAIN_HTTP: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")


def tier_error(tier: S3Config, region: str, error: Exception) -> TierDown | TierRefused:
    """What the mover reports when opening the tier, in this AWS region, has raised `error`."""
    if isinstance(error, (TierDown, TierRefused)):
        return error
    if isinstance(error, ClientError) and _code(error) in {"404", "NoSuchBucket"}:
        return TierRefused(f'bucket: there is no bucket "{tier.bucket}" at {_address(tier, region)}')
    return down(tier, region, _reason(tier, error))


def down(tier: S3Config, region: str, what: str) -> TierDown:
    return TierDown(f's3 bucket "{tier.bucket}" at {_address(tier, region)}: {what}')


def _reason(tier: S3Config, error: Exception) -> str:
    if accepts_tls_only(tier, error):
        return "speaks https, not http (see endpoint)"
    if isinstance(error, ClientError):
        return _MEANINGS.get(_code(error), f"answers with an error ({_code(error)})")
    if isinstance(error, SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "has a certificate that is not trusted (see ca_file)"
    if isinstance(error, SSLError):
        plain = any(sign in str(error).upper().replace(" ", "_") for sign in _PLAIN_HTTP)
        return "speaks http, not https (see endpoint)" if plain else "has no usable TLS (see endpoint)"
    if isinstance(error, (BotoConnectionError, HTTPClientError, OSError)):
        return f"does not answer ({type(error).__name__})"
    return f"cannot be used ({type(error).__name__})"


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "unknown"))


def _address(tier: S3Config, region: str) -> str:
    return tier.endpoint or f"AWS {region}"
