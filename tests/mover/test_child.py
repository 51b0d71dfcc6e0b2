"""A mover as its supervisor has it: what is read of it, without secrets, and where it may import from."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from nixl_tiers.mover import child
from nixl_tiers.mover.child import LAST_LINES, LINE_BYTES, Redactor, Stderr, secrets_of
from nixl_tiers.mover.protocol import LOG_FORMAT, MAX_PACKET, Down, Heartbeat, Refused, ToCoordinator, encode

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


def test_password_in_a_url_is_redacted(pipe: tuple[Stderr, int]) -> None:
    """Of a proxy, whose variable's name sounds like no secret."""
    stderr, write_fd = pipe
    line = LOG_FORMAT % "s3" % {"levelname": "WARNING", "message": "no answer of http://me:hunter2@proxy:3128 in 3 s"}
    os.write(write_fd, f"{line}\n".encode())
    assert stderr.read() == [(logging.WARNING, "no answer of http://***@proxy:3128 in 3 s")]


# --- its messages, and its clock


def reading(end: socket.socket, *secrets: str) -> child.Child:
    """Of a mover as much as reads its messages."""
    end.setblocking(False)
    mover = object.__new__(child.Child)
    mover.socket, mover.eof, mover.killed_s, mover._clock = end, False, None, lambda: 0.0
    mover._buffer, mover._redact = bytearray(MAX_PACKET), Redactor(secrets)
    return mover


def test_packets_queued_before_a_reset_are_received() -> None:
    """A mover that leaves with unread packets in its socket resets the connection; its last words are queued before
    that, as when it is refused at once and has not read `Open` yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.send(b"not read")
        theirs.send(encode(Refused("bucket: there is no such thing")))
        theirs.close()
        mover = reading(ours)
        assert [message for message, _ in mover.receive()] == [Refused("bucket: there is no such thing")]
        assert mover.eof


def test_secrets_in_the_texts_of_a_movers_messages_are_redacted() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        mover = reading(ours, "my-secret")
        for message in _with_texts("no my-secret"):
            theirs.send(encode(message))
        assert [message for message, _ in mover.receive()] == _with_texts("no ***")


def _with_texts(text: str) -> list[ToCoordinator]:
    return [Down(text, 7), Refused(text), Heartbeat(1, {"put": text, text: "denied"})]


# --- where it may import from, and which GPUs it sees


def test_only_absolute_entries_of_pythonpath_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f":/one:relative:.:{os.pathsep}/two:")
    assert child.environment({})["PYTHONPATH"] == "/one:/two"
    monkeypatch.setenv("PYTHONPATH", ":")
    assert "PYTHONPATH" not in child.environment({})


@pytest.mark.parametrize(("inherited", "first"), [(None, "0"), ("3,5", "3"), ("GPU-1234", "GPU-1234"), ("", "")])
def test_only_cufile_gets_a_gpu(monkeypatch: pytest.MonkeyPatch, inherited: str | None, first: str) -> None:
    if inherited is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", inherited)
    assert child.environment({"backend": "auto"})["CUDA_VISIBLE_DEVICES"] == ""
    assert child.environment({"type": "s3"})["CUDA_VISIBLE_DEVICES"] == ""
    assert child.environment({"backend": "gds_mt"})["CUDA_VISIBLE_DEVICES"] == first


def test_options_of_the_interpreter_are_at_least_as_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """-P: not the directory of the program, -E and -s: as this process, which may have been started by -I."""
    for ignores, options in ((0, ["-P"]), (1, ["-P", "-E", "-s"])):
        flags = SimpleNamespace(ignore_environment=ignores, no_user_site=ignores)
        monkeypatch.setattr(child, "sys", SimpleNamespace(flags=flags))
        assert child.options() == options
