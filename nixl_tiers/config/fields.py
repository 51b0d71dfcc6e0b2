"""Parsers and formatters of field values: sizes, ages, times, paths, names.

Each parser takes a raw value and returns the checked one, or raises a ValueError whose text follows the field's name.
No message repeats a value that might be a secret in the wrong field.
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
_MILLISECONDS: Final = {"ms": 1, "": 1000, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|[smhd]?)\s*", re.ASCII)
# Keys are lower case. Binary units with or without B ("64GiB", Kubernetes' "64Gi"), decimal ones likewise.
_UNITS: Final = {"": 1, "b": 1} | {
    f"{letter}{infix}{ending}": base**power
    for power, letter in enumerate("kmgtpe", 1)
    for infix, base in (("", 1000), ("i", 1024))
    for ending in ("b", "")
}
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_PERCENT: Final = re.compile(r"\s*([0-9]{1,3}(?:\.[0-9]+)?)\s*%\s*", re.ASCII)
_ENVIRONMENT_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_PREFIX: Final = re.compile(r"[A-Za-z0-9!_.*'()=-]+(/[A-Za-z0-9!_.*'()=-]+)*")


def parse_size(value: object) -> int:
    """Convert `value` to bytes: a whole number of bytes, or text such as "64GiB", "64Gi", "500GB", "500G".

    Raises ValueError.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        number, unit = match.groups()
        if unit.lower() not in _UNITS:
            raise ValueError(f"{shown(value)} has an unknown unit; use B, KiB, MiB, GiB, TiB or KB, MB, GB, TB")
        size = int(Fraction(number) * _UNITS[unit.lower()])
    else:
        raise ValueError(f'{shown(value)} is not a size; write bytes as a whole number, or text such as "64GiB"')
    if size < 1:
        raise ValueError(f"{shown(value)} is too small; a capacity must be at least one byte")
    if size > MAX_CAPACITY_BYTES:
        raise ValueError(f"{shown(value)} is more than 1 EiB, which no tier can have")
    return size


def parse_min_free(value: object) -> int | str | None:
    """Check a share of a file system: bytes (see `parse_size`; 0 is allowed), or a percentage such as "5%"; None stays
    None.

    Raises ValueError.
    """
    if value is None or (value == 0 and not isinstance(value, bool)):
        return None if value is None else 0
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value)):
        if float(match[1]) >= 100:
            raise ValueError(f"{shown(value)} must be less than 100 %, or nothing could be stored")
        return f"{match[1]}%"
    try:
        return parse_size(value)
    except ValueError:
        raise ValueError(f'{shown(value)} is neither a size such as "50GiB" nor a percentage such as "5%"') from None


def parse_share(value: object) -> float:
    """Convert a percentage such as "20%" to a number, of which 1 is all. Raises ValueError."""
    if not (isinstance(value, str) and (match := _PERCENT.fullmatch(value))):
        raise ValueError(f'{shown(value)} is not a percentage such as "20%"')
    if not 0 < (share := float(match[1])) <= 100:
        raise ValueError(f"{shown(value)} must be more than 0 and at most 100 %")
    return share / 100


def parse_digest(value: object) -> str:
    """Check a SHA-256 digest in hexadecimal. Raises ValueError, which does not repeat the value: it may be the salt."""
    if not (isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value.lower())):
        raise ValueError("must be the SHA-256 digest of the salt: 64 hexadecimal digits")
    return value.lower()


def min_free_bytes(setting: int | str | None, size_bytes: int) -> int:
    """What a checked `min_free` is on a file system of `size_bytes`."""
    if isinstance(setting, str):
        return int(size_bytes * Fraction(setting.removesuffix("%")) / 100)
    return min(size_bytes // 20, 50 << 30) if setting is None else setting


def format_size(size_bytes: int) -> str:
    """Format a size: "64 GiB", "1.5 TiB", "812 B"."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    power = min(int(math.log2(size_bytes)) // 10, 6)
    return f"{size_bytes / 1024**power:.4g} {' KMGTPE'[power]}iB"


def parse_age(value: object) -> float | None:
    """Convert `value` to seconds: text with a unit, such as "7d", "12h", "90m", "30s", or a number of seconds; None
    stays None. What a user writes is text: see `has_unit`. Raises ValueError.
    """
    if value is None:
        return None
    age_s = _seconds(value)
    if age_s is None or (isinstance(value, str) and not has_unit(value)):
        raise ValueError(f'{shown(value)} is not an age; write it with its unit, as "7d", "12h", "90m"')
    if not 1 <= age_s <= MAX_AGE_S:  # NaN too
        raise ValueError(f"{shown(value)} is not an age between one second and 100 years")
    return age_s


def has_unit(value: object) -> bool:
    """Whether this is a time that nobody can take for another one: 7 may be meant as days."""
    return isinstance(value, str) and value.strip()[-1:] in _MILLISECONDS.keys() - {""}


def parse_seconds(value: object) -> float:
    """Convert `value` to seconds: a number of seconds, or text such as "10s", "250ms", "2m". The field sets bounds.

    Raises ValueError.
    """
    time_s = _seconds(value)
    if time_s is None:
        raise ValueError(f'{shown(value)} is not a time; write a number of seconds, or "10s", "250ms", "2m"')
    return time_s


def _seconds(value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(min(value, 10**300))  # an int may exceed the largest float
    if isinstance(value, str) and (match := _DURATION.fullmatch(value)):
        number, unit = match.groups()
        return float(min(Fraction(number) * _MILLISECONDS[unit] / 1000, Fraction(10**300)))
    return None


def format_seconds(time_s: float) -> str:
    """Format a time as a configuration would: "7d", "90m", "10s", "250ms"."""
    time_ms = round(time_s * 1000, 3)
    unit = next((unit for unit in ("d", "h", "m", "s") if time_ms and not time_ms % _MILLISECONDS[unit]), "s")
    if 0 < time_ms < 1000:
        unit = "ms"
    return f"{time_ms / _MILLISECONDS[unit]:.12g}{unit}"


def shown(value: object) -> str:
    """`value` for an error message. Long text is left out: it might be a secret in the wrong field."""
    if isinstance(value, str):
        return json.dumps(value) if len(value) <= 32 else "that value"
    return str(value) if isinstance(value, (int, float, type(None))) else f"a {type(value).__name__}"


def absolute(value: object) -> Path:
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise ValueError(f"must be an absolute path, not {shown(value)}")
    if is_s3_url(value):
        raise ValueError(f'is no path but an s3:// URL; use a tier of type "s3" with {bucket_and_prefix(value)}')
    if not Path(value).is_absolute():
        raise ValueError(f"must be an absolute path, and {shown(str(value))} is relative")
    return Path(os.path.normpath(value))


def is_s3_url(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower().startswith("s3://")


def bucket_and_prefix(url: object) -> str:
    """The fields to use in place of an s3:// URL, with their values if those may be shown."""
    bucket, _, prefix = str(url).strip()[len("s3://") :].strip("/").partition("/")
    names = [f'{field}: "{name}"' for field, name in (("bucket", bucket), ("prefix", prefix)) if name]
    # Long text might be a secret in the wrong field.
    values = f" ({', '.join(names)})" if bucket and max(len(bucket), len(prefix)) <= 32 else ""
    return f"bucket and prefix{values}"


def _text(value: object, what: str, pattern: re.Pattern[str], longest: int) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be {what}, not {shown(value)}")
    if len(value) > longest or not pattern.fullmatch(value):
        raise ValueError(f"{shown(value)} is not {what}")
    return value


def bucket(value: object) -> str:
    if is_s3_url(value):
        raise ValueError(f"is an s3:// URL; use {bucket_and_prefix(value)}")
    return _text(value, "a bucket name (3 to 255 letters, digits, dots, dashes or underscores)", _BUCKET, 255)


def prefix(value: object) -> str:
    if is_s3_url(value):
        raise ValueError(f"is an s3:// URL; use {bucket_and_prefix(value)}")
    text = value.strip("/") if isinstance(value, str) else value
    what = "a prefix (1 to 512 characters: letters, digits, !_.*'()=- and single slashes between them)"
    name = _text(text, what, _PREFIX, 512)
    if any(part in (".", "..") for part in name.split("/")):
        raise ValueError(f"{shown(name)} must not have . or .. as a part")
    return name


def region(value: object) -> str | None:
    return None if value is None else _text(value, "a region name", re.compile(r"[A-Za-z0-9-]+"), 64)


def endpoint(value: object) -> str | None:
    if value is None:
        return None
    if is_s3_url(value):
        raise ValueError(f"is an s3:// URL; use {bucket_and_prefix(value)}, and no endpoint for AWS")
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


def bare_off(value: object) -> object:
    """YAML reads a bare `off` as False."""
    return "off" if value is False else value


def file_backend(value: object) -> object:
    """Raises ValueError for NIXL's batched GDS plugin, with the reason, and for what `auto` is; other values are the
    field's business."""
    if value == "gds":
        raise ValueError('"gds" is refused, because NIXL ends a short read through it as done; use "gds_mt"')
    if value == "native":
        raise ValueError('"native" was removed: leave backend out, which is that for slabs')
    return value


def environment_name(value: object) -> str | None:
    # The value may be a pasted key, so no message shows it.
    if value is None:
        return None
    looks_secret = isinstance(value, str) and len(value) >= 32 and "_" not in value
    if not isinstance(value, str) or looks_secret or not _ENVIRONMENT_NAME.fullmatch(value):
        raise ValueError("must be the name of an environment variable, not the secret itself")
    return value
