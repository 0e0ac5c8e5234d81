"""Batches per second through a whole worker whose device computes asynchronously.

The device takes 5 ms per batch, so it can process 200 batches/s (bench/async_device.py). A worker
with a real model process, an embedded Pub/Sub, Redis, and callers keep the device supplied. *One at
a time* sends a batch once the previous batch's results have been distributed, as on a CPU.
*Overlapping* keeps two in flight.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replaced

from bench.far_worker import FarLoad, measure
from bench.report import Figure, Outcome
from bench.timed_worker import BrokerSite, servers

CALL_S = 0.005
LOADS = (
    FarLoad("8 items", CALL_S, job_items=8, jobs=32, max_items=8),
    FarLoad("16 items", CALL_S, job_items=16, jobs=16, max_items=16),
)
LEAD_S, SECONDS, ROUNDS = 2.0, 4.0, 2
MIN_PER_S = 190.0


def run() -> Outcome:
    """Measures both ways. The best round counts, because other load can only reduce the rate."""
    figures, details = list[Figure](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name, servers(Path(name)) as (endpoint, redis_url):
        site = BrokerSite(redis_url, endpoint)
        for load in LOADS:
            for overlaps in (False, True):
                device_load = replace(load, device="two" if overlaps else "one")
                rounds = [
                    measure(site, device_load, lead_s=LEAD_S, seconds=SECONDS)
                    for _ in range(ROUNDS)
                ]
                way = "overlapping" if overlaps else "one at a time"
                title = f"{way}, batches of {load.name}"
                details[title] = [asdict(seen) for seen in rounds]
                best = max(seen.items_per_s / (seen.fill * load.max_items) for seen in rounds)
                figure = Figure(title, best, "batches/s")
                figures.append(
                    replaced(figure, bound=">=", limit=MIN_PER_S) if overlaps else figure
                )
                fill = max(seen.fill for seen in rounds)
                figures.append(Figure(f"{title}, share of full", fill, ""))
    return Outcome(figures, details)
