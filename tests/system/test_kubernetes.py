"""docker/kubernetes/, as kubectl renders it: what the API server would take, with parts that fit each other and our own
configuration."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from nixl_tiers.config import schema
from nixl_tiers.config.warnings import warnings_of
from tests.support.dashboard import rules
from tests.support.kubernetes import KUBERNETES, NAMES, ROOT, folder, kubectl, parts, render, rendered

ENGINE_BYTES: Final = 32 << 30
"""The least that vLLM and the movers need beside the cpu tier."""
GUIDE: Final = ROOT / "docs/guide/deploy.md"
PAGES: Final = (GUIDE, ROOT / "docs/guide/kubernetes.md")
ENGINES: Final = ("base", "hostpath", "ephemeral", "retained", "routing")
"""What has pods."""


def by_kind(name: str) -> dict[str, dict[str, Any]]:
    found = {part["kind"]: part for part in rendered(name)}
    assert len(found) == len(rendered(name))
    return found


def set_of(name: str) -> dict[str, Any]:
    """The spec of its Deployment or StatefulSet."""
    (spec,) = (part["spec"] for part in rendered(name) if "template" in part.get("spec", ()))
    assert isinstance(spec, dict)
    return spec


def pod_of(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = set_of(name)["template"]["spec"]
    return spec


def volumes_of(name: str) -> dict[str, Any]:
    claims = [
        {"name": each["metadata"]["name"], "claim": each} for each in set_of(name).get("volumeClaimTemplates", ())
    ]
    return {volume["name"]: volume for volume in (*pod_of(name)["volumes"], *claims)}


def engine_of(name: str) -> dict[str, Any]:
    (container,) = pod_of(name)["containers"]
    assert isinstance(container, dict)
    return container


def argument(name: str, option: str) -> str:
    args = engine_of(name)["args"]
    return str(args[args.index(option) + 1])


@pytest.fixture
def config(name: str, tmp_path: Path) -> Any:
    """As the engine reads it: the argument names a file of the ConfigMap."""
    for file, text in by_kind(name)["ConfigMap"]["data"].items():
        (tmp_path / file).write_text(text)
    mounted = {mount["name"]: mount["mountPath"] for mount in engine_of(name)["volumeMounts"]}["tiers"]
    given = argument(name, "--kv-transfer-config")
    assert f'"{mounted}/' in given
    return schema.load(given.replace(mounted, str(tmp_path)))


def size(quantity: str) -> int:
    return int(quantity.removesuffix("Gi")) << 30


@pytest.mark.parametrize("name", NAMES)
def test_published_schemas_take_it(name: str) -> None:
    """Not those of the Prometheus operator, which are in no package."""
    validator = pytest.importorskip("kubernetes_validate")
    for part in rendered(name):
        if "coreos" not in part["apiVersion"]:
            validator.validate(part, validator.latest_version(), strict=True)


@pytest.mark.parametrize("name", ENGINES)
def test_pod_fits_its_configuration(config: Any, name: str) -> None:
    """Volumes, memory, and the time to finish requests and flush rows, of which vLLM gives an engine none without
    --shutdown-timeout."""
    assert warnings_of(config) == []
    *disks, objects = config.storage
    assert isinstance(objects, schema.S3Config)
    assert objects.prefix
    assert [disk.require_mount for disk in disks] == [True] * (name != "base")
    engine, pod, volumes = engine_of(name), pod_of(name), volumes_of(name)
    (doctor,) = pod["initContainers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in engine["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    seen = {mount["mountPath"]: mount["name"] for mount in doctor["volumeMounts"]}
    assert seen.items() <= mounts.items()
    assert {"/etc/kv", *(str(disk.path.parent) for disk in disks)} <= set(seen)
    assert {"name": "kv-s3"} in [source["secretRef"] for source in doctor["envFrom"]]
    assert doctor["image"] == engine["image"]
    assert volumes[mounts["/etc/kv"]]["configMap"]["name"] == by_kind(name)["ConfigMap"]["metadata"]["name"]
    if name in ("ephemeral", "retained", "routing"):
        kv = volumes["kv"]
        claim = (kv["claim"] if name == "retained" else kv["ephemeral"]["volumeClaimTemplate"])["spec"]
        assert disks[0].capacity < 0.95 * size(claim["resources"]["requests"]["storage"]), "beside `min_free`"
    resources = engine["resources"]
    shared = sum(
        size(each["emptyDir"]["sizeLimit"]) for each in pod["volumes"] if each.get("emptyDir", {}).get("medium")
    )
    assert shared
    assert size(resources["limits"]["memory"]) >= config.cpu.capacity + shared + ENGINE_BYTES
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == doctor["resources"]["limits"]["memory"]
    timeout_s = int(argument(name, "--shutdown-timeout"))
    assert config.flush_on_exit_s + 60 <= timeout_s
    _, before_s = engine["lifecycle"]["preStop"]["exec"]["command"]
    assert timeout_s + int(before_s) + 10 < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(("exit_code", "starts"), [(0, True), (1, True), (2, False)])
def test_a_warning_of_the_doctor_starts_the_engine_and_what_is_broken_does_not(
    exit_code: int, starts: bool, tmp_path: Path
) -> None:
    (doctor,) = pod_of("base")["initContainers"]
    fake = tmp_path / "nixl-tiers"
    fake.write_text(f'#!/bin/sh\n[ "$*" = "doctor /etc/kv/tiers.yaml" ] && exit {exit_code}\nexit 2\n')
    fake.chmod(0o755)
    done = subprocess.run(doctor["command"], check=False, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert (done.returncode == 0) is starts


@pytest.mark.parametrize("name", ["hostpath"])
def test_hostpath_is_the_nodes_own_and_must_be_mounted(config: Any, name: str) -> None:
    pod, deployment = pod_of(name), set_of(name)
    (kv,) = (volume["hostPath"] for volume in pod["volumes"] if volume["name"] == "kv")
    assert kv["type"] == "Directory", "DirectoryOrCreate would fill the root disk where the disk is not mounted"
    # One part of the path a pod: two pods never meet on a node, not even during an update.
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["labelSelector"] == deployment["selector"]
    assert deployment["strategy"]["rollingUpdate"]["maxSurge"] == 0


@pytest.mark.parametrize("name", ENGINES)
def test_pods_are_what_the_restricted_pod_security_standard_takes(name: str) -> None:
    """But for hostPath, which no standard but `privileged` takes."""
    pod = pod_of(name)
    context = pod["securityContext"]
    assert context["runAsNonRoot"]
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert context["fsGroup"] == context["runAsUser"] == context["runAsGroup"] > 0
    for container in (*pod["initContainers"], *pod["containers"]):
        rights = container["securityContext"]
        assert rights == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        home = {each["name"]: each.get("value") for each in container["env"]}
        assert home["HOME"] in {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert home["USER"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert "HF_HOME" not in home or mounts[home["HF_HOME"]] != mounts[home["HOME"]], "a claim may hold it"
    kinds = {kind for volume in volumes_of(name).values() for kind in volume if kind != "name"}
    assert kinds - {"hostPath"} <= {"configMap", "emptyDir", "ephemeral", "claim"}
    assert ("hostPath" in kinds) is (name == "hostpath")
    assert not pod["automountServiceAccountToken"]
    assert not pod.get("hostNetwork")


@pytest.mark.parametrize("name", ENGINES)
def test_names_and_labels_fit_each_other(name: str) -> None:
    found = by_kind(name)
    labels = set_of(name)["template"]["metadata"]["labels"]
    service, monitor = found["Service"], by_kind("monitoring")["ServiceMonitor"]["spec"]
    assert set_of(name)["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    ports = {port["name"] for port in engine_of(name)["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert {each["port"] for each in monitor["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}
    assert pod_of(name)["enableServiceLinks"] is False, "else VLLM_PORT is the Service's URL, which vLLM refuses"
    for probe in ("startupProbe", "readinessProbe"):
        assert engine_of(name)[probe]["httpGet"]["port"] in ports
    (gpu,) = (each for each in pod_of(name)["tolerations"])
    assert gpu["key"] in engine_of(name)["resources"]["limits"]


def test_monitoring_has_the_usual_label_and_all_rules() -> None:
    found = by_kind("monitoring")
    assert {part["metadata"]["labels"]["release"] for part in found.values()} == {"kube-prometheus-stack"}
    (group,) = found["PrometheusRule"]["spec"]["groups"]
    assert group["rules"] == rules()


ON_A_CLUSTER: Final = {
    *("apply", "delete", "exec", "get", "label", "logs", "patch", "port-forward", "rollout", "taint"),
}
"""Verbs of kubectl in the guide that ask a cluster. The page's section on what has been run names them."""


def blocks_of(language: str, *pages: Path) -> list[str]:
    return [block for page in pages for block in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)]


def commands() -> list[list[str]]:
    """Of kubectl, in the guide, also within the text and within others."""
    text = "".join(page.read_text() for page in PAGES)
    blocks = "".join(blocks_of("bash", *PAGES))
    found = re.findall(r"(?:^|\()(kubectl [^|&)\n]+)", blocks, re.MULTILINE) + re.findall(r"`(kubectl -n [^`]+)`", text)
    return [shlex.split(line, comments=True) for line in found]


def verb(command: list[str]) -> str:
    return command[3] if command[1] == "-n" else command[1]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_command_of_the_guide_is_what_kubectl_takes(command: list[str], tmp_path: Path) -> None:
    """Those that make something are run for their output only, those on a cluster until they find none."""
    places = [ROOT / word for word in command if word.startswith("docker/kubernetes/")]
    assert all(place.parent == KUBERNETES / "overlays" and place.is_dir() for place in places)
    program = kubectl()
    (tmp_path / "kv-s3.env").write_text("AWS_ACCESS_KEY_ID=a\nAWS_SECRET_ACCESS_KEY=b\n")
    (tmp_path / "credentials").write_text("[default]\n")
    (tmp_path / "docker").symlink_to(ROOT / "docker")
    nowhere = {**os.environ, "KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)}
    dry = ["--dry-run=client", "-o", "yaml"] if verb(command) == "create" else []
    if verb(command) in ON_A_CLUSTER:
        dry = ["--server=http://127.0.0.1:1"]
    words = [program, *dry, *command[1:]]
    done = subprocess.run(words, check=False, capture_output=True, text=True, cwd=tmp_path, env=nowhere)
    if verb(command) in ON_A_CLUSTER:
        assert "refused" in done.stderr, done.stderr
        return
    assert verb(command) in {"create", "kustomize"}
    assert done.returncode == 0, done.stderr
    made = parts(done.stdout)
    assert made
    for part in made:
        if part["kind"] == "Secret" and "credentials" not in part["data"]:
            (doctor,) = pod_of("base")["initContainers"]
            assert {"secretRef": {"name": part["metadata"]["name"]}} in doctor["envFrom"]
            assert set(part["data"]) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
        assert len(str(part)) < 1 << 20, "the API server takes no more"


def overlaid(place: Path, overlay: Mapping[str, Any]) -> dict[str, Any]:
    """What an overlay beside a copy of docker/kubernetes renders, by kind; Kubernetes' schemas take it."""
    validator = pytest.importorskip("kubernetes_validate")
    shutil.copytree(KUBERNETES, place / "kubernetes")
    (place / "kustomization.yaml").write_text(json.dumps(overlay))
    (place / "tiers.yaml").write_text("tiers: [{type: cpu, capacity: 1GiB}]\n")
    made = {part["kind"]: part for part in render(place)}
    for part in made.values():
        validator.validate(part, validator.latest_version(), strict=True)
    return made


def test_overlay_of_the_guide_changes_what_it_says(tmp_path: Path) -> None:
    (text,) = (block for block in blocks_of("yaml", GUIDE) if "kind: Kustomization" in block)
    overlay = yaml.safe_load(text)
    made = overlaid(tmp_path, overlay)
    spec = made["Deployment"]["spec"]
    assert spec["replicas"] == 8
    pod = spec["template"]["spec"]
    (image,) = overlay["images"]
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["image"] == f"{image['newName']}:{image['newTag']}"
    (engine,) = pod["containers"]
    (model,) = (each["value"] for each in engine["env"] if each["name"] == "MODEL")
    assert model == "meta-llama/Llama-3.1-8B-Instruct"
    assert len([each for each in engine["args"] if each.startswith("--revision=")]) == 1
    assert pod["nodeSelector"]
    assert pod["imagePullSecrets"]
    (volume,) = (each for each in pod["volumes"] if each["name"] == "tiers")
    assert volume["configMap"]["name"] == made["ConfigMap"]["metadata"]["name"]
    assert made["ConfigMap"]["data"] == {"tiers.yaml": (tmp_path / "tiers.yaml").read_text()}


PATCHES: Final = {
    block.splitlines()[0].partition("#")[2].strip(): yaml.safe_load(block)["patches"]
    for block in blocks_of("yaml", *PAGES)
    if block.startswith("patches:")
}


@pytest.mark.parametrize("name", ENGINES)
def test_patches_of_the_guide_change_what_they_say(name: str, tmp_path: Path) -> None:
    left = dict(PATCHES)

    def patched(what: str) -> Any:
        """The pod with a patch of the guide, and its set's claims."""
        patches = [each for each in left.pop(what) if "target" in each or name != "retained"]  # a target may match none
        resource = name if name == "base" else f"overlays/{name}"
        made = overlaid(tmp_path / what, {"resources": [f"kubernetes/{resource}"], "patches": patches})
        spec = made["StatefulSet" if name == "retained" else "Deployment"]["spec"]
        return spec["template"]["spec"] | {"claims": spec.get("volumeClaimTemplates", [])}

    pod = patched("the hub's files on a claim, ReadWriteMany, that all pods mount")
    (models,) = (each for each in pod["volumes"] if each["name"] == "models")
    assert models == {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}

    pod = patched("without the doctor")
    assert "initContainers" not in pod
    assert pod["containers"] == pod_of(name)["containers"]

    (text,) = (each["patch"] for each in left["without tiers"])
    (command,) = (each for each in commands() if verb(each) == "patch")
    assert json.loads(command[-1].removeprefix("-p=")) == yaml.safe_load(text), "the command for an incident"
    pod = patched("without tiers")
    assert "initContainers" not in pod
    given = argument(name, "--kv-transfer-config")
    args = [each for each in engine_of(name)["args"] if each not in ("--kv-transfer-config", given)]
    assert pod["containers"] == [{**engine_of(name), "args": args}]

    pod = patched("credentials from a file")
    (file,) = re.findall(r"`credentials_file: (\S+)`", PAGES[1].read_text())
    (secret,) = (each for each in pod["volumes"] if "secret" in each)
    (create,) = (each for each in commands() if verb(each) == "create" and "--from-file=credentials" in each)
    assert secret["secret"]["secretName"] in create
    for container in (*pod["initContainers"], *pod["containers"]):
        (mount,) = (each for each in container["volumeMounts"] if each["name"] == secret["name"])
        assert f"{mount['mountPath']}/credentials" == file
        assert "subPath" not in mount, "which is never updated"
        assert "kv-s3" not in [each["secretRef"]["name"] for each in container.get("envFrom", ())]

    assert set(left) == {"the volume of `ephemeral`", "the volume of `retained`"}
    if name in ("ephemeral", "retained"):
        pod = patched(f"the volume of `{name}`")
        own = [each["ephemeral"]["volumeClaimTemplate"] for each in pod["volumes"] if "ephemeral" in each]
        (claim,) = (each["spec"] for each in (*pod["claims"], *own))
        assert claim["storageClassName"] == "topolvm"
        assert claim["resources"] == {"requests": {"storage": "800Gi"}}


def test_router_and_engines_agree() -> None:
    """As far as files say: llm-d has not been run."""
    router = yaml.safe_load((folder("routing") / "router.values.yaml").read_text())["router"]
    (plugins,) = router["epp"]["pluginsCustomConfig"].values()
    picker = yaml.safe_load(plugins)
    assert router["epp"]["pluginsConfigFile"] in router["epp"]["pluginsCustomConfig"]
    (port,) = (each["containerPort"] for each in engine_of("routing")["ports"] if each["name"] == "http")
    assert router["modelServers"]["targetPorts"] == [{"number": port}]
    pods = set_of("routing")["template"]["metadata"]["labels"]
    assert router["modelServers"]["matchLabels"].items() <= pods.items()
    of = {plugin["type"]: plugin.get("parameters", {}) for plugin in picker["plugins"]}
    used = re.findall(r"'(?:pluginRef|prefixMatchInfoProducerName)': '([\w-]+)'", str(picker))
    assert set(used) == set(of) - {"token-producer"}

    producer, args = of["precise-prefix-cache-producer"], engine_of("routing")["args"]
    model, events = args[0], json.loads(argument("routing", "--kv-events-config"))
    named = {each["name"]: each.get("value") for each in engine_of("routing")["env"]}
    assert model == "$(MODEL)"
    assert f"--block-size={producer['tokenProcessorConfig']['blockSizeTokens']}" in args
    extra = json.loads(argument("routing", "--kv-transfer-config"))["kv_connector_extra_config"]
    assert extra["self_describing_kv_events"]
    assert "block_size" not in extra, "a chunk is a block then, and a row is no larger than without a router"
    assert events["topic"] == f"{producer['kvEventsConfig']['topicFilter']}$(POD_IP):{port}@{model}"
    assert of["token-producer"]["modelName"] == named["MODEL"]
    assert of["token-producer"]["vllm"]["url"] == f"http://{by_kind('routing')['Service']['metadata']['name']}:{port}"
    assert "POD_IP" in named
    socket = producer["kvEventsConfig"]["podDiscoveryConfig"]["socketPort"]
    assert events["endpoint"] == f"tcp://*:{socket}"
    assert {"name": "kv-events", "containerPort": socket} in engine_of("routing")["ports"]
    first, second = by_kind("routing")["NetworkPolicy"]["spec"]["ingress"]
    assert first == {"ports": [{"port": "http"}]}
    assert second["ports"] == [{"port": "kv-events"}]
    assert second["from"], "whoever reaches the port reads prompts"
