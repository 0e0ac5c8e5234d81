"""The row for one start of a worker process, in the `worker_starts` table."""

from __future__ import annotations

import msgspec

TABLE = "worker_starts"


class WorkerStart(msgspec.Struct, kw_only=True):
    """How long the phases of a worker's start took.

    Generates the table's schema: `python -m infra.bigquery.generate`. Times are Unix seconds.
    """

    row_id: str
    """Identifies the row: the worker, which starts once."""
    worker: str
    """The worker process, as in rows."""
    started_at_s: float = msgspec.field(name="started_at")
    """When the worker process started; the partition of the row."""
    reported_at_s: float = msgspec.field(name="reported_at")
    """When the row was written: after the first batch, or at shutdown if there was none."""
    region: str
    """The worker's region."""
    deployment: str
    """The names of the worker's models in the catalog, joined with +. A canary has its own."""
    models: str
    """The names of its models as rows have them, each once, comma-separated."""
    gpu_type: str | None = None
    """As in rows."""
    spot: bool | None = None
    """As in rows."""
    device: str | None = None
    """The worker's device; null if no model process was ever ready."""
    node_s: float | None = None
    """Seconds from the node's boot until the pod's volumes were mounted. Null if the node had been
    running for ten minutes, or if this was not measured: only a pod's first worker process on
    Kubernetes measures it.
    """
    image_s: float | None = None
    """Seconds from then until the worker process started: the sandbox, the image, and any init
    containers. Null if not measured, as for node_s.
    """
    weights_s: float | None = None
    """Seconds spent on downloading weights, or on finding the weights on the disk. Null, as in the
    columns below, if the worker stopped first.
    """
    backend_s: float | None = None
    """Seconds spent on choosing an embedding model's backend, including measurements."""
    load_s: float | None = None
    """Seconds from starting the model processes until the last one was ready, without compile_s."""
    compile_s: float | None = None
    """Seconds of that spent on the warm-up, which compiles kernels that were not restored."""
    ready_s: float | None = None
    """Seconds from started_at until the worker asked for jobs. Phases may overlap."""
    first_batch_s: float | None = None
    """Seconds that the first batch took in the model."""
