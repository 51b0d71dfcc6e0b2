"""What a server's answers say: why one is an error, when it was given, and whether it was damaged on its way.

No sentence contains a server's text or a credential: error codes and class names only.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit
from xml.etree import ElementTree as ET

from botocore import handlers
from botocore.exceptions import BotoCoreError, ClientError, ConnectionClosedError, HTTPClientError, SSLError
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError, ResponseParserFactory, RestXMLParser
from botocore.utils import parse_timestamp, should_bypass_proxies
from urllib3.exceptions import HTTPError

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import TierDown, TierRefused

REQUEST_ERRORS: Final = (BotoCoreError, ClientError, HTTPError, ResponseParserError)
"""What boto3 raises without a good answer. ResponseParserError: for all that was damaged on its way (see the parser).
urllib3's error: GetObject's error page is read outside of its handlers."""

# The answer to HEAD has no body, so the HTTP status serves as the error code.
_MEANINGS: Final = {
    "400": "does not accept the request, as with expired credentials or a wrong region (HTTP 400)",
    "401": "refuses these credentials (HTTP 401)",
    "403": "refuses these credentials (HTTP 403), or they lack the right s3:ListBucket",
}
# Errors of several OpenSSL versions for an answer that is not TLS.
_PLAIN_HTTP: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")
PROXIES: Final = {"http_proxy", "https_proxy"}
TLS_S: Final = 0.5
SKEW_S: Final = 300.0  # of an answer's Date to a Last-Modified: who reads a record once has no clock but those
PIECE_BYTES: Final = 1 << 15
"""A call of the XML parser holds the interpreter lock: 6 ms for a whole page, 0.8 ms for this."""
ROOT_BYTES: Final = 1024
FLAGS: Final = {"true", "false"}
REQUIRED: Final = {"Key", "Size", "LastModified"}
_find_error = handlers._handle_200_error  # noqa: SLF001 (it has no public name)


def answered_at_s(answer: Mapping[str, Any]) -> float | None:
    """The server's Unix time when it answered, in whole seconds; None if it has no Date. Raises ResponseParserError."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    try:
        return None if date is None else parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise ResponseParserError(f"the Date of an answer is damaged ({type(error).__name__})") from error


def age_s(answer: Mapping[str, Any]) -> float:
    """How long ago the object of an answer was written: by the server's clocks, without a Date by this machine's."""
    now_s = answered_at_s(answer)
    return (time.time() if now_s is None else now_s) - float(answer["LastModified"].timestamp())


def status_of(error: ClientError) -> int:
    """The HTTP status of an error that the server answered with, or 0."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: Exception) -> str:
    """The code of an error that the server answered with, else the name of what was raised."""
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", "unknown"))
    return type(error).__name__


# --- why a tier cannot be opened: one sentence that names what to look at ---------------------------------------------


def tier_error(tier: S3Config, region: str, error: Exception) -> TierDown | TierRefused:
    """What the mover reports when opening the tier, in this AWS region, has raised `error`."""
    if isinstance(error, (TierDown, TierRefused)):
        return error
    if isinstance(error, ClientError) and code_of(error) in {"404", "NoSuchBucket"}:
        place = tier.endpoint or f"AWS {region}"
        return TierRefused(f'bucket: there is no bucket "{tier.bucket}" at {place}')
    return down(tier, region, _reason(tier, error))


def down(tier: S3Config, region: str, what: str) -> TierDown:
    return TierDown(f's3 bucket "{tier.bucket}" at {tier.endpoint or f"AWS {region}"}: {what}')


def _reason(tier: S3Config, error: Exception) -> str:
    if _accepts_tls_only(tier, error):
        return "speaks https, not http (see endpoint)"
    if isinstance(error, ClientError):
        return _MEANINGS.get(code_of(error), f"answers with an error ({code_of(error)})")
    if isinstance(error, SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "has a certificate that is not trusted (see ca_file)"
    if isinstance(error, SSLError):
        plain = any(sign in str(error).upper().replace(" ", "_") for sign in _PLAIN_HTTP)
        return "speaks http, not https (see endpoint)" if plain else "has no usable TLS (see endpoint)"
    if isinstance(error, (BotoConnectionError, HTTPClientError, OSError)):
        return no_answer(tier, f"({type(error).__name__})")
    return f"cannot be used ({type(error).__name__})"


def no_answer(tier: S3Config, how: str) -> str:
    """Names the environment's proxy for this server, if there is one."""
    proxies = [name for name, value in os.environ.items() if name.lower() in PROXIES and value]
    if not proxies or (tier.endpoint is not None and should_bypass_proxies(tier.endpoint)):
        return f"does not answer {how}"
    return f"does not answer {how}; it is asked directly, in spite of {' and '.join(sorted(proxies))}"


def _accepts_tls_only(tier: S3Config, error: Exception) -> bool:
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


# --- botocore's parser of XML, for pages of 1000 objects: cheaper, in small pieces, and strict ------------------------

# An answer may be damaged on its way. What is no answer of S3's raises ResponseParserError, as broken XML does, and is
# a request that failed: botocore itself raises many kinds of errors, or reads a damaged flag as "no".


def register_parser(session: Any) -> None:
    """Make this the parser of a botocore session's clients."""
    session.register_component("response_parser_factory", ParserFactory())
    session.unregister("before-parse.s3.*", _find_error)
    session.register("before-parse.s3.*", find_error_of_status_200)


class ParserFactory(ResponseParserFactory):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.set_parser_defaults(timestamp_parser=parse_time)

    def create_parser(self, protocol_name: str) -> Any:
        if protocol_name == "rest-xml":
            return PiecewiseParser(**self._defaults)
        return super().create_parser(protocol_name)


class PiecewiseParser(RestXMLParser):  # type: ignore[misc]
    """Other threads get the interpreter lock between two pieces."""

    def parse(self, response: dict[str, Any], shape: Any) -> Any:
        try:
            parsed = super().parse(response, shape)
            if shape is not None and shape.name == "ListObjectsV2Output" and response["status_code"] < 300:
                check_page(parsed)
        except ResponseParserError:
            raise
        except Exception as error:  # whatever it stumbles over: a time, a number, an order of elements
            raise ResponseParserError(f"Unable to parse response ({type(error).__name__})") from error
        return parsed

    def _do_error_parse(self, response: dict[str, Any], shape: Any) -> Any:
        """The status says enough, however damaged the body is."""
        with suppress(Exception):
            parsed = super()._do_error_parse(response, shape)
            if isinstance(parsed["Error"].get("Code"), str):
                return parsed
        return self._parse_error_from_http_status(response)

    def _handle_boolean(self, shape: Any, node: Any) -> bool:
        text = text_of(node).lower()
        if text not in FLAGS and not isinstance(node, str):  # headers say more, and nothing rests on those
            raise ResponseParserError(f"{shape.name} is neither true nor false")
        return text == "true"

    def _handle_integer(self, shape: Any, node: Any) -> int:
        text = text_of(node)
        if not (text.isascii() and text.isdecimal()):
            raise ResponseParserError(f"{shape.name} is no number")
        return int(text)

    _handle_long = _handle_integer

    def _parse_xml_string_to_dom(self, xml_string: bytes) -> Any:
        parser = ET.XMLParser(target=ET.TreeBuilder(), encoding=self.DEFAULT_ENCODING)  # noqa: S314 (as botocore does)
        try:
            for start in range(0, len(xml_string), PIECE_BYTES):
                parser.feed(xml_string[start : start + PIECE_BYTES])
            return parser.close()
        except ET.ParseError:
            return super()._parse_xml_string_to_dom(xml_string)  # which raises what callers expect


def text_of(node: Any) -> str:
    """Of an element, or a header."""
    return (node if isinstance(node, str) else node.text or "").strip()


def find_error_of_status_200(operation_model: Any, response_dict: Mapping[str, Any], **named: Any) -> None:
    """botocore looks for an error in the body of every answer, and parses all of it once more. The root of a page is
    enough to know that it is none."""
    if operation_model.name != "ListObjectsV2" or b"<ListBucketResult" not in response_dict["body"][:ROOT_BYTES]:
        _find_error(operation_model, response_dict, **named)


def parse_time(value: Any) -> datetime:
    """A page of a listing has 1000 times, on which botocore's own parser spends three quarters of a page's CPU time."""
    try:
        parsed = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        parsed = parse_timestamp(value)
    return parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)


def check_page(page: Mapping[str, Any]) -> None:
    """Raise ResponseParserError if a page of a listing lacks what every page has. denials.py says what is none."""
    if page.get("EncodingType", "url") != "url":
        raise ResponseParserError("a page has names in an unknown encoding")
    contents = page.get("Contents", ())
    if not all(each.keys() >= REQUIRED for each in contents):
        raise ResponseParserError("a page has an object without its name, size or time")
    if page.get("IsTruncated") and not contents and not page.get("NextContinuationToken"):
        raise ResponseParserError("a page does not say where the next one begins")
