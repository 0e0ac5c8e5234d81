"""CPU cost per item in a worker's I/O process, with an instantaneous model and one item per job.

A worker with a model that does no work (bench/timed_worker.py) runs in a separate process, and
callers in this process keep a number of jobs in flight. The broker and Redis are on the same
machine. On two cores, these share what the worker leaves free, so the number that matters is items
per second of the worker's CPU time, because the worker has one core. Rows are written to disk, as
in a real worker.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.far_worker import FarLoad, Seen, measure
from bench.report import Figure, Outcome
from bench.timed_worker import BrokerSite, servers

LOAD = FarLoad("no time, 1 item", batch_s=1e-4, job_items=1, jobs=1000)
LEAD_S, SECONDS, ROUNDS = 2.0, 5.0, 3
MIN_PER_S = 6000.0


def run() -> Outcome:
    """Measures both with and without rows.

    The best round is reported, because other load can only add time.
    """
    figures, details = list[Figure](), dict[str, Any]()
    for name, has_rows in (("without rows", False), ("with rows", True)):
        rounds = [_measure(has_rows=has_rows) for _ in range(ROUNDS)]
        details[name] = [asdict(seen) for seen in rounds]
        best = max(seen.items_per_s / seen.cpu for seen in rounds)
        figures.append(Figure(f"items per CPU second, {name}", best, "/s", ">=", MIN_PER_S))
        figures.append(Figure(f"items, {name}", max(seen.items_per_s for seen in rounds), "/s"))
    return Outcome(figures, details)


def _measure(*, has_rows: bool) -> Seen:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows_dir = str(folder / "rows") if has_rows else ""
        with servers(folder) as (endpoint, redis_url):
            site = BrokerSite(redis_url, endpoint)
            return measure(site, LOAD, lead_s=LEAD_S, seconds=SECONDS, rows_dir=rows_dir)
