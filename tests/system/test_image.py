"""docker/Dockerfile, built without Docker upon vLLM for CPUs, and a pod of docker/kubernetes in it: its doctor, its
server, and hits after a restart of the server and of the pod. By chroot, as the pod's user, with the pod's volumes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.support import image, vllm_cpu
from tests.support.kubernetes import rendered
from tests.support.servers import ACCESS_KEY, SECRET_KEY, SeaweedServer
from tests.support.vllm_server import VllmServer
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(image.lacking()), reason=image.lacking()),
]

VERSION: Final = "7.8.9"
MODEL: Final = Path("/model")
OVERLAY: Final = "ephemeral"
GUIDE: Final = image.ROOT / "docs/guide/deploy.md"
# What a machine without a GPU and with little memory needs, and a model that computes faster than storage answers.
SMALLER: Final = {"cpu": "1GiB", "file": "4GiB", "s3": "4GiB"}
ENGINE: Final = ("--enforce-eager", "--block-size", "128", "--max-model-len", "2048")


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
        (deployment,) = (part for part in rendered(OVERLAY) if part["kind"] == "Deployment")
        self.spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
        self.container, self._directory = container, directory
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

    def command(self, part: Mapping[str, Any], words: list[str], more: Mapping[Path, str] | None = None) -> list[str]:
        """Of one of its containers."""
        read_only = {mount["name"]: ":ro" * mount.get("readOnly", False) for mount in part["volumeMounts"]}
        volumes = {
            self._places[mount["name"]]: mount["mountPath"] + read_only[mount["name"]] for mount in part["volumeMounts"]
        }
        env = {each["name"]: each["value"] for each in part["env"]}
        secret = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        return image.run_command(self.container, words, volumes | dict(more or {}), self.user, **env, **secret)

    @cached_property
    def model(self) -> Path:
        """That of the other tests, which is root's."""
        readable = self._directory / "model"
        shutil.copytree(vllm_cpu.build_model(vllm_cpu.cache_directory() / "model"), readable)
        for file in readable.iterdir():
            file.chmod(0o644)
        return readable

    def server(self, log: Path) -> PodServer:
        return PodServer(self, log)


class PodServer(VllmServer):
    def __init__(self, pod: Pod, log: Path) -> None:
        super().__init__(MODEL, ENGINE, {}, log)
        self._pod = pod

    def _command(self, *options: str) -> list[str]:
        (part,) = self._pod.spec["containers"]
        args = [each.replace("$(MODEL)", str(MODEL)) for each in part["args"]]
        assert args != part["args"]
        words = [*image.entry_point(self._pod.container), *args, *options]
        return self._pod.command(part, words, {self._pod.model: f"{MODEL}:ro"})


def tiers(endpoint: str, bucket: str) -> dict[str, Any]:
    (made,) = (part for part in rendered(OVERLAY) if part["kind"] == "ConfigMap")
    config: dict[str, Any] = yaml.safe_load(made["data"]["tiers.yaml"])
    for tier in config["tiers"]:
        tier["capacity"] = SMALLER[tier["type"]]
    config["tiers"][-1] |= {"endpoint": endpoint, "bucket": bucket}
    return config | {"prefill_tokens_per_s": 1, "probe_s": 30}


def sent(server: VllmServer) -> dict[str, Any]:
    """What is answered to the prompt of the guide."""
    (block,) = re.findall(r"^prompt=.*?(?=^```)", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (model,) = re.findall(r'"model\\": \\"(.*?)\\"', block)
    line = block.replace(model, str(MODEL)).replace(":8000/", f":{server.port}/")
    found = subprocess.run(["bash", "-c", line], check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(found.stdout)
    return answer


def cached(answer: dict[str, Any]) -> int:
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def test_image_is_of_this_tree_and_starts_as_that_of_vllm(container: str) -> None:
    assert image.entry_point(container) == ["vllm", "serve"]
    assert image.run(container, ["python3", "-c", "import nixl_tiers; print(nixl_tiers.__version__)"]) == VERSION
    image.run(container, ["test", "!", "-e", "/tmp/nixl_tiers"])


def test_doctor_of_a_pod_has_nothing_to_say_against_it(
    container: str, seaweedfs: SeaweedServer, tmp_path: Path
) -> None:
    pod = Pod(tmp_path / "pod", container, seaweedfs.endpoint, seaweedfs.make_bucket("kv-doctor"))
    (part,) = pod.spec["initContainers"]
    done = subprocess.run(pod.command(part, part["command"]), check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "s3" in done.stdout


@pytest.mark.vllm
def test_what_a_server_has_computed_is_a_hit_after_its_restart_and_in_another_pod(
    container: str, seaweedfs: SeaweedServer, tmp_path: Path
) -> None:
    bucket = seaweedfs.make_bucket("kv-pods")
    first = Pod(tmp_path / "first", container, seaweedfs.endpoint, bucket)
    with first.server(tmp_path / "log") as server:
        server.start(lambda: None)
        computed = sent(server)
        assert cached(computed) == 0
        until(lambda: stored(server, "file") and stored(server, "s3"), "what is computed to be stored", 300)
    assert "nixl_tiers: " in (tmp_path / "log").read_text()
    with first.server(tmp_path / "restarted") as server:
        server.start(lambda: None)
        assert hits(server, computed) == {"file"}
        (part,) = first.spec["containers"]
        report = first.command(part, ["nixl-tiers", "report", server.url])
        assert "file" in subprocess.run(report, check=True, stdout=subprocess.PIPE, text=True).stdout

    second = Pod(tmp_path / "second", container, seaweedfs.endpoint, bucket)
    with second.server(tmp_path / "replaced") as server:
        server.start(lambda: None)
        assert hits(server, computed) == {"s3"}


def hits(server: VllmServer, computed: dict[str, Any]) -> set[str]:
    """The tiers that the same prompt, with the same answer, comes from."""
    again = sent(server)
    assert again["choices"][0]["text"] == computed["choices"][0]["text"]
    assert cached(again) > 0.9 * again["usage"]["prompt_tokens"] - vllm_cpu.BLOCK_TOKENS
    page = server.metrics()
    return {tier for tier in ("cpu", "file", "s3") if page.total("nixl_tiers:hits_total", tier=tier)}


def stored(server: VllmServer, tier: str) -> bool:
    page = server.metrics()
    return page.total("nixl_tiers:chunks", tier=tier) == page.total("nixl_tiers:chunks", tier="cpu") > 0
