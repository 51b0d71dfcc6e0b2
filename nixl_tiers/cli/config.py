"""`nixl-tiers config FILE`: explains a configuration field by field, warns, and prints how to start vLLM with it."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nixl_tiers.cli import OK
from nixl_tiers.cli.cold_namespaces import Stored, installed_vllm, stored
from nixl_tiers.cli.disk_room import DiskRoom
from nixl_tiers.cli.output import Json, print_json
from nixl_tiers.config import schema
from nixl_tiers.config import source as config_source
from nixl_tiers.config.here import Here
from nixl_tiers.config.schema import (
    ConfigError,
    CpuConfig,
    FileConfig,
    S3Config,
    TiersConfig,
    format_size,
)
from nixl_tiers.config.warnings import warnings_given, warnings_of
from nixl_tiers.runtime.here import ask

_MEANINGS: Final = {
    ("write", "through"): "every chunk is written",
    ("write", "on_evict"): "evicted chunks are written",
    ("write", "off"): "read only",
    ("backend", "auto"): "native threads for slabs, where they can be had; else POSIX (both Linux AIO)",
    ("on_reset", "new_epoch"): "after sleep or a reset, chunks stored before are no longer used",
    ("on_reset", "keep"): "after sleep or a reset, chunks stored before stay valid",
    ("lora_storage", True): "chunks of LoRA adapters are stored too",
}
_LINK: Final = re.compile(
    r" \(\[[^]]*\]\([^)]*\)\)|\[([^]]*)\]\([^)]*\)"
)  # of Markdown: the descriptions are docs, too
_CREDENTIALS: Final = ("profile", "credentials_file")
_DEADLINE_S: Final = 3.0
_WIDTH: Final = 100
_INDENT: Final = " " * 6
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_OPTION: Final = "--kv-transfer-config"
_CONNECTOR: Final = {
    "kv_connector": "NixlTiersConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
}  # fmt: skip


def schema_of() -> dict[str, Any]:
    """JSON schema of a configuration, of what `TiersConfig` and its tiers declare. Bounds of fields that may be text,
    which pydantic leaves in words of its own, hold for numbers."""
    bounds = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}
    raw = json.dumps({"$schema": _DIALECT, **TiersConfig.model_json_schema()})
    read: dict[str, Any] = json.loads(raw, object_hook=lambda each: {bounds.get(k, k): v for k, v in each.items()})
    return read


def _print_schema(wanted: bool) -> None:
    if wanted:
        print_json(schema_of())
        raise typer.Exit


def config(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="A .json, .yaml or .yml file, or JSON text. Either may be the whole value of --kv-transfer-config. "
            "Or, after `--`, a whole `vllm serve` command line that has this option.",
        ),
    ],
    vllm: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Version of vLLM to be started; by default that of this environment."),
    ] = None,
    elsewhere: Annotated[
        bool,
        typer.Option(
            "--elsewhere",
            help="It is for another machine: do not look at this one's mounts, files, environment and stored rows.",
        ),
    ] = False,
    as_json: Json = False,
    _schema: Annotated[
        bool,
        typer.Option(
            "--schema", callback=_print_schema, is_eager=True, help="Print a JSON schema of configurations and exit."
        ),
    ] = False,
) -> int:
    """Say whether a configuration is valid, warn about likely mistakes, and explain every field. Print the command that
    starts vLLM with it, and which namespaces in its directories an engine with this version of vLLM would not find, and
    why.

    Nothing is created, and no server is contacted: `nixl-tiers doctor` tests the tiers. --elsewhere is for files of
    other machines, in CI for example.

    Exit code: 0 if it is valid, with or without warnings; 2 if it is not, with an error message on stderr.
    """
    source, model = _source_of(given)
    here = Here()
    try:
        read = schema.load(source)
        if not elsewhere:
            here = ask(read, starting=False, deadline_s=_DEADLINE_S)
    except ConfigError as error:
        raise ConfigError(f"not valid: {error}") from None
    found = [*warnings_of(read), *warnings_given(read, source)]
    release = installed_vllm() if vllm is None else vllm
    there: list[Stored] = []
    if not elsewhere:
        found += [*here.warnings, *(f"{name} tier: {why}" for name, why in here.silent.items())]
    files = [name for name, tier in zip(read.names, read.storage, strict=True) if isinstance(tier, FileConfig)]
    if not elsewhere and here.identities.keys() >= {*files}:  # another look at a mount that hangs would not return
        found += _beyond_the_disk(read)
        there += stored(read, release)
    command, blocks = serve_command(source, model), _blocks(read, here)
    if as_json:
        answer = {
            "valid": True,
            "sections": [block for _, block in blocks],
            "warnings": found,
            "command": command,
            "vllm": release,
        }
        print_json({**answer, "stored": [asdict(each) for each in there]})
        return OK
    count = f", {len(found)} warning{'s' * (len(found) > 1)}" if found else ""
    print(f"the configuration is valid{count}")
    for warning in found:
        print(f"warning: {warning}")
    print()
    print("\n".join(_summary(blocks)))
    print(f"start vLLM with it\n  {command}\n")
    if there:
        print(
            "\n".join([f"stored there, for an engine with vLLM {release or 'of an unknown version'}", *_stored(there)]),
            "\n",
        )
    return OK


def _beyond_the_disk(read: TiersConfig) -> Iterator[str]:
    """Not logged by engines: they are told when a tier stops growing."""
    for i, tier in enumerate(read.tiers):
        for member in tier.members if isinstance(tier, FileConfig) else ():
            with suppress(OSError):
                disk = DiskRoom.of(member)
                if change := disk.shortage(member.capacity):
                    free = f"{format_size(disk.free)} of {format_size(disk.size)} are free at {member.path}"
                    yield f"tiers[{i}].capacity: {format_size(member.capacity)} do not fit: {free}; {change}"


def _stored(there: Sequence[Stored]) -> Iterator[str]:
    for each in there:
        used = time.strftime("%Y-%m-%d", time.gmtime(each.last_used))
        fate = f"goes cold: {each.why_cold}" if each.why_cold else "is found if weights and engine options are the same"
        yield f"  {each.tier}  {each.namespace}  {each.model or 'unknown model'}, last used {used}: {fate}"


def _source_of(given: Sequence[str]) -> tuple[str, str]:
    """The configuration in what was given, and the model, if it is named there."""
    words = list(given)
    if len(words) == 1 and _OPTION in words[0] and not words[0].lstrip().startswith("{"):
        try:
            words = shlex.split(words[0])
        except ValueError as error:
            raise ConfigError(f"{_OPTION}: the command line cannot be read ({error})") from None
    if len(words) == 1:
        return words[0], ""
    for i, word in enumerate(words):
        option, found, value = word.partition("=")
        if option == _OPTION and (found or i + 1 < len(words)):
            return (value if found else words[i + 1]), _model_of(words)
    raise ConfigError(f"{_OPTION}: this command line has none")


def _model_of(words: Sequence[str]) -> str:
    for before, word in zip(["", *words], words, strict=False):
        if before == "--model" or (before == "serve" and not word.startswith("-")):
            return word
        if word.startswith("--model="):
            return word.partition("=")[2]
    return ""


def serve_command(source: str, model: str = "") -> str:
    """The line that starts vLLM with this configuration; a file is named, not repeated."""
    text = source.lstrip()
    if text.startswith("{"):
        raw: Any = config_source.from_json(text)
    else:
        raw = config_source.read(Path(source))
    ours = config_source.ours(raw)
    if ours is not raw and "kv_connector" in raw:
        whole: Mapping[str, Any] = raw
    elif ours is raw and not text.startswith("{"):
        extra = {"spec_name": config_source.SPEC, "config": str(Path(source).absolute())}
        whole = {**_CONNECTOR, "kv_connector_extra_config": extra}
    else:
        given = raw if "spec_name" in raw else ours  # with vLLM's own fields, as the size of chunks
        whole = {**_CONNECTOR, "kv_connector_extra_config": {"spec_name": config_source.SPEC, **given}}
    return f"vllm serve {shlex.quote(model) if model else 'MODEL'} {_OPTION} {shlex.quote(json.dumps(whole))}"


def _summary(blocks: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    lines: list[str] = []
    for title, block in blocks:
        widest = max((len(name) for name in block["fields"]), default=0)
        lines.append(title)
        for name, field in block["fields"].items():
            lines.append(f"  {name:<{widest}}  {'' if field['given'] else 'default: '}{field['value']}")
            if field["meaning"]:
                lines += textwrap.wrap(field["meaning"], _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
        lines.append("")
    return lines


def _blocks(read: TiersConfig, here: Here) -> list[tuple[str, dict[str, Any]]]:
    """For each tier, and for all of them: a title, and every field with its value and meaning."""
    blocks: list[tuple[str, dict[str, Any]]] = []
    for i, (name, tier) in enumerate(zip(("cpu", *read.names), read.tiers, strict=True)):
        place = "host memory of this node" if isinstance(tier, CpuConfig) else tier.place
        title = f"tiers[{i}] {name}: {schema.format_size(tier.capacity)}, {place}"
        if isinstance(tier, FileConfig) and here.on_root & {str(member.path) for member in tier.members}:
            title += ", on the root file system"
        blocks.append((title, {"tier": name, "place": place, "fields": _fields(tier)}))
    return [*blocks, ("all tiers", {"tier": None, "place": None, "fields": _fields(read)})]


def _fields(model: BaseModel) -> dict[str, dict[str, Any]]:
    fields = {}
    for name, field in type(model).model_fields.items():
        if name in ("type", "tiers"):
            continue
        value, given = getattr(model, name), name in model.model_fields_set
        if name == "path" and isinstance(model, FileConfig):
            value = model.place
        meaning = (None if isinstance(value, dict) else _MEANINGS.get((name, value))) or field.description or ""
        fields[name] = _field(_shown(name, value, field), meaning, given=given)
    if isinstance(model, S3Config) and all(getattr(model, way) is None for way in _CREDENTIALS):
        fields["credentials"] = _field("the AWS chain", "environment, files, container or instance role", given=False)
    return fields


def _field(value: str, meaning: str, *, given: bool) -> dict[str, Any]:
    plain = _LINK.sub(lambda link: link[1] or "", meaning).replace("`", "")
    return {"value": value.replace("`", ""), "given": given, "meaning": plain}


def _shown(name: str, value: Any, field: FieldInfo) -> str:
    if value is None:
        return schema.unset(field) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return ", ".join(f"{each}: {100 * quota.share:.4g}%" for each, quota in value.items()) or "none"
    if name in ("capacity", "min_free") and isinstance(value, int):
        return f"{schema.format_size(value)} ({value} bytes)"
    if name == "max_age" or (name.endswith("_s") and not name.endswith("_per_s")):
        return schema.format_seconds(value)
    return str(value) or "none"
