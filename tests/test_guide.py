"""README, guide and examples/: configurations are read without a warning, quoted lines are those of the code."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from nixl_tiers.base import mounts
from nixl_tiers.cli import main
from nixl_tiers.config import schema
from nixl_tiers.config.schema import CpuConfig, FileConfig, S3Config, TiersConfig
from nixl_tiers.config.warnings import warnings_of

ROOT: Final = Path(__file__).parents[1]
GUIDE: Final = ROOT / "docs/guide"
PAGES: Final = [ROOT / "README.md", *sorted(GUIDE.glob("*.md"))]
CPU: Final = {"type": "cpu", "capacity": "1GiB"}
POINTED: Final = "/etc/kv/tiers.yaml"  # the file that examples name instead of tiers
EXAMPLES: Final = ROOT / "examples"
CONFIGS: Final = sorted((EXAMPLES / "configs").iterdir())
MODELS: Final = (CpuConfig, TiersConfig, FileConfig, S3Config)


def examples(text: str) -> Iterator[str]:
    """Every configuration in a page, as JSON text: YAML blocks (a list of tiers stands below a cpu tier), JSON blocks,
    values of --kv-transfer-config, files in a ConfigMap, and the Python example's dict."""
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        read = yaml.safe_load(block)
        others = {"scrape_configs", "patches"}
        if isinstance(read, dict) and (others & set(read) or read.get("kind") == "Kustomization"):
            continue  # tests/support/prometheus.py and tests/system/test_kubernetes.py use them
        manifest = isinstance(read, dict) and "apiVersion" in read
        for each in map(yaml.safe_load, read.get("data", {}).values()) if manifest else [read]:
            yield json.dumps({"tiers": [CPU, *each]} if isinstance(each, list) else each)
    yield from (block for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL) if "Statement" not in block)
    yield from re.findall(r"--kv-transfer-config\s+(?:- )?'(.*?)'", text, re.DOTALL)
    yield from re.findall(r"^tiers = ({.*})$", text, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_example_is_read_and_not_warned_of(page: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiers.json"
    file.write_text(json.dumps({"tiers": [CPU]}))
    for source in examples(page.read_text()):
        trial = ["prefill_tokens_per_s: with 1 every hit is loaded, however slow its tier is: for trials only"]
        expected = trial * (page.stem == "start" and '"prefill_tokens_per_s": 1,' in source)
        assert warnings_of(schema.load(source.replace(POINTED, str(file)))) == expected


@pytest.mark.parametrize(
    ("column", "source", "at_least"),
    [
        ("without tiers", "bench/results/gpu-graphs.json", 16),
        ("the tier must give", "docs/guide/sizing.md", 3),
        ("file, after a restart", "bench/results/demo.json", 5),
    ],
)
def test_figures_of_the_readme_are_those_that_are_recorded(column: str, source: str, at_least: int) -> None:
    """Of the table with this column; digits may be left out at the end."""
    tables = re.findall(r"(?:^\|.*\|\n)+", PAGES[0].read_text(), re.MULTILINE)
    (table,) = (table for table in tables if f" {column} |" in table.splitlines()[0])
    recorded = re.findall(r"\d+\.\d+", (ROOT / source).read_text())
    shown = re.findall(r"\d+\.\d+", table)
    assert len(shown) >= at_least
    assert [figure for figure in shown if not any(each.startswith(figure) for each in recorded)] == []


def test_policy_of_a_shared_prefix_has_the_rights_that_are_listed() -> None:
    page = (GUIDE / "shared-bucket.md").read_text()
    (policy,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert len(policy) < 2048, "MinIO takes no more"
    given = {
        (action, resource.partition("/")[1])
        for statement in json.loads(policy)["Statement"]
        for action in statement["Action"]
        for resource in statement["Resource"]
    }
    rows = re.findall(r"^\| `(s3:\w+)` \| (the bucket|`<prefix>/\*`)((?!.* only ).*?) \|", page, re.MULTILINE)
    assert given == {(right, "" if on == "the bucket" else "/") for right, on, _ in rows}
    assert len(given) == 5


def test_output_of_config_in_the_first_run_is_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with a disk there; one whose disk is smaller has a warning too."""
    monkeypatch.setattr(mounts, "ROOT", Path("/proc"))
    page = (GUIDE / "start.md").read_text()
    (shown,) = re.findall(r"\$ nixl-tiers config (?:\S+)\n(.*?)```", page, re.DOTALL)
    (tiers,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "tiers.yaml"
    file.write_text(tiers)
    main(["config", str(file)])
    printed = [line.rstrip() for line in capsys.readouterr().out.replace(str(file), POINTED).splitlines()]
    for line in filter(None, shown.splitlines()):
        assert line == "..." or any(each.startswith(line) for each in printed), line


def test_every_field_is_in_the_guide() -> None:
    listed = set(re.findall(r"[`{ ](\w+)[`:]", "\n".join(page.read_text() for page in PAGES)))
    for model in MODELS:
        assert set(model.model_fields) <= listed


def quotes() -> Iterator[str]:
    """The pieces between the `...` of all that is code in the first column of tables in troubleshooting."""
    for cell in re.findall(r"^\| (.*?) \|", (GUIDE / "troubleshooting.md").read_text(), re.MULTILINE):
        for quote in re.findall(r"`([^`]+)`", cell):
            yield from filter(None, (piece.strip() for piece in quote.split("...")))


def test_every_line_that_troubleshooting_quotes_is_in_the_code() -> None:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "nixl_tiers").rglob("*.py")]
    texts = [
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    fields = [field for model in MODELS for field in model.model_fields]
    known = "\n".join([*texts, *fields, *map(os.strerror, errno.errorcode)])
    found = list(quotes())
    assert len(found) > 70
    # A metric is declared without what Prometheus adds to it.
    assert [quote for quote in found if re.sub(r"_total(\{.*\})?$", "", quote) not in known] == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configuration_is_accepted_and_not_warned_of(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command that `examples/README.md` has."""
    assert main(["config", "--elsewhere", str(path)]) == 0, capsys.readouterr()
    assert capsys.readouterr().out.startswith("the configuration is valid\n")


def test_page_has_every_configuration() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert len(CONFIGS) >= 6
    assert [path.name for path in CONFIGS if f"`{path.name}`" not in page] == []


def test_offline_example_gives_vllm_a_configuration_that_is_read() -> None:
    transfer = runpy.run_path(str(EXAMPLES / "offline.py"))["kv_transfer"](str(EXAMPLES / "configs/laptop.json"))
    assert [tier.type for tier in schema.load(json.dumps(transfer)).tiers] == ["cpu", "file"]
