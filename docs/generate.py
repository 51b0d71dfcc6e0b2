"""Write what pages repeat from the code and from measurements, each between two comments: `python docs/generate.py`.

configuration.md    from the fields of the schema (`nixl_tiers/config/schema.py`)
command-line.md     from the commands' options and docstrings (`nixl_tiers/cli/app.py`)
python-api.md       from signatures and docstrings of what `nixl_tiers` exports
metrics.md          from the table in `nixl_tiers/base/metrics.py`
results.md          from `bench/results/*.json`: what was measured, by which command, on which machine and when, and of
                    faults what `make faults` writes there
torture.md          from `bench/results/torture.json`, which `make torture` writes, and `tools/torture/cells.toml`
compatibility.md    from `features.toml`, the tests that it names, and `bench/results/matrix.json` of `make matrix`
comparison.md       from `comparison.toml`
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import nixl_tiers
from nixl_tiers.base.metrics import (
    INFO,
    INFO_LABELS,
    INFO_TEXT,
    METRICS,
    PREFIX,
    PROBLEM,
    PROBLEM_LABELS,
    PROBLEM_TEXT,
    Kind,
)
from nixl_tiers.cli.app import app
from nixl_tiers.config import fields
from nixl_tiers.config.schema import CpuConfig, FileConfig, S3Config, TiersConfig, unset

WIDTH: Final = 100  # of help texts
FOLDERS: Final = tuple(Path(__file__).parent / name for name in ("reference", "internals", "guide"))
RESULTS: Final = Path(__file__).parents[1] / "bench/results"
FAULTS: Final = RESULTS / "faults.json"
TORTURE: Final = RESULTS / "torture.json"
CELLS: Final = Path(__file__).parents[1] / "tools/torture/cells.toml"
TRACKERS: Final = {
    "vllm": "vllm-project/vllm",
    "LMCache": "LMCache/LMCache",
    "sglang": "sgl-project/sglang",
}
MATRIX: Final = RESULTS / "matrix.json"
FEATURES: Final = Path(__file__).with_name("features.toml")
COMPARISON: Final = Path(__file__).with_name("comparison.toml")
PROJECTS: Final = {"ours": "nixl_tiers", "vllm": "vLLM's tiers", "lmcache": "LMCache", "flexkv": "FlexKV"}
TESTS: Final = [Path(__file__).parents[1] / place for place in ("tests/vllm", "tests/system/vllm")]  # of features.toml
BLOCK: Final = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
MODELS: Final[Mapping[str, type[BaseModel]]] = {"cpu": CpuConfig, "file": FileConfig, "s3": S3Config}
# By the schema's own validators, and by pydantic's plain types.
TYPES: Final[Mapping[object, str]] = {
    fields.parse_size: "size",
    fields.parse_min_free: "size or percentage",
    fields.parse_age: "age",
    fields.parse_seconds: "time",
    fields.absolute: "absolute path",
    fields.environment_name: "name of an environment variable",
    str: "text",
    bool: "`true`, `false`",
    int: "whole number",
}
BOUNDS: Final = {"gt": "more than", "ge": "at least", "le": "at most"}


def generate() -> dict[Path, str]:
    """Every page that has generated blocks, as it should be."""
    pages = {page: page.read_text() for folder in FOLDERS for page in sorted(folder.glob("*.md"))}
    return {
        page: BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]]()}\n{match[3]}", text)
        for page, text in pages.items()
        if BLOCK.search(text)
    }


def top_level() -> str:
    rows = [(name, *_row(field)) for name, field in TiersConfig.model_fields.items()]
    return _table(["field", "type", "default", "meaning"], [(f"`{name}`", *row) for name, *row in rows])


def tiers() -> str:
    """One row a field. What several tiers have alike is one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for kind, model in MODELS.items():
        for name, field in model.model_fields.items():
            row = _row(field) if name != "type" else ("`cpu`, `file`, `s3`", *_row(field)[1:])
            rows.setdefault((f"`{name}`", *row), []).append(kind)
    header = ["field", "tier", "type", "default", "meaning"]
    return _table(header, [(name, ", ".join(kinds), *row) for (name, *row), kinds in rows.items()])


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(header)
    return "".join(f"| {' | '.join(row)} |\n" for row in (titles, ["---"] * len(titles), *rows))


def _row(field: FieldInfo) -> tuple[str, str, str]:
    """Type, default, meaning."""
    return _type(field.annotation, field.metadata), _default(field), str(field.description)


def _type(annotation: Any, metadata: Iterable[Any]) -> str:
    """A type's name and bounds, or its values."""
    metadata = [part for given in metadata for part in (given.metadata if isinstance(given, FieldInfo) else [given])]
    if hasattr(annotation, "__metadata__"):
        return _type(annotation.__origin__, (*annotation.__metadata__, *metadata))
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return ", ".join(f"`{value}`" for value in annotation)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "list of tiers"
    if get_origin(annotation) is dict:
        return "table"
    if parts := [part for part in get_args(annotation) if part is not NoneType]:
        return _type(parts[0], metadata)
    named = [TYPES[part.func] for part in metadata if getattr(part, "func", None) in TYPES]
    shown = fields.format_seconds if named == ["time"] else str
    limits = [(text, getattr(part, name, None)) for part in metadata for name, text in BOUNDS.items()]
    return ", ".join(
        [*(named or [TYPES[annotation]]), *(f"{text} {shown(at)}" for text, at in limits if at is not None)]
    )


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "none" if field.default_factory else "required"
    if field.default is None:
        return unset(field) or "none"
    if isinstance(field.default, str):
        return f"`{field.default}`" if field.default else "none"
    return (
        f"`{fields.format_seconds(field.default) if isinstance(field.default, float) else json.dumps(field.default)}`"
    )


def command_line() -> str:
    """Of each command's help the summary, exit codes and options, without rich's boxes: alike on every terminal."""
    group: Any = typer.main.get_command(app)
    texts = []
    for name, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        command.rich_markup_mode = None
        context = typer.Context(command, info_name=f"{app.info.name} {name}", terminal_width=WIDTH)
        shown = re.sub(r"\n +--help +Show this message and exit\.$", "", command.get_help(context))  # alike everywhere
        usage, summary, *others = shown.split("\n\n")
        kept = [part for part in others if re.match(r"  Exit code|\w", part)]  # --help has all of it
        shown = "\n\n".join([usage, summary, *kept])
        texts.append(f"### `{app.info.name} {name}`\n\n```text\n{shown}\n```\n")
    return "\n".join(texts)


def python_api() -> str:
    return "\n".join(_sections())


def _sections() -> Iterator[str]:
    for name in ("open", "TieredStore", "ConfigError"):
        exported = getattr(nixl_tiers, name)
        yield _section("###", f"nixl_tiers.{name}", exported)
        if name == "TieredStore":
            for member, value in vars(exported).items():
                if not member.startswith("_") and inspect.getdoc(value):
                    yield _section("####", member, getattr(value, "__func__", value))


def _section(level: str, title: str, documented: Any) -> str:
    text = f"{level} `{title}`\n\n"
    if inspect.isfunction(documented):
        signature = inspect.signature(documented)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in ("self", "cls")]
        shown = re.sub(r"(?<!')'(?!')", "", str(signature.replace(parameters=kept)))  # those of annotations
        text += f"```python\n{documented.__name__}{shown}\n```\n\n"
    return text + f"{inspect.getdoc(documented)}\n"


def metrics(kind: Kind) -> str:
    """An item a metric, and below it one for each value of its labels beside `tier`; in brackets the number's name."""
    suffix = {Kind.COUNTER: "_total"}.get(kind, "")
    text = ""
    for name, metric in METRICS.items():
        if metric.kind is kind:
            single = next(iter(metric.series)) if len(metric.series) == 1 else ""
            text += f"- {_series(name + suffix, metric.labels)}{_number(kind, single)}: {metric.text}\n"
            for number, series in () if single else metric.series.items():
                value = f'`{metric.labels[-1]}="{series.values[0]}"`'
                text += f"  - {value}{_number(kind, number)}: {series.meaning}\n"
    if kind is Kind.GAUGE:
        text += f"- {_series(PROBLEM, PROBLEM_LABELS)}: {PROBLEM_TEXT}\n- {_series(INFO, INFO_LABELS)}: {INFO_TEXT}\n"
    return text


def _series(name: str, labels: Iterable[str]) -> str:
    return f"`{PREFIX}{name}{{{', '.join(labels)}}}`".replace("{}", "")


def _number(kind: Kind, name: str) -> str:
    return f" (`{name}`)" if name and kind is not Kind.HISTOGRAM else ""


def results() -> str:
    """The tables that are marked for the page; each file is read, so that none lacks what it must say."""
    read = [_result(file) for file in sorted(RESULTS.glob("*.json")) if file not in (FAULTS, TORTURE)]
    return "\n".join(_measurement(result) for result in read if any("page" in table for table in result["tables"]))


def _result(file: Path) -> Any:
    """Raises ValueError unless it says what, where and when, and each row has its columns."""
    result = json.loads(file.read_text())
    if missing := {"title", "machine", "date", "tables"} - result.keys():
        raise ValueError(f"{file.name} lacks {', '.join(sorted(missing))}")
    if any(len(row) != len(table["columns"]) for table in result["tables"] for row in table["rows"]):
        raise ValueError(f"{file.name} has a row of another length than its columns")
    return result


def _measurement(result: Mapping[str, Any]) -> str:
    """What was run where, and the tables that the page shows."""
    text = f"## {result['title']}\n\n"
    text += f"{', '.join(result[part] for part in ('machine', 'versions', 'load', 'date') if part in result)}.\n"
    tables = [table for table in result["tables"] if "page" in table]
    return text + "".join(f"\n{table['title']}:\n{_aligned(table['columns'], table['rows'])}" for table in tables)


def faults() -> str:
    """A line a kind of fault, with the longest stall and the longest recovery of each tier over its cases."""
    result = json.loads(FAULTS.read_text())
    table = result["tables"][0]
    tiers = ("slabs", "files", "s3")
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in (dict(zip(table["columns"], row, strict=True)) for row in table["rows"]):
        tier = row["tier"].removeprefix("file, ").partition(",")[0].partition(" ")[0]
        cells = found.setdefault(re.split(r"[,:] | \(", row["fault"])[0], {})
        cells.setdefault(tier, []).append((float(row["longest stall (s)"]), float(row["recovery (s)"])))
    rows = [
        (fault, *("/".join(f"{max(times):.2f}" for times in zip(*cells.get(tier, ()), strict=True)) for tier in tiers))
        for fault, cells in found.items()
    ]
    return (
        f"`{result['command']}`, {result['date']}: {result['machine']}, {result['load']}. {result['note']}\n\n"
        f"{len(table['rows'])} cases. Longest stall / recovery of a kind of fault, in seconds:\n"
        f"{_aligned(['fault', *tiers], rows)}"
    )


def torture() -> str:
    """A table of the sides on files and one of those on S3: a line a cell, with the class of each side."""
    result = json.loads(TORTURE.read_text())
    table = result["tables"][0]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    mixed = len({row["commit"] for row in rows}) > 1
    found = {
        (row["cell"], row["side"]): ", ".join(
            filter(None, [row["class"].partition(":")[0], _hits(row), row["commit"] if mixed else ""])
        )
        for row in rows
    }
    cells = tomllib.loads(CELLS.read_text())
    whole = "not one run, each result with its commit" if mixed else f"commit {result['commit']}"
    text = f"`{result['command']}`, {result['date']}, {whole}: {result['machine']}, {result['load']}. "
    text += f"Versions: {result['versions']}.\n"
    for sides in result["sides"]:
        shown = [cell for cell in cells if any((cell, side) in found for side in sides)]
        lines = [
            (
                f"[{cell}](#{cell})",
                *(found.get((cell, side), "not tried" if side in cells[cell]["sides"] else "-") for side in sides),
            )
            for cell in shown
        ]
        text += "\n" + _table(["cell", *sides.values()], lines) if lines else ""
    return text


def _hits(row: Mapping[str, Any]) -> str:
    """In how many runs, if not in all; of a cell with fewer hits than its control how many tokens in each run."""
    control, _, runs = str(row["hits"]).partition("; ")
    ended = "" if row["runs"] == "3 of 3" else str(row["runs"])
    fewer = "recomputed" in row["class"] and not set(runs.split(", ")) <= {"0", ""}
    return f"hits {runs.replace(', ', ' / ')} of {control}" if fewer else ended


def torture_cells() -> str:
    """A section a cell: its fault, what to know of it, and who reported it."""
    text = ""
    for name, cell in tomllib.loads(CELLS.read_text()).items():
        reports = "; ".join(f"{_tracked(number)} ({kind}, {state})" for number, kind, state in cell["links"])
        about = f"{cell['fault'][0].upper()}{cell['fault'][1:]}. {cell.get('note', '')}".strip()
        text += f"### {name}\n\n{about} {reports}.\n\n"
    return text


def _tracked(number: str) -> str:
    project, _, issue = number.partition("#")
    return f"[{number}](https://github.com/{TRACKERS[project]}/issues/{issue})"


def features() -> str:
    """A line a feature: what kind of test shows it, the versions of vLLM with which all of its tests passed, and of the
    others why not."""
    table = json.loads(MATRIX.read_text())["tables"][1]
    outcomes = {test: dict(zip(table["columns"][1:], row, strict=True)) for test, *row in table["rows"]}
    rows = []
    for name, feature in tomllib.loads(FEATURES.read_text()).items():
        tests = feature.get("tests", [])
        kind = "real engine" if any(map(runs_an_engine, tests)) else "unit tests" if tests else "no test"
        passed, others = [], []
        for version in table["columns"][1:] if tests else []:
            endings = {outcomes.get(test, {}).get(version, "not run") for test in tests} - {"passed"}
            release = version.rpartition(".")[0]
            if endings:
                others.append(f"{release}: {'; '.join(sorted(each.removeprefix('skipped: ') for each in endings))}")
            else:
                passed.append(release)
        rows.append((name, kind, "<br>".join(filter(None, [", ".join(passed), *others])), feature.get("note", "")))
    return _table(["feature of vLLM", "shown by", "vLLM", "what was run, and what not"], rows)


def comparison() -> str:
    features = tomllib.loads(COMPARISON.read_text()).items()
    rows = [(name, *(_cell(cells[project]) for project in PROJECTS)) for name, cells in features]
    return _table(["", *PROJECTS.values()], rows)


def _cell(cell: Mapping[str, Any]) -> str:
    """The answer, for which version, how it is known, and what limits it. Raises ValueError for a cell that would be
    shown in part."""
    if cell["is"] not in {"yes", "no", "option"} or not cell.keys() <= {"is", "version", "link", "note", "tried"}:
        raise ValueError(f"{COMPARISON.name}: {cell}")
    shown = cell["is"] if cell["link"] == "not found" else f"[{cell['is']}]({cell['link']})"
    about = ["tried"] if cell.get("tried") else ["not found"] if cell["link"] == "not found" else []
    parts = [f"**{shown}**", *([cell["version"]] if cell["version"] != "unreleased" else []), *about]
    return ", ".join(parts) + (f": {cell['note']}" if "note" in cell else "")


def runs_an_engine(test: str) -> bool:
    """Whether a test of the vLLM face, as file.py::name, has the marker `vllm`. KeyError if it does not exist."""
    name, _, function = test.partition("::")
    trees = [ast.parse((place / name).read_text()).body for place in TESTS if (place / name).exists()]
    found = {node.name: (node, tree) for tree in trees for node in tree if isinstance(node, ast.FunctionDef)}
    definition, tree = found[function]
    marks = [*definition.decorator_list, *(node for node in tree if isinstance(node, ast.Assign))]
    return any("pytest.mark.vllm" in ast.unparse(mark) for mark in marks)


def versions() -> str:
    table = json.loads(MATRIX.read_text())["tables"][0]
    return _table(table["columns"], table["rows"])


def _aligned(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as text: many numbers are read better so, and the page stays narrow."""
    lines = [*([columns] if any(columns) else []), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    shown = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n```text\n" + "\n".join(shown) + "\n```\n"


BLOCKS: Final[Mapping[str, Callable[[], str]]] = {
    "top_level": top_level,
    "tiers": tiers,
    "command_line": command_line,
    "python_api": python_api,
    "counters": partial(metrics, Kind.COUNTER),
    "histograms": partial(metrics, Kind.HISTOGRAM),
    "gauges": partial(metrics, Kind.GAUGE),
    "results": results,
    "faults": faults,
    "torture": torture,
    "torture_cells": torture_cells,
    "features": features,
    "versions": versions,
    "comparison": comparison,
}

if __name__ == "__main__":
    for page, text in generate().items():
        page.write_text(text)
