"""botocore's parser of XML answers, for pages of 1000 objects: cheaper, and in small pieces."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from xml.etree import ElementTree as ET

from botocore import handlers
from botocore.parsers import ResponseParserFactory, RestXMLParser
from botocore.utils import parse_timestamp

PIECE_BYTES: Final = 1 << 15
"""A call of the XML parser holds the interpreter lock: 6 ms for a whole page, 0.8 ms for this."""

ROOT_BYTES: Final = 1024
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

    def _parse_xml_string_to_dom(self, xml_string: bytes) -> Any:
        parser = ET.XMLParser(target=ET.TreeBuilder(), encoding=self.DEFAULT_ENCODING)  # noqa: S314 (as botocore does)
        try:
            for start in range(0, len(xml_string), PIECE_BYTES):
                parser.feed(xml_string[start : start + PIECE_BYTES])
            return parser.close()
        except ET.ParseError:
            return super()._parse_xml_string_to_dom(xml_string)  # which raises what callers expect


def find_error_of_status_200(operation_model: Any, response_dict: Mapping[str, Any], **named: Any) -> None:
    """botocore looks for an error in the body of every answer, and parses all of it once more. The root of a page is
    enough to know that it is none."""
    if operation_model.name != "ListObjectsV2" or b"<ListBucketResult" not in response_dict["body"][:ROOT_BYTES]:
        _find_error(operation_model, response_dict, **named)


def parse_time(value: Any) -> datetime:
    """A page of a listing has 1000 times, on which botocore's own parser spends three quarters of a page's CPU time."""
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        parsed: datetime = parse_timestamp(value)
        return parsed
