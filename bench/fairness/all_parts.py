"""All measurements of fair shares: on what `make up` starts, and with a model that takes time."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path

from bench.fairness import cost, noise, order
from bench.fairness.timed import servers
from bench.pipeline import running
from bench.report import Outcome, table

SECONDS = 60.0


def run(seconds: float = SECONDS) -> Outcome:
    """Measures for about seven times `seconds`."""
    with running() as pipeline:
        figures, drives = noise.measure(pipeline, seconds)
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder)) as where:
        figures += order.measure(where, seconds / 4)
        figures += cost.measure(where)
    details = {name: dataclasses.asdict(drive) for name, drive in drives.items()}
    return Outcome(figures, {"drives": details, "load_after": os.getloadavg()[0]})


if __name__ == "__main__":
    print(table({"fairness": run(float(sys.argv[1]) if sys.argv[1:] else SECONDS)}))
