"""What a field of the configuration means: sizes, ages, paths and names as people write them, checked.

Each function takes whatever stands in the field and returns its value, or raises a ValueError whose text follows the
field's name. None of these repeats what might be a secret in the wrong place.
"""

from __future__ import annotations

import json
import math
import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

MAX_CAPACITY_BYTES: Final = 1 << 60
MAX_AGE_S: Final = 100 * 365 * 86400.0
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)\s*", re.ASCII)
_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{infix}B": base**power
    for power, letter in enumerate("KMGTPE", 1)
    for infix, base in (("", 1000), ("i", 1024))
}
_UNITS_BY_LOWER: Final = {unit.lower(): factor for unit, factor in _UNITS.items()}
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_ENVIRONMENT_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_PREFIX: Final = re.compile(r"[A-Za-z0-9!_.*'()=-]+(/[A-Za-z0-9!_.*'()=-]+)*")


def parse_size(value: object) -> int:
    """Bytes meant by `value`: a whole number of bytes, or text such as "64GiB", "500GB", "1.5TiB".

    Raises ValueError.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        number, unit = match.groups()
        if unit.lower() not in _UNITS_BY_LOWER:
            raise ValueError(f"{shown(value)} has an unknown unit; use B, KiB, MiB, GiB, TiB or KB, MB, GB, TB")
        size = int(Fraction(number) * _UNITS_BY_LOWER[unit.lower()])
    else:
        raise ValueError(f'{shown(value)} is not a size; write bytes as a whole number, or text such as "64GiB"')
    if size < 1:
        raise ValueError(f"{shown(value)} is no room at all; a capacity must be at least one byte")
    if size > MAX_CAPACITY_BYTES:
        raise ValueError(f"{shown(value)} is more than 1 EiB, which no tier can have")
    return size


def format_size(size_bytes: int) -> str:
    """`size_bytes` for people: "64 GiB", "1.5 TiB", "812 B"."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    power = min(int(math.log2(size_bytes)) // 10, 6)
    return f"{size_bytes / 1024**power:.4g} {' KMGTPE'[power]}iB"


def parse_age(value: object) -> float | None:
    """Seconds meant by `value`: a number of seconds, or text such as "7d", "12h", "90m", "30s"; None stays None.

    Raises ValueError.
    """
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        age_s = value
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value)):
        number, unit = match.groups()
        age_s = float(Fraction(number) * _SECONDS[unit or "s"])
    else:
        raise ValueError(f'{shown(value)} is not an age; write a number of seconds, or "7d", "12h", "90m"')
    if not 1 <= age_s <= MAX_AGE_S:  # also what is not a number
        raise ValueError(f"{shown(value)} is not an age between one second and 100 years")
    return float(age_s)


def shown(value: object) -> str:
    """`value` as it may stand in a message: long text might be a secret in the wrong place, and is left out."""
    if isinstance(value, str):
        return json.dumps(value) if len(value) <= 32 else "that value"
    return str(value) if isinstance(value, (int, float, type(None))) else f"a {type(value).__name__}"


def absolute(value: object) -> Path:
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise ValueError(f"must be an absolute path, not {shown(value)}")
    if not Path(value).is_absolute():
        raise ValueError(f'must be an absolute path, and "{value}" is relative')
    return Path(os.path.normpath(value))


def _text(value: object, what: str, pattern: re.Pattern[str], longest: int) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be {what}, not {shown(value)}")
    if len(value) > longest or not pattern.fullmatch(value):
        raise ValueError(f"{shown(value)} is not {what}")
    return value


def bucket(value: object) -> str:
    return _text(value, "a bucket name (3 to 255 letters, digits, dots, dashes or underscores)", _BUCKET, 255)


def prefix(value: object) -> str:
    text = value.strip("/") if isinstance(value, str) else value
    what = "a prefix (1 to 512 characters: letters, digits, !_.*'()=- and single slashes between them)"
    name = _text(text, what, _PREFIX, 512)
    if any(part in (".", "..") for part in name.split("/")):
        raise ValueError(f"{shown(name)} must not have . or .. as a part")
    return name


def region(value: object) -> str:
    return _text(value, "a region name", re.compile(r"[A-Za-z0-9-]+"), 64)


def endpoint(value: object) -> str | None:
    if value is None:
        return None
    form = "http://host:port or https://host:port"
    if not isinstance(value, str):
        raise ValueError(f"must be {form}, not {shown(value)}")
    if "@" in value:
        raise ValueError(f"must be {form} without a user name or password in it")
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or parts.path not in ("", "/") or parts.query or parts.fragment or re.search(r"\s", value):
        raise ValueError(f"must be {form}, with nothing behind the port")
    return value.rstrip("/")


def environment_name(value: object) -> str | None:
    # A key pasted into this field must not come back in the message, so the value is never shown.
    if value is None:
        return None
    looks_secret = isinstance(value, str) and len(value) >= 32 and "_" not in value
    if not isinstance(value, str) or looks_secret or not _ENVIRONMENT_NAME.fullmatch(value):
        raise ValueError("must be the name of an environment variable, not the secret itself")
    return value
