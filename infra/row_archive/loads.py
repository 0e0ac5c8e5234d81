"""Loads Parquet files into BigQuery with named jobs, so that no file is loaded twice."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from infra.row_archive.parquet import partition_column
from shared.errors import Unavailable
from shared.reports.runner import translate_errors
from shared.usage.bigquery import open_client

LOAD_LIMIT_S = 120.0
TRIES = 100
"""Maximum number of attempts, each under a new job name, because a failed job's name can't be
reused.
"""


class BigQueryLoader:
    """Loads files into tables, using load jobs. Calls block.

    Args:
        endpoint: URL of an embedded BigQuery. Empty for Google's.
    """

    def __init__(self, project: str, dataset: str, endpoint: str) -> None:
        self._project = project
        self._dataset = dataset
        self._endpoint = endpoint

    def load(self, table: str, path: Path, name: str) -> None:
        """Loads a file's rows, unless a load with this name has already succeeded.

        BigQuery remembers job names for six months. The embedded BigQuery forgets them when it
        exits. If rows are then loaded twice, the views drop the duplicates.

        Raises:
            Unavailable: it is unknown whether the table contains the rows.
        """
        from google.api_core.exceptions import GoogleAPICallError

        with translate_errors(), closing(open_client(self._project, self._endpoint)) as client:
            for number in range(TRIES):
                job, is_new = self._start(client, table, path, f"rows-{table}-{name}-{number}")
                if is_new:
                    job.result(retry=None, timeout=LOAD_LIMIT_S)
                    return
                with suppress(GoogleAPICallError):  # an earlier process started it, and it failed
                    job.result(retry=None, timeout=LOAD_LIMIT_S)
                    return
        raise Unavailable(f"BigQuery: loading {name} failed {TRIES} times")

    def days(self, table: str) -> dict[str, int]:
        """Returns how many distinct rows a table has, keyed by day (`2026-11-23`, UTC).

        Raises:
            Unavailable: BigQuery is unreachable.
        """
        column = partition_column(table)
        sql = (
            f"SELECT FORMAT_TIMESTAMP('%F', {column}) AS day, COUNT(DISTINCT row_id)"
            f" FROM `{self._dataset}.{table}` WHERE {column} >= TIMESTAMP '2000-01-01' GROUP BY day"
        )
        with translate_errors(), closing(open_client(self._project, self._endpoint)) as client:
            return {row[0]: row[1] for row in client.query(sql, timeout=LOAD_LIMIT_S).result()}

    def _start(self, client: Any, table: str, path: Path, job_id: str) -> tuple[Any, bool]:
        """Returns the job with this name, and whether this call started it."""
        from google.api_core.exceptions import Conflict
        from google.cloud.bigquery import LoadJobConfig

        # Permission to create tables would also allow loading into any table.
        config = LoadJobConfig(
            source_format="PARQUET",
            write_disposition="WRITE_APPEND",
            create_disposition="CREATE_NEVER",
        )
        into = f"{self._project}.{self._dataset}.{table}"
        try:
            with path.open("rb") as file:
                job = client.load_table_from_file(
                    file,
                    into,
                    job_id=job_id,
                    job_config=config,
                    num_retries=0,
                    timeout=LOAD_LIMIT_S,
                )
        except Conflict:
            # If the location isn't given, a job can be found only in the US and the EU.
            location = client.get_table(into, retry=None, timeout=LOAD_LIMIT_S).location
            job = client.get_job(job_id, location=location, retry=None, timeout=LOAD_LIMIT_S)
            return job, False
        return job, True
