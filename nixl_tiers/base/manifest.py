"""The manifest of a namespace: a small JSON file beside its rows that says whose they are, for people and their tools.

Nothing trusts it: a manifest that is missing, damaged or wrong changes no row, and no hit. It holds no secret.
"""

from __future__ import annotations

import hashlib
import json
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Self

import msgspec

# Part of the formats on disk and in buckets.
MANIFEST_NAME: Final = "about.json"
FORMAT: Final = 1

MAX_TEXT_BYTES: Final = 256  # of one field
MAX_MANIFEST_BYTES: Final = 8 << 10  # of a manifest that this program writes
RETRY_S: Final = 60.0  # after a write that has failed, or for which there was no room
SALT_DIGEST_BYTES: Final = 4
MAX_TIME_S: Final = 253402300799  # the last second of the year 9999: no calendar here goes on after that


class Description(msgspec.Struct, frozen=True):
    """What an engine says about the rows that it stores. Texts are empty where something is not known."""

    model: str = ""  # as the engine was given it; of a TieredStore, its namespace's name
    revision: str = ""
    dtype: str = ""  # of the KV cache
    layout: str = ""  # of the KV cache in the engine
    chunk_tokens: int = 0
    vllm: str = ""  # its version
    nixl_tiers: str = ""
    salt: str = ""  # `salt_digest` of the configured salt
    note: str = ""  # by the user

    def of(self, salt: str | None) -> Description:
        """The same of an engine with this salt, by this version of nixl_tiers."""
        return msgspec.structs.replace(self, nixl_tiers=_own_version(), salt=salt_digest(salt)).checked()

    def checked(self) -> Description:
        """The same as a manifest may hold it: short, in one line, without the user and password of a URL."""
        texts = {
            name: _plain(value) for name in self.__struct_fields__ if isinstance(value := getattr(self, name), str)
        }
        return msgspec.structs.replace(self, **texts, chunk_tokens=max(0, self.chunk_tokens))


class Manifest(msgspec.Struct, frozen=True):
    """Times are Unix seconds, by the clock of the machine that wrote it."""

    namespace: str  # in hexadecimal
    description: Description
    row_bytes: int
    epoch: int = 0  # not 0: the weights were replaced since the engine began, and the rows are never used again
    engine: str = ""  # which was the last to serve it: HOST/PID/RANDOM
    created: int = 0
    last_used: int = 0  # when an engine last began or ended to serve it

    def encode(self) -> bytes:
        """At most MAX_MANIFEST_BYTES, if its description was checked."""
        fields = {"format": FORMAT, **msgspec.to_builtins(self)}
        return json.dumps(fields, indent=2).encode() + b"\n"

    @classmethod
    def decode(cls, raw: bytes) -> Self | None:
        """None if this is not a manifest of a format that this program knows."""
        try:
            found = msgspec.json.decode(raw, type=dict[str, object])
            if found.pop("format", None) != FORMAT:
                return None
            manifest = msgspec.convert(found, cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return msgspec.structs.replace(
            manifest,
            description=manifest.description.checked(),
            engine=_plain(manifest.engine),
            created=min(max(0, manifest.created), MAX_TIME_S),
            last_used=min(max(0, manifest.last_used), MAX_TIME_S),
        )


def salt_digest(salt: str | None) -> str:
    """What a manifest says of a salt: enough to find its namespaces again. Empty: no salt."""
    if not salt:
        return ""
    return hashlib.blake2b(salt.encode(), digest_size=SALT_DIGEST_BYTES, person=b"nixl-tiers salt").hexdigest()


def minor_release(release: str) -> str:
    """ "0.32" of "0.32.1"; "" if it is no version."""
    match = re.match(r"(\d+\.\d+)", release)
    return match[1] if match else ""


def renewed(found: Manifest | None, wanted: Manifest) -> Manifest:
    """The manifest to write in place of the one that was `found`, whose rows may be older. `wanted`: as it would be if
    it were new."""
    if found is None or found.namespace != wanted.namespace or found.created <= 0:
        return wanted
    return msgspec.structs.replace(wanted, created=min(found.created, wanted.last_used))


def _own_version() -> str:
    try:
        return version("nixl-tiers")
    except PackageNotFoundError:  # a checkout that is not installed
        return ""


def _plain(text: str) -> str:
    scheme, found, rest = text.partition("://")
    if found:
        host, slash, path = rest.partition("/")
        address = f"{host.rpartition('@')[2]}{slash}{path}"
        text = f"{scheme}://{address.partition('?')[0]}"
    line = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return line.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore")
