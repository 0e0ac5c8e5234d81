"""An embedded BigQuery as a process that row tests can stop, and helpers that write to it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery

from infra.bigquery import create
from infra.local.process import Process, free_port, listens
from shared.usage.bigquery import BigQuerySender
from shared.usage.row import Row
from shared.usage.writer import RowWriter
from tests.limits import START_LIMIT_S

PROJECT, DATASET = "rows-test", "penstock"


class Server:
    """An embedded BigQuery that keeps its port and its data across restarts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"

    @contextmanager
    def running(self) -> Iterator[None]:
        command = [sys.executable, "-m", "bigquery_emulator", "--port", str(self.port)]
        with Process(
            "bigquery", [*command, "--data-dir", str(self.folder / "data")], self.folder
        ) as process:
            process.wait_ready(lambda: listens(self.port), START_LIMIT_S)
            create(self.client(), DATASET)
            yield

    def client(self) -> bigquery.Client:
        options = {"api_endpoint": self.endpoint}
        return bigquery.Client(
            project=PROJECT, credentials=AnonymousCredentials(), client_options=options
        )

    def row_ids(self, table: str = "rows") -> list[str]:
        query = (
            f"SELECT row_id FROM {DATASET}.{table}"
            " WHERE received_at > TIMESTAMP '2020-01-01' ORDER BY row_id"
        )
        with self.client() as client:
            return [str(row["row_id"]) for row in client.query(query).result()]


def writer(server: Server, spool_dir: Path) -> RowWriter:
    return writer_to(server.endpoint, spool_dir)


def writer_to(endpoint: str, spool_dir: Path, table: str = "rows") -> RowWriter:
    return RowWriter(BigQuerySender(PROJECT, f"{DATASET}.{table}", endpoint), spool_dir=spool_dir)


def row(number: int, **fields: object) -> Row:
    known = {"row_id": f"req:{number:05}", "request_id": "req", "item": number, "model": "mini"}
    return Row(**known, received_at_s=time.time(), status="succeeded", **fields)  # type: ignore[arg-type]


def segments(spool_dir: Path) -> int:
    return len(list(spool_dir.glob("*.segment")))
