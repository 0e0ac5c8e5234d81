"""All measurements of fair shares: on what `make up` starts, and with a model that takes time."""

from __future__ import annotations

import dataclasses
import os
import sys

from bench.fairness import noise, order
from bench.pipeline import running
from bench.report import Outcome, table

SECONDS = 60.0


def run(seconds: float = SECONDS) -> Outcome:
    """Measures for about eight times `seconds`."""
    with running() as pipeline, pipeline.another_api(api_keys=noise.API_KEYS) as api:
        figures, drives = noise.measure(pipeline, api.port, seconds)
    figures += order.measure(seconds / 4)
    details = {name: dataclasses.asdict(drive) for name, drive in drives.items()}
    return Outcome(figures, {"drives": details, "load_after": os.getloadavg()[0]})


if __name__ == "__main__":
    print(table({"fairness": run(float(sys.argv[1]) if sys.argv[1:] else SECONDS)}))
