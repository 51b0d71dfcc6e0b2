"""What an engine asks of its machine before it starts: a mount that does not answer costs its tier, and no time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.config import here as child
from nixl_tiers.config.file import FileConfig
from nixl_tiers.config.s3 import S3Config
from nixl_tiers.config.schema import ConfigError, TiersConfig, load
from nixl_tiers.runtime import here

EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"
CPU = {"type": "cpu", "capacity": "1MiB"}


def file(path: Path, **more: object) -> dict[str, object]:
    return {"type": "file", "path": str(path), "capacity": "64MiB", "min_free": 0, **more}


def all_but(place: int) -> Callable[[Sequence[Callable[[], Any]]], list[Any]]:
    """Of several calls this one never returns."""
    return lambda calls: [None if i == place and len(calls) > 1 else call() for i, call in enumerate(calls)]


def test_mount_that_does_not_answer_holds_up_no_other_tier(tmp_path: Path) -> None:
    config = load({"tiers": [CPU, file(tmp_path / "hung"), file(tmp_path / "deep" / "kv")]})
    found = child.look(config, starting=True, all_of=all_but(0))
    assert [*found.silent] == ["file"]
    assert [*found.identities] == ["file2"]
    assert (tmp_path / "deep" / "kv").is_dir()
    assert not (tmp_path / "hung").exists()


def test_answer_in_time_refuses(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    config = load({"tiers": [CPU, file(tmp_path / "hung"), file(tmp_path / "taken")]})
    assert child.look(config, starting=True, all_of=all_but(0)).error.startswith("tiers[2].path: cannot write to")
    with pytest.raises(ConfigError, match=r"^tiers\[2\]\.path: cannot write to"):
        here.ask(config, starting=True, deadline_s=3.0)
    assert not (tmp_path / "hung").exists(), "nothing is made of a configuration that is refused"


@pytest.mark.parametrize(("answer", "within"), [(b"", "10 s"), (b" ", "3 s"), (b' {"warnings":', "3 s")])
def test_child_without_an_answer_costs_the_tiers_that_it_was_to_look_at(
    answer: bytes, within: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here, "run", lambda *_: answer)
    found = here.ask(load({"tiers": [CPU, file(tmp_path)]}), starting=True, deadline_s=3.0, in_all_s=10.0)
    assert found.silent == {"file": f"it has not answered within {within}, and was not checked"}


COMMON = {"write": "on_evict", "capacity": "3GiB", "max_age": "90m"}
FILE = {"path": ["/a", "/b"], "layout": "slabs", "min_free": "7%", "require_mount": True, "backend": "posix"}
S3 = {"bucket": "kv-cache", "prefix": "p", "endpoint": "https://s:1", "region": "r", "ca_file": "/c"}
EVERY_FIELD: list[dict[str, Any]] = [
    {"type": "file", **FILE, **COMMON},
    {"type": "s3", **S3, "credentials_file": "/d", **COMMON},
    {"type": "s3", **S3, "prefix": "q", "profile": "prod", **COMMON},
]


@pytest.mark.parametrize(
    "config",
    [load({"tiers": [CPU, *EVERY_FIELD]}), *map(load, sorted(EXAMPLES.glob("*.json")))],
    ids=["every field", *(path.stem for path in sorted(EXAMPLES.glob("*.json")))],
)
def test_child_looks_at_what_the_engine_has(config: TiersConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TiersConfig] = []
    monkeypatch.setattr(child, "look", lambda config, **_: seen.append(config) or child.Here())
    here.ask(config, starting=True, deadline_s=3.0)
    assert [(each.storage, each.names) for each in seen] == [(config.storage, config.names)]


def test_every_field_is_sent_to_the_child_above() -> None:
    for model, kind in ((FileConfig, "file"), (S3Config, "s3")):
        given = {name for tier in EVERY_FIELD if tier["type"] == kind for name in tier}
        assert given == set(model.model_fields), "whoever adds a field adds it there"
