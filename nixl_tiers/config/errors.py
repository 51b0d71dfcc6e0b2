"""Error messages for an invalid configuration: one sentence each, beginning with the field's name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from nixl_tiers.config import fields

_SECRET_FIELD: Final = re.compile(r"secret|passw|token(?!spers)|accesskey|apikey|credential|privatekey")
_SECRET_VALUE: Final = re.compile(r"(AKIA|ASIA)[A-Z0-9]{12,}|://[^/@\s]+@|-----BEGIN [A-Z ]*PRIVATE KEY")


MAX_VALUES: Final = 10_000  # a few lines of YAML aliases can expand to billions of values
# Names that other software uses -> ours.
_OTHER_NAMES: Final = {
    "size": "capacity",
    "max_size": "capacity",
    "directory": "path",
    "dir": "path",
    "ttl": "max_age",
    "url": "endpoint",
}


# Fields of other software -> what to use instead.
_INSTEAD: Final = {
    "cpu_bytes_to_use": 'use the capacity of the "cpu" tier',
    "num_cpu_blocks": 'use the capacity of the "cpu" tier',
    "ssl": "write http: or https: in endpoint",
    "use_ssl": "write http: or https: in endpoint",
}
# Fields that are no more -> what to do instead. First of the top level, then of tiers.
REMOVED: Final = {
    "tp_sizes": "a `salt` of its own keeps an engine's chunks apart",
    "max_amplification": "4 holds for all: models that take more bytes for a byte of KV cache do not start",
    "ready_s": "vLLM waits 3 s for tiers to list what they hold, nixl_tiers.open 10 s; `wait_ready` waits for longer",
    "store": "every chunk is stored; a request limits that with `store` in its kv_transfer_params",
}
_CREDENTIALS: Final = "use the variables of AWS's own chain (AWS_ACCESS_KEY_ID ...), profile or credentials_file"
REMOVED_OF_TIERS: Final = {
    "access_key_env": _CREDENTIALS,
    "secret_key_env": _CREDENTIALS,
    "session_token_env": _CREDENTIALS,
    "sse": "set the bucket's default encryption, which its objects get",
    "sse_key": "set the key in the bucket's default encryption, which its objects get",
    "eviction": "what was used least recently is evicted first, from a bucket what was written first",
    "list_requests_per_hour": "a prefix is listed when its budget needs it, at least 30 s after the last listing",
    "shared": "engines that have the same bucket and prefix share it",
    "max_transfers": "how many run follows from what the server is measured to take, at most 64 each way",
    "staging": "rows are staged where the region has small pages",
    "replicas": "`replicas` of the top level divides paths, too, among all engines that use them",
    "movers": "one mover serves each directory or prefix; how many threads it has follows from the cores",
}
# pydantic's error types. Messages of the first show the value, those of the second only the bound.
_TYPES: Final = {
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
}
_BOUNDS: Final = {
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "finite_number": "must be a finite number",
}


class ConfigError(ValueError):
    """An invalid configuration: one sentence that begins with the field's name."""


def refuse_removed(raw: Mapping[str, Any], tiers: Sequence[type[BaseModel] | None]) -> None:
    """Raise ConfigError for a field that is no more. `tiers`: the models of the configuration's tiers, of which a
    third-party one may have a field of such a name."""
    for name in raw:
        if name in REMOVED:
            raise ConfigError(f"{name}: was removed: {REMOVED[name]}")
    for i, model in enumerate(tiers):
        if model is None:
            continue
        for name in raw["tiers"][i]:
            if name in REMOVED_OF_TIERS and name not in model.model_fields:
                raise ConfigError(f"tiers[{i}].{name}: was removed: {REMOVED_OF_TIERS[name]}")


def refuse_secrets(raw: Mapping[str, Any], pointers: Collection[str]) -> None:
    """Raise ConfigError if a value looks like a secret, without repeating it.

    pointers: fields that say where a secret is kept (a path, a variable); their names may sound like one.
    """
    for number, (place, field, value) in enumerate(_leaves(raw)):
        if number > MAX_VALUES:
            raise ConfigError("tiers: has more values than a configuration can have")
        named = place == f"quotas.{field}" and isinstance(value, Mapping)  # by the user: a tenant may be a tokenizer
        plain = "" if named else re.sub(r"[^a-z]", "", field.lower())
        if (_SECRET_FIELD.search(plain) and field not in pointers) or (
            isinstance(value, str) and _SECRET_VALUE.search(value)
        ):
            raise ConfigError(
                f"{place}: a secret must not be in the configuration; use the AWS credential chain, profile or "
                "credentials_file"
            )


def _leaves(raw: object, place: str = "", field: str = "") -> Iterator[tuple[str, str, object]]:
    """(full name, field name, value) of every value, tables included: `credentials: {...}` must be found."""
    if place:
        yield place, field, raw
    if isinstance(raw, Mapping):
        for name, value in raw.items():
            yield from _leaves(value, f"{place}.{name}" if place else str(name), str(name))
    elif isinstance(raw, (list, tuple)):
        for i, value in enumerate(raw):
            yield from _leaves(value, f"{place}[{i}]", field)


def sentence(
    errors: list[ErrorDetails],
    top: type[BaseModel],
    tiers: Sequence[type[BaseModel] | None],
    known: Mapping[str, type[BaseModel]],
) -> str:
    """One sentence for the most useful of pydantic's errors.

    top: the validated model. tiers: the models of its tiers. known: the built-in models by type ("": TiersConfig).
    """
    # A misspelt required field is also reported as missing; the misspelling is more useful.
    error = min(errors, key=lambda e: e["type"] != "extra_forbidden")
    kind, context, loc = error["type"], error.get("ctx", {}), list(error["loc"])
    in_tier = len(loc) > 2 and loc[0] == "tiers" and isinstance(loc[1], int)
    model = tiers[int(loc[1])] or top if in_tier else top
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    if kind == "extra_forbidden":
        text = _unknown(str(loc[-1]), error["input"], model, known)
    elif kind == "missing":
        text = "this field is missing"
    elif kind == "tier_type":
        text = context["sentence"]
    elif kind in ("literal_error", "enum"):
        text = f"must be {context['expected']}, not {fields.shown(error['input'])}".replace("'", '"')
    elif kind == "value_error":
        text = str(context["error"])
    elif kind.startswith("model_") and fields.is_s3_url(error["input"]):
        text = f'use a tier of type "s3" with {fields.bucket_and_prefix(error["input"])}'
    elif kind in ("model_type", "model_attributes_type"):
        text = f"must be a table of fields, not {fields.shown(error['input'])}"
    elif kind in ("tuple_type", "list_type"):
        text = f"must be a list of tiers, not {fields.shown(error['input'])}"
    elif kind in _TYPES:
        text = f"{_TYPES[kind]}, not {fields.shown(error['input'])}"
    elif kind in _BOUNDS:
        text = _BOUNDS[kind].format(**context)
    else:
        text = error["msg"][0].lower() + error["msg"][1:]
    return f"{place}: {text}" if place else text


def _unknown(name: str, value: object, model: type[BaseModel], models: Mapping[str, type[BaseModel]]) -> str:
    """The message for an unknown field of `model`. models: all models by type ("": TiersConfig)."""
    if fields.is_s3_url(value):
        return f"unknown field; use {fields.bucket_and_prefix(value)}"
    plain = name.lower().replace("-", "_")
    if plain in _INSTEAD:
        return f"unknown field; {_INSTEAD[plain]}"
    owners = [kind for kind, owner in models.items() if plain in owner.model_fields]
    if owners and plain not in model.model_fields:
        at = " and ".join(f'"{kind}"' if kind else "the top level" for kind in owners)
        return f"unknown field here; it belongs to {'each tier' if len(owners) == len(models) - 1 else at}"
    near = difflib.get_close_matches(_OTHER_NAMES.get(plain, plain), list(model.model_fields), n=1)
    return f'unknown field; did you mean "{near[0]}"?' if near else "unknown field"
