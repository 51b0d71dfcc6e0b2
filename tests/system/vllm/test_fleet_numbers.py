"""The dashboard's numbers of many engines in a cluster: bytes count once for each place, not for each pod."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("vllm")

from nixl_tiers.base import mounts
from nixl_tiers.base.metrics import INFO_LABELS
from nixl_tiers.config import schema
from nixl_tiers.vllm.metrics import Reporter, info_labels, traits
from tests.support.dashboard import chosen, panels
from tests.support.prometheus import program

GIB: Final = 1 << 30
CPU: Final = {"type": "cpu", "capacity": "64GiB"}
S3: Final = {"type": "s3", "bucket": "kv-cache", "prefix": "m", "endpoint": "http://s:1", "capacity": "20TiB"}
FLEETS: Final[dict[str, dict[str, Any]]] = {
    "bucket": S3,
    "replicas": {"type": "file", "path": "/mnt/nvme/kv", "capacity": "800GiB"},
    "nodes": {"type": "file", "path": "/mnt/nvme/kv", "capacity": "100GiB"},
}
"""By namespace: what each of its eight pods is configured with beside host memory. Those of `nodes` are on nodes of
their own, those of `replicas` on one."""
MOUNTED: Final = "27 1 259:1 / / rw - ext4 /dev/nvme0n1p1 rw\n40 27 259:3 / /mnt/nvme rw - xfs /dev/nvme1n1 rw\n"


def series(namespace: str, pod: int) -> list[dict[str, str]]:
    """What its engine shows: the tiers are full, as far as it knows."""
    config = schema.load({"tiers": [CPU, FLEETS[namespace]]})
    capacity = {"cpu": config.cpu.capacity, config.names[0]: config.storage[0].capacity}
    known = 0 if pod == 3 else 1  # one that has just started has listed nothing
    totals = {name: {"used_bytes": known * most, "capacity_bytes": most} for name, most in capacity.items()}
    cluster = {"namespace": namespace, "pod": f"vllm-{pod}", "instance": f"{namespace}-{pod}"}
    assert not cluster.keys() & {*INFO_LABELS}, "the cluster's would be renamed"
    found = []
    for name, _, labels, value in Reporter(traits(config), info_labels(config, "k" * 32, 1, 1)).levels(totals):
        all_labels = {"model_name": "m", "engine": "0", **dict(labels), **cluster}
        shown = ",".join(f"{label}={json.dumps(text)}" for label, text in all_labels.items())
        found.append({"series": f"{name}{{{shown}}}", "values": f"{value}x1"})
    return found


def panel(title: str, values: dict[str, float], **variables: str) -> dict[str, Any]:
    """What a panel has to show by tier."""
    (query,) = (target["expr"] for each in panels() if each["title"] == title for target in each["targets"])
    samples = [{"labels": f'{{tier="{tier}"}}' if tier else "{}", "value": value} for tier, value in values.items()]
    return {"expr": chosen(query, model="m", **variables), "eval_time": "1m", "exp_samples": samples}


def test_what_engines_share_counts_once_and_one_pod_can_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = program("promtool")
    if tool is None:
        pytest.skip("needs promtool (Debian's package prometheus)")
    (tmp_path / "mountinfo").write_text(MOUNTED)
    monkeypatch.setattr(mounts, "_MOUNTS", tmp_path / "mountinfo")
    shown = []
    for namespace in FLEETS:
        for pod in range(8):
            node = tmp_path / ("node" if namespace == "replicas" else f"node-{pod}")
            node.write_text(node.name)
            monkeypatch.setattr(mounts, "_BOOT", node)
            shown += series(namespace, pod)
    expected = [
        # The two paths of one name are places of their own: on one node, and on eight others.
        panel("Used", {"cpu": 21 * 64 * GIB, "s3": 20 * 1024 * GIB, "file": 1500 * GIB}),
        panel("Used", {"cpu": 64 * GIB, "file": 100 * GIB}, namespace="nodes", pod="vllm-2"),
        panel("Used", {"cpu": 0, "file": 0}, namespace="nodes", pod="vllm-3"),
    ]
    for namespace, tier, used, most in (
        ("bucket", "s3", 20 * 1024 * GIB, 20 * 1024 * GIB),
        ("replicas", "file", 800 * GIB, 800 * GIB),
        ("nodes", "file", 7 * 100 * GIB, 800 * GIB),  # one of eight has listed nothing
    ):
        expected += [
            panel("Used", {"cpu": 7 * 64 * GIB, tier: used}, namespace=namespace),
            panel("May be used", {"cpu": 8 * 64 * GIB, tier: most}, namespace=namespace),
            panel("Budget in use", {"": used / most}, namespace=namespace),  # of storage, not of host memory
        ]
    file = tmp_path / "test.json"  # JSON is YAML
    file.write_text(json.dumps({"tests": [{"interval": "1m", "input_series": shown, "promql_expr_test": expected}]}))
    done = subprocess.run([tool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
