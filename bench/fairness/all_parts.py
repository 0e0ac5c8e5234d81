"""All measurements of fair shares, on what `make up` starts."""

from __future__ import annotations

import dataclasses
import os
import sys

from bench.fairness import cost, noise, weights
from bench.pipeline import running
from bench.report import Outcome, table

SECONDS = 60.0
BACKEND = {"backend": "torch", "precision": "fp32"}
"""Said where there are several workers: each might be measured another way on a busy machine."""


def run(seconds: float = SECONDS) -> Outcome:
    """Measures for about seven times `seconds`."""
    with running() as pipeline:
        with pipeline.another_api(api_keys=noise.API_KEYS) as api:
            figures, drives = noise.measure(pipeline, api.port, seconds)
    with running(BACKEND, processes=2, threads=1) as pipeline:
        figures += weights.measure(pipeline, seconds / 2)
        figures += cost.measure(pipeline, seconds / 4)
    details = {name: dataclasses.asdict(drive) for name, drive in drives.items()}
    return Outcome(figures, {"drives": details, "load_after": os.getloadavg()[0]})


if __name__ == "__main__":
    print(table({"fairness": run(float(sys.argv[1]) if sys.argv[1:] else SECONDS)}))
