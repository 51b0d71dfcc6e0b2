"""`nixl-tiers config FILE` prints a summary, or one sentence with exit code 2."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from nixl_tiers import cli
from nixl_tiers.cli.checks import directory
from nixl_tiers.cli.checks.finding import Status
from nixl_tiers.config.schema import CpuConfig, FileConfig, S3Config, TiersConfig, load
from tests.support.file_tier import file_config


def write(folder: Path, text: str, name: str = "tiers.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_every_set_field_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ca").write_text("")
    fields: dict[str, dict[str, object]] = {
        "cpu": {"type": "cpu", "capacity": "64GiB", "huge_pages": "off"},
        "file": {
            "type": "file", "path": str(tmp_path), "capacity": "1TiB", "layout": "slabs", "backend": "posix",
            "write": "on_evict", "max_age": "7d", "min_free": "7%",
        },
        "s3": {
            "type": "s3", "bucket": "kv-cache", "prefix": "p/q", "endpoint": "https://h:9000", "region": "eu-west-9",
            "capacity": "10TiB", "write": "off", "max_age": "90m",
            "ca_file": str(tmp_path / "ca"), "profile": None, "credentials_file": str(tmp_path / "ca"),
        },
    }  # fmt: skip
    top: dict[str, object] = {
        "model_id": "llama@3", "salt": "pepper", "lora_storage": True, "on_reset": "keep", "wait_s": "2m",
        "probe_s": "300ms", "flush_on_exit_s": "17s", "replicas": 5,
    }  # fmt: skip
    shown = _shown(fields, top, capsys)
    others = {"64GiB": "64 GiB (68719476736 bytes)", "1TiB": "1 TiB (1099511627776 bytes)"}
    others |= {"10TiB": "10 TiB (10995116277760 bytes)", "True": "true", "None": "none"}
    for kind, block in {**fields, "all": top}.items():
        for name in block.keys() - {"type"}:
            expected = others.get(str(block[name]), str(block[name]))
            assert shown[kind][name].splitlines()[0] == expected, name
    assert "credentials" not in shown["s3"]


def test_every_relevant_default_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers: dict[str, dict[str, object]] = {
        "cpu": {"type": "cpu", "capacity": "64GiB"},
        "file": {"type": "file", "path": str(tmp_path), "capacity": "1TiB"},
        "s3": {"type": "s3", "bucket": "kv-cache", "capacity": "10TiB"},
    }
    shown = _shown(tiers, {}, capsys)
    assert "](" not in str(shown), "a link for the docs"
    for kind, model in (("cpu", CpuConfig), ("file", FileConfig), ("s3", S3Config), ("all", TiersConfig)):
        for name, field in model.model_fields.items():
            if not field.is_required():
                value, meaning = shown[kind][name].split("\n", 1)
                assert value.startswith("default: "), name
                assert meaning.strip(), f"{name} has no meaning"
    for kind, names in {"file": ["max_age"], "s3": ["max_age", "endpoint", "credentials"], "all": ["model_id"]}.items():
        for name in names:
            assert shown[kind][name].startswith("default: ")


def _shown(
    tiers: dict[str, dict[str, object]], top: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> dict[str, dict[str, str]]:
    """What the command prints of each field, by the kind of tier, and of "all": its value, and lines of its meaning."""
    assert cli.main(["config", json.dumps({"tiers": list(tiers.values()), **top})]) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    heads = {"cpu": "tiers[0] cpu: 64 GiB", "file": "tiers[1] file: 1 TiB", "s3": "tiers[2] s3: 10 TiB", "all": "all t"}
    shown = {}
    for kind, head in heads.items():
        lines = next(block for block in blocks if block.startswith(head)).splitlines()[1:]
        fields = re.findall(r"^  (\w+) +(.*(?:\n {6}.*)*)", "\n".join(lines), re.MULTILINE)
        shown[kind] = dict(fields)
    return shown


def test_file_for_another_machine_is_checked_without_looking_at_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its disk is not mounted here, its certificates and credentials are not there; the rest is as anywhere."""
    (tmp_path / "file").touch()
    s3 = 'type: s3, bucket: kv-cache, endpoint: "https://s3.example", capacity: 1TiB, ca_file: /etc/kv/ca.crt'
    disk = f"type: file, path: {tmp_path}/file/kv, capacity: 1Ei, require_mount: true"
    text = f"tiers: [{{type: cpu, capacity: 64}}, {{{disk}}}, {{{s3}, credentials_file: /etc/kv/credentials}}]"
    file = write(tmp_path, text)
    assert cli.main(["config", str(file)]) == cli.BAD_INPUT
    capsys.readouterr()
    assert cli.main(["config", "--elsewhere", str(file)]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^warning: (\S+)", shown, re.MULTILINE) == ["tiers[0].capacity:"]
    file.write_text(text.replace("1TiB", "1TB/s"))
    assert cli.main(["config", "--elsewhere", str(file)]) == cli.BAD_INPUT


def test_capacity_that_the_file_system_cannot_hold_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The doctor says the same."""
    file = write(
        tmp_path, f"tiers: [{{type: cpu, capacity: 64Mi}}, {{type: file, path: {tmp_path}/kv, capacity: 1Ei}}]"
    )
    assert cli.main(["config", str(file), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["valid"] is True
    (warning,) = answer["warnings"]
    assert warning.startswith("tiers[1].capacity: 1 EiB do not fit: ")
    (finding,) = directory._file_system(file_config(tmp_path / "kv", "1EiB"), tmp_path)
    assert finding.status is Status.WARNING
    assert finding.change.partition("of")[0] in warning


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tiers: [{type: cpu, capacity: 64}, {type: file, path: kv, capacity: 1TiB}]", "tiers[1].path: must be an"),
        ("tiers: [{type: cpu, capacity: 64}, {type: file, path: /proc/version, capacity: 1TiB}]", "tiers[1].path: ca"),
        ("tiers: [{type: cpu, capacity: much}]", 'tiers[0].capacity: "much" is not a size'),
    ],
)
def test_invalid_configuration_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    assert cli.main(["config", str(write(tmp_path, text))]) == cli.BAD_INPUT
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert sentence in output.err


TIERS = {"tiers": [{"type": "cpu", "capacity": "64GiB"}, {"type": "file", "path": "/mnt/it's kv", "capacity": "1TiB"}]}
WHOLE = {
    "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"spec_name": "NixlTiersSpec", "blocks_per_chunk": 2, **TIERS},
}  # fmt: skip


@pytest.mark.parametrize(
    "given", ["file", "text", "extra", "extra file", "whole", "option", "command line", "one text"]
)
def test_command_that_starts_vllm_has_the_same_configuration(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value, extra = json.dumps(WHOLE), json.dumps(WHOLE["kv_connector_extra_config"])
    forms = {
        "file": [str(write(tmp_path, json.dumps(TIERS)))],
        "text": [json.dumps(TIERS)],
        "extra": [extra],
        "extra file": [str(write(tmp_path, extra, "extra.json"))],
        "whole": [value],
        "option": ["--", "vllm", "serve", "my/model", f"--kv-transfer-config={value}", "--dtype", "float32"],
        "command line": ["--", "python", "-m", "api_server", "--model", "my/model", "--kv-transfer-config", value],
        "one text": [f"vllm serve my/model --kv-transfer-config {shlex.quote(value)}"],
    }
    assert cli.main(["config", "--json", *forms[given]]) == 0
    words = shlex.split(json.loads(capsys.readouterr().out)["command"])
    assert words[:2] == ["vllm", "serve"]
    assert words[2] == ("my/model" if given in ("option", "command line", "one text") else "MODEL")
    assert words[3] == "--kv-transfer-config"
    assert load(words[4]) == load(TIERS)
    printed = json.loads(words[4])
    assert printed["kv_role"] == "kv_both"
    if given not in ("file", "text"):
        assert printed["kv_connector_extra_config"] == json.loads(extra), "other chunks would find nothing stored"


@pytest.mark.parametrize("words", [["vllm", "serve", "m"], ["--kv-transfer-config 'unbalanced"]])
def test_command_line_without_tiers_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--", *words]) == cli.BAD_INPUT
    assert capsys.readouterr().err.startswith("nixl-tiers: --kv-transfer-config: ")
