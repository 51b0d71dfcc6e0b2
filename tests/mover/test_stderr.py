"""A mover's standard error, as the supervisor reads it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from nixl_tiers.mover.child import LAST_LINES, LINE_BYTES, Redactor, Stderr, secrets_of
from nixl_tiers.mover.protocol import LOG_FORMAT

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


@pytest.fixture
def pipe() -> Iterator[tuple[Stderr, int]]:
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    yield Stderr(read_fd, Redactor([SECRET])), write_fd
    os.close(read_fd)
    os.close(write_fd)


def test_log_lines_have_their_level_and_others_are_kept(pipe: tuple[Stderr, int]) -> None:
    stderr, write_fd = pipe
    assert stderr.read() == []
    line = LOG_FORMAT % "file" % {"levelname": "WARNING", "message": "no room"}
    os.write(write_fd, f"{line}\nTraceback\n\nhalf".encode())
    assert stderr.read() == [(logging.WARNING, "no room"), (logging.DEBUG, "Traceback")]
    os.write(write_fd, b" a line\n" * 3)
    assert stderr.read() == [(logging.DEBUG, "half a line"), *[(logging.DEBUG, " a line")] * 2]
    os.write(write_fd, b"".join(b"%d\n" % number for number in range(100)))
    stderr.read()
    assert list(stderr.last) == [str(number) for number in range(100 - LAST_LINES, 100)]
    assert not stderr.eof


def test_a_long_line_is_cut_and_never_shows_part_of_a_secret(pipe: tuple[Stderr, int]) -> None:
    stderr, write_fd = pipe
    for have in range(1, len(SECRET)):
        os.write(write_fd, b"x" * (LINE_BYTES + 1 - have // 2) + SECRET[:have].encode())
        shown = [text for _, text in stderr.read()]
        os.write(write_fd, SECRET[have:].encode() + b"\nnext\n")
        shown += [text for _, text in stderr.read()]
        assert shown[1:] == ["next"]
        assert set(shown[0]) == {"x"}


def test_secrets_are_redacted(pipe: tuple[Stderr, int]) -> None:
    stderr, write_fd = pipe
    os.write(write_fd, f"key {SECRET} in url?X-Amz-Signature=0123abcd and\naws_session_token = 'abc def'\n".encode())
    assert [text for _, text in stderr.read()] == ["key *** in url?X-Amz-Signature=***", "aws_session_token = ***"]


def test_secret_variables_are_found_by_name() -> None:
    environment = {
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": "token-token",
        "AWS_SHARED_CREDENTIALS_FILE": "/etc/credentials",
        "MINE": "mine-mine",
        "OTHER": "other-other",
        "PGPASS": "pgpass-pgpass",
        "HF_AUTH": "hf-auth-hf-auth",
        "SIGNING_KEY": "signing-signing",
        "SECRET_URL": "https://hooks.example/T0/B0",
        "PGPASSFILE": "/home/me/.pgpass",
        "SIGNING_KEY_PATH": "/etc/signing-key",
        "GIT_AUTHOR_NAME": "An Author",
        "MONKEYPATCH": "gevent-all",
    }
    secrets = {SECRET, "token-token", "mine-mine", "pgpass-pgpass", "hf-auth-hf-auth", "signing-signing"}
    assert set(secrets_of(environment, ["MINE"])) == secrets | {"https://hooks.example/T0/B0"}


def test_each_line_of_a_secret_is_redacted() -> None:
    key = f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n  {SECRET[::-1]}\n-----END PRIVATE KEY-----\n"
    redact = Redactor(secrets_of({"SIGNING_KEY": key}, []))
    assert [redact(line) for line in key.splitlines()] == ["***", "***", "  ***", "***"]
    assert redact(f"it is {key!r}") == r"it is '***\n***\n  ***\n***\n'"


def test_short_values_are_ordinary_words() -> None:
    environment = {"TOKENIZERS_PARALLELISM": "false", "USE_KEY": "yes\nno\n"}
    assert Redactor(secrets_of(environment, []))("false, yes or no") == "false, yes or no"


def test_a_secret_longer_than_a_line_is_never_shown_in_part() -> None:
    secret = SECRET * (LINE_BYTES // len(SECRET) + 20)
    read_fd, write_fd = os.pipe()
    stderr = Stderr(read_fd, Redactor([secret]))
    os.write(write_fd, b"x" + secret[:-1].encode())
    shown = [text for _, text in stderr.read()]
    assert len(shown) == 1
    assert SECRET[:2] not in shown[0]
    os.close(write_fd)
    os.close(read_fd)


def test_password_in_a_url_is_redacted(pipe: tuple[Stderr, int]) -> None:
    """Of a proxy, whose variable's name sounds like no secret."""
    stderr, write_fd = pipe
    line = LOG_FORMAT % "s3" % {"levelname": "WARNING", "message": "no answer of http://me:hunter2@proxy:3128 in 3 s"}
    os.write(write_fd, f"{line}\n".encode())
    assert stderr.read() == [(logging.WARNING, "no answer of http://***@proxy:3128 in 3 s")]


def test_eof_ends_the_last_line() -> None:
    read_fd, write_fd = os.pipe()
    stderr = Stderr(read_fd, Redactor([]))
    os.write(write_fd, b"last word")
    os.close(write_fd)
    assert [stderr.read(), stderr.read()] == [[], [(logging.DEBUG, "last word")]]
    assert stderr.eof
    os.close(read_fd)
