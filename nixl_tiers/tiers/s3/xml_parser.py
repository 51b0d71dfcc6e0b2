"""botocore's parser of XML answers, for pages of 1000 objects: cheaper, in small pieces, and strict.

An answer may be damaged on its way. What is no answer of S3's raises ResponseParserError, as broken XML does, and is a
request that failed: botocore itself raises many kinds of errors, or reads a damaged flag as "no"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final
from xml.etree import ElementTree as ET

from botocore import handlers
from botocore.parsers import ResponseParserError, ResponseParserFactory, RestXMLParser
from botocore.utils import parse_timestamp

PIECE_BYTES: Final = 1 << 15
"""A call of the XML parser holds the interpreter lock: 6 ms for a whole page, 0.8 ms for this."""

ROOT_BYTES: Final = 1024
FLAGS: Final = {"true", "false"}
REQUIRED: Final = {"Key", "Size", "LastModified"}
_find_error = handlers._handle_200_error  # noqa: SLF001 (it has no public name)


def register(session: Any) -> None:
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
        with damage_is_an_error():
            parsed = super().parse(response, shape)
            if shape is not None and shape.name == "ListObjectsV2Output" and response["status_code"] < 300:
                check_page(parsed)
        return parsed

    def _do_error_parse(self, response: dict[str, Any], shape: Any) -> Any:
        """The status says enough, however damaged the body is."""
        try:
            with damage_is_an_error():
                parsed = super()._do_error_parse(response, shape)
                if isinstance(parsed["Error"].get("Code"), str):
                    return parsed
        except ResponseParserError:
            pass
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


@contextmanager
def damage_is_an_error() -> Iterator[None]:
    """Whatever the parser stumbles over is damage of the answer: of a time, a number, an order of elements."""
    try:
        yield
    except ResponseParserError:
        raise
    except Exception as error:
        raise ResponseParserError(f"Unable to parse response ({type(error).__name__})") from error


def check_page(page: Mapping[str, Any]) -> None:
    """Raise ResponseParserError if a page of a listing lacks what every page has. denials.py says what is none."""
    if page.get("EncodingType", "url") != "url":
        raise ResponseParserError("a page has names in an unknown encoding")
    contents = page.get("Contents", ())
    if not all(each.keys() >= REQUIRED for each in contents):
        raise ResponseParserError("a page has an object without its name, size or time")
    if page.get("IsTruncated") and not contents and not page.get("NextContinuationToken"):
        raise ResponseParserError("a page does not say where the next one begins")
