"""`nixl-tiers config FILE`: a summary, or one sentence and exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from nixl_tiers import cli
from nixl_tiers.config import Write


def write(folder: Path, text: str) -> Path:
    path = folder / "tiers.yaml"
    path.write_text(text)
    return path


def test_a_sound_configuration_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(
        tmp_path,
        f"""
        tiers:
          - {{type: cpu, capacity: 64GiB}}
          - {{type: file, path: {tmp_path / "kv"}, capacity: 1TiB}}
          - {{type: s3, bucket: kv-cache, endpoint: "http://127.0.0.1:9000", capacity: 10TiB, write: "off"}}
        model_id: llama@3
        """,
    )
    assert cli.main(["config", str(file)]) == 0
    text = capsys.readouterr().out
    for part in (
        "64 GiB",
        str(tmp_path / "kv"),
        "kv-cache/nixl-tiers at http://127.0.0.1:9000",
        "read only",
        "llama@3",
    ):
        assert part in text
    assert not (tmp_path / "kv").exists(), "a check changes nothing"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tiers: [{type: cpu, capacity: 64}, {type: file, path: kv, capacity: 1TiB}]", "tiers[1].path: must be an"),
        ("tiers: [{type: cpu, capacity: 64}, {type: file, path: /proc/version, capacity: 1TiB}]", "tiers[1].path: ca"),
        ("tiers: [{type: cpu, capacity: much}]", 'tiers[0].capacity: "much" is not a size'),
    ],
)
def test_a_bad_one_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    assert cli.main(["config", str(write(tmp_path, text))]) == cli.BAD_INPUT
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert sentence in told.err


@pytest.mark.parametrize("write_policy", get_args(Write))
def test_every_write_policy_has_words(tmp_path: Path, write_policy: str) -> None:
    tier = f"{{type: file, path: {tmp_path}, capacity: 1TiB, write: '{write_policy}'}}"
    assert cli.main(["config", str(write(tmp_path, f"tiers: [{{type: cpu, capacity: 64}}, {tier}]"))]) == 0


def test_what_stands_on_vllms_command_line_is_taken_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    extra = '{"spec_name": "NixlTiersSpec", "blocks_per_chunk": 2, "tiers": [{"type": "cpu", "capacity": "64G"}]}'
    whole = f'{{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {extra}}}'
    assert cli.main(["config", whole]) == 0
    assert "59.6 GiB" in capsys.readouterr().out
    assert cli.main(["config", whole.replace("NixlTiersSpec", "CPUOffloadingSpec")]) == cli.BAD_INPUT
    assert capsys.readouterr().err.startswith("nixl-tiers: kv_connector_extra_config.spec_name: must be")


def test_a_missing_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", str(tmp_path / "none.yaml")]) == cli.BAD_INPUT
    assert "none.yaml: cannot be read" in capsys.readouterr().err


def test_the_demo_refuses_a_prompt_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--prompt-tokens", "9000", "--out", str(tmp_path / "out")]) == cli.BAD_INPUT
    assert "--prompt-tokens: must be from 512 to 8176" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
