"""What the doctor looks at in an S3 tier's prefix: the connection, each right, conditional writes, a trial.

Nothing is written beside an engine of an older release, or with `write: off`. Otherwise everything that is written goes
below a scratch name in the prefix, where it is no row of any engine, and is deleted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.cli.checks.finding import Finding, broken, not_tried, ok, warning
from nixl_tiers.cli.checks.trial import NAME, ROW, SCRATCH, SCRATCH_PREFIX, STALE_S, rows_of, write_read_verify
from nixl_tiers.cli.children import say
from nixl_tiers.config.errors import ConfigError
from nixl_tiers.config.s3 import S3Config
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.s3.answers import REQUEST_ERRORS, code_of, status_of
from nixl_tiers.tiers.s3.client import client_of
from nixl_tiers.tiers.s3.compat import old_engine_now
from nixl_tiers.tiers.s3.conditional import RACERS, conditional_writes_work, most_winners, put_if
from nixl_tiers.tiers.s3.connection import REMEDY, VERSIONED, is_versioned
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.deletes import delete_objects
from nixl_tiers.tiers.s3.names import RowNames

ROWS: Final = 16
ATTEMPTS: Final = 3
_TIMEOUT_S: Final = 5.0
_IN_USE: Final = "for a trial stop the engine, or name another prefix of this bucket"
_DENIED: Final = {"AccessDenied", "AllAccessDisabled", "Forbidden", "403"}
_CREDENTIALS: Final = {
    "InvalidAccessKeyId": "the server does not know this access key",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "ExpiredToken": "the credentials have expired",
    "InvalidToken": "the session token is not valid",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
}


@dataclass(frozen=True)
class Right:
    """One kind of request, and the IAM action that allows it."""

    name: str
    action: str
    below: bool  # of objects below the prefix, else of the bucket
    lacking: str
    """What does not work without it."""

    def denied(self, config: S3Config, code: str) -> Finding:
        """`code`: of the server's answer. Only a denial is a right that is missing."""
        resource = f"arn:aws:s3:::{config.bucket}" + (f"/{config.prefix}/*" if self.below else "")
        if code not in _DENIED:
            return broken(self.name, f"fails ({code})", f"see the server's own log: without it {self.lacking}")
        return broken(self.name, f"denied ({code})", f"allow {self.action} on {resource}: without it {self.lacking}")


LIST: Final = Right("list", "s3:ListBucket", False, "the tier is down, or finds nothing that was stored before")
HEAD: Final = Right("head", "s3:GetObject", True, "rows that other engines have stored are not found")
GET: Final = Right("get", "s3:GetObject", True, "everything stored there is a miss")
PUT: Final = Right("put", "s3:PutObject", True, "nothing is stored there")
DELETE: Final = Right("delete", "s3:DeleteObject", True, "evicted rows stay and use space")


def examine(config: S3Config, token: str, geometry: Geometry = ROW) -> Iterator[Finding]:
    """`token`: names the scratch prefix, which `clean` removes if this is killed. `geometry`: of the rows
    that are tried."""
    say(at=f"connecting to {config.place}")
    try:
        config.check_here(starting=False)
    except ConfigError as error:
        yield broken("credentials", str(error), "set it in the environment of the engine")
        return
    problem = _connection_problem(config)
    try:
        client = _client(config)
    except (TierDown, TierRefused, BotoCoreError, OSError) as error:
        yield broken("credentials", problem or str(error), "see `profile` and `credentials_file`")
        return
    say(at=f"listing {config.place}")
    code = _error_of(lambda: client.list_objects_v2(Bucket=config.bucket, Prefix=f"{config.prefix}/", MaxKeys=1))
    if code in _CREDENTIALS:
        yield broken("credentials", f"{_CREDENTIALS[code]} ({code})", "give the engine credentials that are valid")
        return
    if problem and code not in _DENIED:
        yield broken("connection", problem, "see `endpoint`, `bucket`, `region` and the credentials")
        return
    yield ok("connection", "answers")
    yield LIST.denied(config, code) if code else ok("list", "allowed")
    yield _versioning(client, config)
    yield from _old_rows(client, config)
    owner = _old_engine(client, config)
    if owner:
        yield broken("older release", owner, "stop it, or give it another prefix: until then rows are only read here")
    if config.write == "off" or owner:
        yield from _reading(client, config)
        why = owner or "`write` is off"
        yield not_tried("put, delete", f"{why}: nothing was written here", _IN_USE if owner else "")
        yield not_tried(NAME, f"{why}: nothing was written here", _IN_USE if owner else "")
        return
    try:
        yield from _writing(client, config, token, geometry, connected=not problem and not code)
    finally:
        left = _clean(client, config, token)
    if left:
        yield warning(
            "clean-up",
            f"objects of the trial may be left ({left})",
            f"delete those below {config.prefix}/{SCRATCH_PREFIX}",
        )


def clean(config: S3Config, token: str) -> None:
    """Delete what is below the scratch prefix, and below those that killed doctors have left."""
    _clean(_client(config), config, token)


def _clean(client: Any, config: S3Config, token: str) -> str:
    """The error code of a request that failed, so that something may be left, or ""."""
    request = {"Bucket": config.bucket, "Prefix": f"{config.prefix}/{SCRATCH_PREFIX}"}
    problem = ""
    while True:  # a page has 1000 names at most, and a trial may have more objects
        try:
            page = client.list_objects_v2(**request)
        except REQUEST_ERRORS as error:
            return code_of(error)
        for found in page.get("Contents", ()):
            name = str(found["Key"])
            folder, slash, _ = name.removeprefix(f"{config.prefix}/").partition("/")
            scratch = bool(slash) and SCRATCH.fullmatch(folder) is not None
            old = scratch and time.time() - found["LastModified"].timestamp() > STALE_S
            if old or name.startswith(f"{config.prefix}/{SCRATCH_PREFIX}{token}/"):
                problem = _error_of(partial(_delete, client, config.bucket, name)) or problem
        if not page.get("NextContinuationToken"):
            return problem
        request["ContinuationToken"] = page["NextContinuationToken"]


def _connection_problem(config: S3Config) -> str:
    """Why an engine's tier would be down, in the words of its log, or "". It tries again, as an engine does."""
    problem = ""
    for _ in range(ATTEMPTS):
        control = S3Control(config)
        try:
            control.connect()
        except TierRefused as error:
            return str(error)
        except TierDown as error:
            problem = str(error)
        else:
            return ""
        finally:
            control.close()
    return problem


def _client(config: S3Config) -> Any:
    return client_of(config, connect_s=_TIMEOUT_S, read_s=_TIMEOUT_S, attempts=1)


def _error_of(request: Callable[[], Any]) -> str:
    """ "" if the request succeeds, else S3's error code, or the name of what was raised."""
    try:
        request()
    except REQUEST_ERRORS as error:
        return code_of(error)
    return ""


def _old_engine(client: Any, config: S3Config) -> str:
    """Which engine of an older release uses the prefix now, in words, or ""."""
    try:
        engine = old_engine_now(client, config.bucket, config.prefix)
    except (*REQUEST_ERRORS, KeyError):
        return ""
    return f"engine {engine} of an older release uses this prefix, or has crashed some minutes ago" if engine else ""


def _old_rows(client: Any, config: S3Config) -> Iterator[Finding]:
    """What data-parallel replicas of older releases stored below `<prefix>/<index>/`: nobody counts or loads it."""
    request = {"Bucket": config.bucket, "Prefix": f"{config.prefix}/", "Delimiter": "/"}
    try:
        folders = [str(each["Prefix"]) for each in client.list_objects_v2(**request).get("CommonPrefixes", ())]
        for folder in folders:
            index = folder.removeprefix(f"{config.prefix}/").rstrip("/")
            if not (index.isascii() and index.isdecimal()):
                continue
            names = RowNames(folder.rstrip("/"))
            page = client.list_objects_v2(Bucket=config.bucket, Prefix=folder)
            if any(names.parse(str(each["Key"])) for each in page.get("Contents", ())):
                yield warning(
                    "older rows",
                    f"an older release has stored rows below {folder}, which no engine counts or loads any more",
                    f"nixl-tiers purge s3://{config.bucket}/{folder.rstrip('/')} --all --yes",
                )
    except (*REQUEST_ERRORS, KeyError):
        return


def _versioning(client: Any, config: S3Config) -> Finding:
    try:
        versioned = is_versioned(client, config.bucket)
    except REQUEST_ERRORS as error:
        code = status_of(error) if isinstance(error, ClientError) else type(error).__name__
        return not_tried("versioning", f"is not reported ({code})", "allow s3:GetBucketVersioning, if it may be on")
    return warning("versioning", VERSIONED, REMEDY) if versioned else ok("versioning", "off")


def _reading(client: Any, config: S3Config) -> Iterator[Finding]:
    """HEAD and GET of an object that is not there: whoever may read is answered that."""
    name = f"{config.prefix}/{SCRATCH_PREFIX}none"
    absent = {"404", "NoSuchKey", "NotFound"}
    for right, request in ((HEAD, client.head_object), (GET, client.get_object)):
        code = _error_of(partial(request, Bucket=config.bucket, Key=name))
        yield ok(right.name, "allowed") if not code or code in absent else right.denied(config, code)


def _writing(client: Any, config: S3Config, token: str, geometry: Geometry, *, connected: bool) -> Iterator[Finding]:
    """Each right with one small object, then the trial, if all of them are there."""
    bucket, name = config.bucket, f"{config.prefix}/{SCRATCH_PREFIX}{token}/right"
    say(at=f"writing to {config.place}")
    put = _error_of(lambda: client.put_object(Bucket=bucket, Key=name, Body=b"doctor"))
    yield PUT.denied(config, put) if put else ok("put", "allowed")
    missing = [put]
    if put:
        yield from _reading(client, config)
    else:
        yield _conditional_writes(client, config, f"{SCRATCH_PREFIX}{token}/")
        for right, request in ((HEAD, client.head_object), (GET, client.get_object)):
            code = _error_of(partial(request, Bucket=bucket, Key=name))
            missing.append(code)
            yield right.denied(config, code) if code else ok(right.name, "allowed")
    delete = _error_of(lambda: _delete(client, bucket, name))
    missing.append(delete)
    yield DELETE.denied(config, delete) if delete else ok("delete", "allowed")
    if any(missing) or not connected:
        yield not_tried(NAME, "a request that it needs is denied or fails")
        return
    scratch = f"{config.prefix}/{SCRATCH_PREFIX}{token}"
    rows = rows_of(geometry, ROWS)
    many_windows = 128 * rows * geometry.row_bytes  # of which one is as large as the trial
    own = config.model_copy(update={"prefix": scratch, "capacity": many_windows})
    yield write_read_verify(own, rows, geometry)


def _delete(client: Any, bucket: str, name: str) -> None:
    """As the tier deletes. An answer may be 200 and hold the error."""
    answer = delete_objects(client, bucket, [{"Key": name}])
    for error in answer.get("Errors", ()):
        raise ClientError({"Error": {"Code": str(error.get("Code"))}}, "DeleteObjects")


def _conditional_writes(client: Any, config: S3Config, below: str) -> Finding:
    def put(name: str, body: bytes, **condition: str) -> Any:
        return put_if(client, config.bucket, f"{config.prefix}/{below}{name}", body, condition)

    try:
        works = conditional_writes_work(put, "condition")
        winners = most_winners(put, "race") if works else 0
    except REQUEST_ERRORS as error:
        code = status_of(error) if isinstance(error, ClientError) else type(error).__name__
        return warning("conditional put", f"cannot be tried ({code})")
    so = "only one engine at a time can store below the prefix"
    if works and winners <= 1:
        return ok("conditional put", "works (If-None-Match, If-Match)")
    if works:
        what = f"is not atomic: {winners} of {RACERS} writes with one condition were let through"
        return warning(
            "conditional put", what, "a takeover allows for a second between the test and the write, no more"
        )
    return warning("conditional put", "is not supported by this server", f"use one that supports it: without it {so}")
