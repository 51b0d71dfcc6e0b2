"""docker/kubernetes/: what the API server would take, with parts that fit each other and our own configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import yaml

from nixl_tiers.config import schema
from nixl_tiers.config.warnings import warnings_of

FILE: Final = Path(__file__).parents[1] / "docker/kubernetes/vllm.yaml"
ENGINE_BYTES: Final = 32 << 30
"""The least that vLLM and the movers need beside the cpu tier."""

# The fields that are used here, of the Prometheus operator's definition, which is in no package.
LABELS: Final = {"type": "object", "additionalProperties": {"type": "string"}}
ENDPOINT: Final = {
    "type": "object",
    "additionalProperties": False,
    "required": ["port"],
    "properties": {name: {"type": "string"} for name in ("port", "path", "interval", "scheme")},
}
MONITOR: Final = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "ServiceMonitor"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "endpoints"],
            "properties": {
                "selector": {"type": "object", "properties": {"matchLabels": LABELS}, "additionalProperties": False},
                "scrapeProtocols": {"type": "array", "items": {"enum": ["PrometheusText0.0.4"]}},
                "endpoints": {"type": "array", "items": ENDPOINT},
            },
        },
    },
}


@pytest.fixture(scope="module")
def parts() -> dict[str, dict[str, Any]]:
    """By kind."""
    found = list(yaml.safe_load_all(FILE.read_text()))
    kinds = {part["kind"]: part for part in found}
    assert len(kinds) == len(found)
    return kinds


@pytest.fixture(scope="module")
def pod(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = parts["Deployment"]["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def config(parts: dict[str, dict[str, Any]], pod: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As the engine reads it: the argument names a file of the ConfigMap."""
    (container,) = pod["containers"]
    argument = container["args"][container["args"].index("--kv-transfer-config") + 1]
    folder = tmp_path_factory.mktemp("config")
    for name, text in parts["ConfigMap"]["data"].items():
        (folder / name).write_text(text)
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}["tiers"]
    assert f'"{mounted}/' in argument
    return schema.load(argument.replace(mounted, str(folder)))


def size(quantity: str) -> int:
    return int(quantity.removesuffix("Gi")) << 30


def test_published_schemas_take_it(parts: dict[str, dict[str, Any]]) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for kind in ("ConfigMap", "Deployment", "Service"):
        validator.validate(parts[kind], validator.latest_version(), strict=True)
    jsonschema.validate(parts["ServiceMonitor"], MONITOR)
    wrong = {**parts["Service"], "spec": {**parts["Service"]["spec"], "port": 1}}
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, validator.latest_version(), strict=True)


def test_configuration_is_valid_and_shares_one_prefix(config: Any) -> None:
    assert warnings_of(config) == []
    files, objects = config.storage
    assert files.require_mount
    assert objects.shared
    assert objects.prefix


def test_disk_is_the_nodes_own_and_must_be_mounted(config: Any, parts: dict[str, Any], pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts.values()) == set(volumes)
    disk = volumes[mounts[str(config.storage[0].path)]]["hostPath"]
    assert disk["type"] == "Directory", "DirectoryOrCreate would fill the root disk where the disk is not mounted"
    # One part of the path a pod: two pods never meet on a node, not even during an update.
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    deployment = parts["Deployment"]["spec"]
    assert rule["labelSelector"] == deployment["selector"]
    assert deployment["strategy"]["rollingUpdate"]["maxSurge"] == 0
    assert deployment["replicas"] == 2


def test_memory_limit_holds_the_region_and_the_engine(config: Any, pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    limit = size(container["resources"]["limits"]["memory"])
    shared = sum(size(volume["emptyDir"]["sizeLimit"]) for volume in pod["volumes"] if "emptyDir" in volume)
    assert limit >= config.cpu.capacity + shared + ENGINE_BYTES
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


def test_requests_finish_and_rows_are_flushed_before_the_pod_is_killed(config: Any, pod: dict[str, Any]) -> None:
    """vLLM gives an engine no time at all without --shutdown-timeout, whatever the pod's grace period."""
    (container,) = pod["containers"]
    timeout_s = int(container["args"][container["args"].index("--shutdown-timeout") + 1])
    assert config.flush_on_exit_s + 60 <= timeout_s < pod["terminationGracePeriodSeconds"]


def test_names_and_labels_fit_each_other(parts: dict[str, Any], pod: dict[str, Any]) -> None:
    labels = parts["Deployment"]["spec"]["template"]["metadata"]["labels"]
    service, monitor = parts["Service"], parts["ServiceMonitor"]["spec"]
    assert parts["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (container,) = pod["containers"]
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= {
        port["name"] for port in service["spec"]["ports"]
    }
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
    configured = {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
    assert configured == {parts["ConfigMap"]["metadata"]["name"]}
