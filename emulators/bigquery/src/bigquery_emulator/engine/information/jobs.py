"""The jobs that the server remembers: the rows of JOBS."""

from typing import Any

from bigquery_emulator.engine.job import BigQueryJob
from bigquery_emulator.tables.listing import Row, fields
from bigquery_emulator.tables.schema import Field

JOBS = (
    *fields(
        "creation_time:TIMESTAMP project_id user_email job_id job_type statement_type priority"
        " start_time:TIMESTAMP end_time:TIMESTAMP query state total_bytes_processed:INTEGER"
        " total_bytes_billed:INTEGER cache_hit:BOOLEAN"
    ),
    Field("error_result", "RECORD", fields=fields("reason location debug_info message")),
    Field("destination_table", "RECORD", fields=fields("project_id dataset_id table_id")),
    Field("labels", "RECORD", "REPEATED", fields("key value")),
)


def job_row(job: BigQueryJob) -> Row:
    """Returns the JOBS row for a job."""
    config = job.configuration.get(job.kind.lower(), {})
    details = job.statistics.get("query", {})
    error = None if job.error is None else job.error.proto()
    labels = job.configuration.get("labels") or {}
    return (
        *(job.created_ms, job.project, "nobody@localhost", job.job_id, job.kind),
        details.get("statementType"),
        config.get("priority") or "INTERACTIVE",
        *(job.started_ms or None, job.ended_ms or None, config.get("query"), job.state),
        _number(job.statistics.get("totalBytesProcessed")),
        _number(details.get("totalBytesBilled")),
        details.get("cacheHit"),
        None if error is None else (error["reason"], error.get("location"), None, error["message"]),
        _table(config.get("destinationTable")),
        sorted(labels.items()),
    )


def _number(text: Any) -> int | None:
    return None if text is None else int(text)


def _table(reference: Any) -> tuple[str, str, str] | None:
    if reference is None:
        return None
    return reference["projectId"], reference["datasetId"], reference["tableId"]
