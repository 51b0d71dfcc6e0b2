"""docker/Dockerfile, built without Docker upon vLLM for CPUs, and in it a pod of docker/kubernetes: by chroot, as the
pod's user, with the pod's volumes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.support import image
from tests.support.kubernetes import recorded
from tests.support.servers import ACCESS_KEY, SECRET_KEY, SeaweedServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(image.lacking()), reason=image.lacking()),
]

VERSION: Final = "7.8.9"
OVERLAY: Final = "ephemeral"
# Of a machine with little memory.
SMALLER: Final = {"cpu": "1GiB", "file": "4GiB", "s3": "4GiB"}


@pytest.fixture(scope="module")
def name() -> Iterator[str]:
    built = image.build(VERSION)
    yield built
    image.buildah("rmi", built)


@pytest.fixture
def container(name: str) -> Iterator[str]:
    made = image.buildah("from", name)
    try:
        yield made
    finally:
        image.buildah("rm", made)


class Pod:
    """The Deployment's pod: what the kubelet makes of its volumes, its secret and its user."""

    def __init__(self, directory: Path, container: str, endpoint: str, bucket: str) -> None:
        (deployment,) = (part for part in recorded(OVERLAY) if part["kind"] == "Deployment")
        self.spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
        self.container = container
        rights = self.spec["securityContext"]
        self.user = f"{rights['runAsUser']}:{rights['runAsGroup']}"
        self._places = {}
        for volume in self.spec["volumes"]:
            place = self._places[volume["name"]] = directory / volume["name"]
            place.mkdir(parents=True)
            if "configMap" in volume:
                (place / "tiers.yaml").write_text(yaml.safe_dump(tiers(endpoint, bucket)))
            else:
                os.chown(place, 0, rights["fsGroup"])
                place.chmod(0o2775)

    def command(self, part: Mapping[str, Any], words: list[str]) -> list[str]:
        """Of one of its containers."""
        read_only = {mount["name"]: ":ro" * mount.get("readOnly", False) for mount in part["volumeMounts"]}
        volumes = {
            self._places[mount["name"]]: mount["mountPath"] + read_only[mount["name"]] for mount in part["volumeMounts"]
        }
        env = {each["name"]: each["value"] for each in part["env"]}
        secret = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        return image.run_command(self.container, words, volumes, self.user, **env, **secret)


def tiers(endpoint: str, bucket: str) -> dict[str, Any]:
    (made,) = (part for part in recorded(OVERLAY) if part["kind"] == "ConfigMap")
    config: dict[str, Any] = yaml.safe_load(made["data"]["tiers.yaml"])
    for tier in config["tiers"]:
        tier["capacity"] = SMALLER[tier["type"]]
    config["tiers"][-1] |= {"endpoint": endpoint, "bucket": bucket}
    return config


def test_image_is_of_this_tree_and_starts_as_that_of_vllm(container: str) -> None:
    assert image.entry_point(container) == ["vllm", "serve"]
    assert image.run(container, ["python3", "-c", "import nixl_tiers; print(nixl_tiers.__version__)"]) == VERSION
    image.run(container, ["test", "!", "-e", "/tmp/nixl_tiers"])


def test_doctor_of_a_pod_has_nothing_to_say_against_it(
    container: str, seaweedfs: SeaweedServer, tmp_path: Path
) -> None:
    pod = Pod(tmp_path / "pod", container, seaweedfs.endpoint, seaweedfs.make_bucket("kv-doctor"))
    # Its plugin for S3 links a library of CUDA 13, which the base has not: that for CUDA 12 is taken then.
    image.run(container, ["python3", "-m", "pip", "uninstall", "--quiet", "--yes", "nixl-cu13"])
    (part,) = pod.spec["initContainers"]
    done = subprocess.run(pod.command(part, part["command"]), check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "s3" in done.stdout
