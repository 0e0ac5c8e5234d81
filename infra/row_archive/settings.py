"""The settings of the row archive."""

from __future__ import annotations

from pydantic import Field

from shared.settings import Settings


class RowArchiveSettings(Settings):
    """A process that takes rows from the object store."""

    archive_every_s: float = Field(30.0, ge=1, le=3600)
    """Seconds between passes. Each writes a Parquet file for each table and day."""
    archive_loads: bool = True
    """True if the rows are loaded into BigQuery too. Reports need it."""
    health_host: str = "127.0.0.1"
    health_port: int = Field(8089, ge=0, le=65535)
    """Port of /metrics. It is open once the process runs."""
