"""The files in docker/: they start what the documents describe, as far as can be tested without Docker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.config import Config
from botocore.exceptions import ClientError

from nixl_tiers.config import schema
from nixl_tiers.config.warnings import warnings_of
from tests.support.servers import ACCESS_KEY, SECRET_KEY, free_ports
from tests.support.waiting import until

COMPOSE = Path(__file__).parents[2] / "docker" / "compose.yaml"
GONE = ("minio/minio", "minio/mc", "quay.io/minio", "bitnami/", "bitnamilegacy/")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return found


def test_services_are_what_compose_takes(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert {name for name, service in services.items() if "profiles" not in service} == {
        "vllm", "seaweedfs", "prometheus", "grafana",
    }  # fmt: skip
    for name, service in services.items():
        image, _, tag = service["image"].partition(":")
        assert tag, f"{name}: an image without a version is another one tomorrow"
        assert tag != "latest"
        assert not image.removeprefix("docker.io/").startswith(GONE), f"{name}: {image} is not published any more"
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name}: the world can reach {port}"
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (COMPOSE.parent / source).exists() if source.startswith(".") else source in compose["volumes"]
        assert set(service.get("depends_on", ())) <= set(services)
        assert not re.search(r"(?<!\$)\$[A-Za-z]", "".join(service.get("command", ()))), "Compose would fill that in"


def test_engine_of_compose_has_a_valid_configuration(compose: dict[str, Any]) -> None:
    vllm = compose["services"]["vllm"]
    config = schema.load(vllm["command"][-1])
    assert warnings_of(config) == []
    (objects,) = (tier for tier in config.storage if isinstance(tier, schema.S3Config))
    seaweedfs = compose["services"]["seaweedfs"]
    assert f"-bucket={objects.bucket}" in seaweedfs["command"]
    assert objects.endpoint == f"http://seaweedfs:{seaweedfs['ports'][0].rpartition(':')[2]}"
    assert (COMPOSE.parent / vllm["build"]["context"] / vllm["build"]["dockerfile"]).exists()
    (files,) = (tier for tier in config.storage if isinstance(tier, schema.FileConfig))
    assert f"kv:{files.path}" in vllm["volumes"]
    # vLLM gives an engine no time at all without it, whatever Docker's grace period.
    timeout_s = int(vllm["command"][vllm["command"].index("--shutdown-timeout") + 1])
    assert config.flush_on_exit_s < timeout_s < int(vllm["stop_grace_period"].removesuffix("s"))


@pytest.fixture(scope="module")
def running(compose: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """The very command of the file, on ports of the test's own."""
    data = tmp_path_factory.mktemp("seaweedfs")
    names = [f"{role}.port{kind}" for role in ("s3", "master", "volume", "filer") for kind in ("", ".grpc")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    service = compose["services"]["seaweedfs"]
    command = [word.replace("/data", str(data)) for word in service["command"]]
    moved = [f"-{name}={port}" for name, port in ports.items()]
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    assert set(service["environment"]) == set(keys)
    with (data / "log").open("wb") as log:
        process = subprocess.Popen(
            [_weed(), *command, "-ip=127.0.0.1", *moved],
            cwd=data,
            env=os.environ | keys,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield ports
        finally:
            process.kill()
            process.wait()


def client_of(ports: dict[str, int], secret_key: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{ports['s3.port']}",
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=secret_key,
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10),
    )


def test_its_health_is_that_the_bucket_is_there_which_needs_the_keys(
    compose: dict[str, Any], running: dict[str, int]
) -> None:
    kind, line = compose["services"]["seaweedfs"]["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    master = f"127.0.0.1:{running['master.port']}.{running['master.port.grpc']}"
    here = line.replace("127.0.0.1:9333", master).replace("weed shell", f"{_weed()} shell")
    assert here != line

    def healthy(line: str) -> bool:
        return subprocess.run(["/bin/sh", "-c", line], timeout=60, check=False).returncode == 0

    until(lambda: healthy(here), "health", 120)
    assert not healthy(here.replace("kv-cache", "no-such-bucket"))
    client = client_of(running, SECRET_KEY)
    client.put_object(Bucket="kv-cache", Key="row", Body=b"row")
    assert client.get_object(Bucket="kv-cache", Key="row")["Body"].read() == b"row"
    with pytest.raises(ClientError, match="403"):
        client_of(running, "another").head_bucket(Bucket="kv-cache")


def test_server_of_the_guide_is_started_as_that_of_compose(compose: dict[str, Any]) -> None:
    guide = (COMPOSE.parents[1] / "docs/guide/shared-bucket.md").read_text()
    (words,) = re.findall(r"^weed (.*)$", guide, re.MULTILINE)
    known = [*compose["services"]["seaweedfs"]["command"], "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    assert [word for word in words.split() if word not in known] == ['-dir="$HOME/kv-s3"']


def _weed() -> str:
    path = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(path) if path.exists() else shutil.which("weed")
    assert found is not None
    return found
