"""The row for a worker's utilization in part of an hour, in the `worker_hours` table."""

from __future__ import annotations

import msgspec

TABLE = "worker_hours"
HOUR_S = 3600


class WorkerHour(msgspec.Struct, kw_only=True):
    """A worker process's utilization in part of an hour.

    infra/bigquery/worker_hours.schema.json describes each column. Times are Unix seconds.
    """

    row_id: str
    worker: str
    hour_s: float = msgspec.field(name="hour")
    since_s: float = msgspec.field(name="since")
    reported_at_s: float = msgspec.field(name="reported_at")
    started_at_s: float = msgspec.field(name="started_at")
    region: str
    deployment: str
    models: str
    gpu_type: str | None
    spot: bool | None
    device: str | None
    device_share: float
    processes: int
    busy_s: float
    idle_s: float
    loading_s: float
    batches: int
    items: int
    cold_starts: int
