"""A real Prometheus, where there is one: from Debian's package, installed or unpacked below .cache by `.ci/run`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from tests.support.servers import free_ports
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / ".cache/prometheus/usr/bin"
GUIDE = ROOT / "docs/guide/alerts.md"
Series = dict[str, list[float]]


def program(name: str) -> str | None:
    """Path of `prometheus` or `promtool`."""
    return shutil.which(name) or shutil.which(name, path=str(UNPACKED))


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def ready(self) -> bool:
        try:
            return bool(self.series("up", 0, 1) is not None)
        except (URLError, ConnectionError):
            return False

    def scrape(self) -> None:
        """Return when it has what the target shows now."""
        began_s = time.time()

        def scraped_s() -> float:
            now_s = time.time()
            # Not those to which the target answered too late.
            found = self.series("timestamp(up) and up == 1", now_s, now_s)
            return max((at for values in found.values() for at in values), default=0)

        until(lambda: scraped_s() > began_s, "a scrape", 120)

    def series(self, query: str, start: float, end: float) -> Series:
        """Every second's values, by labels. A query that Prometheus refuses raises HTTPError."""
        words = urlencode({"query": query, "start": start, "end": end, "step": 1})
        with urlopen(f"{self._url}query_range?{words}", timeout=60) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return {json.dumps(each["metric"]): [float(value) for _, value in each["values"]] for each in found}


@contextmanager
def prometheus(
    program: str, folder: Path, target: int, labelled: Sequence[Mapping[str, str]] = ({},)
) -> Iterator[Prometheus]:
    """Scrapes 127.0.0.1:`target` every second, as the guide says. Data is kept in `folder`. `labelled`: the labels that
    a cluster gives each of its targets; `__metrics_path__` is the page of one."""
    (port,) = free_ports(1)
    where = [{"targets": [f"127.0.0.1:{target}"], "labels": dict(labels)} for labels in labelled]
    job = {**documented_job(), "static_configs": where}
    settings = folder / "prometheus.yml"
    settings.write_text(
        json.dumps({"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [job]})
    )
    flags = (f"--config.file={settings}", f"--storage.tsdb.path={folder}", f"--web.listen-address=127.0.0.1:{port}")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
    try:
        server = Prometheus(port)
        until(server.ready, "Prometheus", 120)
        yield server
    finally:
        process.kill()
        process.wait()


def documented_job() -> dict[str, Any]:
    """The scrape job in the guide that every version of Prometheus takes."""
    (text,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", GUIDE.read_text(), re.DOTALL)
    (job,) = yaml.safe_load(text)["scrape_configs"]
    assert isinstance(job, dict)
    return job
