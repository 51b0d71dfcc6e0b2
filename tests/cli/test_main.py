"""`nixl-tiers config`: a summary, or one sentence with exit code 2; its schema, and namespaces that would go cold."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from nixl_tiers import cli
from nixl_tiers.base.manifest import Description, Manifest, salt_digest
from nixl_tiers.cli.cold_namespaces import why_cold
from nixl_tiers.cli.config import schema_of
from nixl_tiers.config.schema import ConfigError, CpuConfig, FileConfig, S3Config, TiersConfig, load
from nixl_tiers.config.source import ours


def write(folder: Path, text: str, name: str = "tiers.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_file_for_another_machine_is_checked_without_looking_at_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its disk is not mounted here, its certificates and credentials are not there; the rest is as anywhere."""
    (tmp_path / "file").touch()
    s3 = 'type: s3, bucket: kv-cache, endpoint: "https://s3.example", capacity: 1TiB, ca_file: /etc/kv/ca.crt'
    disk = f"type: file, path: {tmp_path}/file/kv, capacity: 1Ei, require_mount: true"
    text = f"tiers: [{{type: cpu, capacity: 64}}, {{{disk}}}, {{{s3}, credentials_file: /etc/kv/credentials}}]"
    file = write(tmp_path, text + "\nprefill_tokens_per_s: 39000\nwait_s: 90")
    assert cli.main(["config", str(file)]) == cli.BAD_INPUT
    capsys.readouterr()
    assert cli.main(["config", "--elsewhere", str(file)]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^warning: (\S+)", shown, re.MULTILINE) == ["tiers[0].capacity:"]
    assert re.findall(r"^ +(?:prefill_tokens_per_s|wait_s) +(\S+)", shown, re.MULTILINE) == ["90s", "39000"]
    file.write_text(text.replace("1TiB", "1TB/s"))
    assert cli.main(["config", "--elsewhere", str(file)]) == cli.BAD_INPUT


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


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["nonsense"], ""),
        (["config"], ""),
        (["doctor", "--nonsense"], ""),
        (["inspect"], "give a PATH"),
        (["inspect", "{}/none"], "does not exist: an engine makes it"),
        (["inspect", "--verify", "{}"], "was never a file tier's path"),
        (["inspect", "s3://no"], "s3://no: "),
        (["inspect", "{}", "--endpoint", "http://127.0.0.1:1"], "--endpoint: is for s3"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    given: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([text.format(tmp_path) for text in given]) == cli.BAD_INPUT
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("nixl-tiers: ")
    assert sentence in output.err
    assert output.err.count("\n") == 1


# --- namespaces that would go cold

OLD = Manifest("a" * 32, Description("my/model", vllm="0.32.0"), 4096, last_used=1_700_000_000)


@pytest.mark.parametrize(
    ("manifest", "salt", "vllm", "why"),
    [
        (OLD, "", "0.32.1+cpu", ""),
        (OLD, "", "0.33.0", "vLLM 0.32 wrote it, and 0.33 may arrange a page of KV cache otherwise"),
        (OLD, "", "0.31.0", "vLLM 0.32 wrote it, and 0.31 may arrange a page of KV cache otherwise"),
        (OLD, "", "", ""),
        (OLD, "pepper", "0.32.0", "it has another salt"),
        (Manifest("b" * 32, Description(vllm="0.32.0", salt=salt_digest("pepper")), 4096), "pepper", "0.32.0", ""),
        (
            Manifest("b" * 32, Description(vllm="0.32.0", salt=salt_digest("pepper")), 4096),
            "",
            "",
            "it has another salt",
        ),
        (Manifest("c" * 32, Description("a store"), 4096), "", "0.33.0", ""),
        (Manifest("d" * 32, Description(vllm="0.32.0"), 4096, epoch=2), "", "0.32.0", "its engine was reset after it"),
    ],
)
def test_reason_is_the_fact_that_differs(manifest: Manifest, salt: str, vllm: str, why: str) -> None:
    found = why_cold(manifest, salt, vllm)
    assert found.startswith(why)
    assert bool(found) == bool(why)


# --- the schema: documented configurations agree with it, and what `load` refuses for its fields does not

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(?:yaml|json)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CPU = {"type": "cpu", "capacity": "1GiB"}
FILE = {"type": "file", "path": "/mnt/kv", "capacity": 1 << 30}


def documented() -> list[Any]:
    """Configurations, and single tiers as such behind a cpu tier."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in BLOCK.findall(page.read_text()):
            read = yaml.safe_load(block)
            if isinstance(read, list) and all(isinstance(each, dict) and "type" in each for each in read):
                found.append({"tiers": [CPU, *read]})
            elif isinstance(read, dict) and ("tiers" in read or "kv_connector" in read):
                found.append(ours(read))
    return found


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = schema_of()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_every_documented_configuration_agrees(validator: jsonschema.Draft202012Validator) -> None:
    found = documented()
    assert len(found) >= 10
    for each in found:
        validator.validate(each)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tiers": CPU},
        {"tiers": [CPU], "wait": 1},
        {"tiers": [CPU], "wait_s": 3601},
        {"tiers": [CPU], "wait_s": 0},
        {"tiers": [CPU], "replicas": "2"},
        {"tiers": [CPU], "on_reset": "no"},
        {"tiers": [CPU | {"capacity": [1]}]},
        {"tiers": [{"type": "cpu"}]},
        {"tiers": [CPU, FILE | {"pth": "/mnt"}]},
        {"tiers": [CPU, FILE | {"write": "sometimes"}]},
        {"tiers": [CPU, FILE | {"movers": 1}]},
        {"tiers": [CPU, {"type": "s3", "capacity": "1GiB"}]},
        {"tiers": [CPU], "quotas": {"*": {"share": 20}}},
    ],
)
def test_what_is_refused_for_its_fields_disagrees(given: Any, validator: jsonschema.Draft202012Validator) -> None:
    with pytest.raises(ConfigError):
        load(given)
    assert not validator.is_valid(given)


def test_every_field_is_there_with_its_meaning() -> None:
    schema = schema_of()
    parts = {"": schema, **schema["$defs"]}
    for model in (TiersConfig, CpuConfig, FileConfig, S3Config):
        declared = parts["" if model is TiersConfig else model.__name__]["properties"]
        assert set(declared) == set(model.model_fields)
        assert all(each["description"] for each in declared.values())
