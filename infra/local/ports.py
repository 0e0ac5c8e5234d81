"""A local stack's TCP ports: `penstock up`'s defaults, or free ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from infra.local.process import free_port


@dataclass(frozen=True)
class Ports:
    """Ports on 127.0.0.1. Worker n serves probes on the nth free port in `health`."""

    api: int = 8080
    pubsub: int = 8085
    bigquery: int = 9050
    redis: int = 6390
    health: Sequence[int] = field(default_factory=lambda: range(8091, 8191))
    functions: int = 8090
    metrics: int = 9464
    """Port for the API's metrics."""
    rabbitmq: int = 5672
    row_archive: int = 8089
    """Port for the row archive's metrics."""

    @classmethod
    def free(cls, workers: int = 8) -> Ports:
        """Returns ports that were free a moment ago, with health ports for `workers` workers."""
        one_each = {field.name: free_port() for field in fields(cls) if field.name != "health"}
        return cls(health=[free_port() for _ in range(workers)], **one_each)
