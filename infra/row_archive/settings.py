"""The settings of the row archive."""

from __future__ import annotations

from pydantic import Field

from shared.settings import Settings


class RowArchiveSettings(Settings):
    """A process that takes rows from the object store."""

    archive_every_s: float = Field(30.0, ge=1, le=3600)
    """How long rows are gathered. Each pass writes a Parquet file for each table and day."""
    archive_loads: bool = True
    """Whether the rows are loaded into BigQuery too. Without it there are no reports."""
    health_host: str = "127.0.0.1"
    health_port: int = Field(8089, ge=0, le=65535)
    """Where it answers /metrics. The port is open once the process runs."""
