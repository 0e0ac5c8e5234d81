"""This worker's identity in replies, rows, and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages import Envelope, ItemOutcome
from shared.models.catalog import Model
from shared.money.charge import device_share_of
from shared.usage.row import Row, rows_of


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """This worker's description in replies and rows."""

    worker: str
    region: str
    device: str
    gpu_type: str | None = None
    """GPU name in infra/kubernetes/gpus.yaml. None if there is no GPU."""
    spot: bool | None = None
    """True if the worker runs on a spot node. None if unknown."""


def rows_for(
    model: Model,
    info: WorkerInfo,
    envelope: Envelope,
    outcomes: Sequence[ItemOutcome],
    replied_at_s: float,
) -> list[Row]:
    """Returns the rows that this worker writes for a job's items."""
    return rows_of(
        envelope,
        outcomes,
        model,
        replied_at_s=replied_at_s,
        region=info.region,
        worker=info.worker,
        device=info.device,
        device_share=device_share_of(model),
        gpu_type=info.gpu_type,
        spot=info.spot,
    )
