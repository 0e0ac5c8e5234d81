"""Start-up seconds and resident memory of an API and a worker, next to a running stack."""

from __future__ import annotations

import statistics
from pathlib import Path

from bench.pipeline import running
from bench.report import Figure, Outcome

REQUESTS = 1000
STARTS = 3
MB = 1_000_000


def run() -> Outcome:
    """Starts API and worker three times each.

    The last API answers 1,000 requests before it is weighed.
    """
    with running() as pipeline:
        api_ready_s, worker_ready_s = [], []
        for _ in range(STARTS):
            with pipeline.another_api() as api:
                api_ready_s.append(api.ready_s)
                pipeline.ask(pipeline.texts.short(REQUESTS), 32, cache="miss", port=api.port)
                api_bytes, has_torch = api.rss_bytes(), maps_torch(api.pid)
        for _ in range(STARTS):
            with pipeline.another_worker() as worker:
                worker_ready_s.append(worker.ready_s)
                own_bytes, children = worker.rss_bytes(), worker.children_rss_bytes()
                worker_has_torch = maps_torch(worker.pid)
    return Outcome(
        [
            Figure("API, start to ready", statistics.median(api_ready_s), "s", "<=", 3.0),
            Figure(f"API, resident after {REQUESTS:,} requests", api_bytes / MB, "MB", "<=", 250.0),
            Figure("API, torch libraries mapped", float(has_torch), "", "<=", 0.0),
            Figure("worker, start to ready", statistics.median(worker_ready_s), "s", "<=", 15.0),
            Figure("worker, I/O process, resident", own_bytes / MB, "MB"),
            Figure(
                "worker, I/O process, torch libraries mapped",
                float(worker_has_torch),
                "",
                "<=",
                0.0,
            ),
            *(
                Figure(f"worker, model process {at}, resident", size / MB, "MB")
                for at, size in enumerate(children, 1)
            ),
        ],
        {"api_ready_s": api_ready_s, "worker_ready_s": worker_ready_s},
    )


def maps_torch(pid: int) -> bool:
    """Returns whether the process has torch loaded, by its mapped libraries (Linux)."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
