"""A dataset with the generated rows, which all tests in a session share but only read."""

import json
import uuid
from collections.abc import Iterator, Mapping

import pytest
from google.cloud import bigquery

from infra import bigquery as tables
from shared.reports.definitions import Report, ReportQuestion
from shared.reports.runner import ReportResult, ReportRunner
from tests.bigquery_client import connected
from tests.infra.reports import generated
from tests.infra.reports.generated import Fields
from tests.limits import START_LIMIT_S

DATASET = "penstock"
BUDGETS_USD = {"acme": 0.05, "nobody": 5.0}


def load(client: bigquery.Client, table: str, rows: list[Fields]) -> None:
    """Adds rows with a load job. Times become text."""
    config = bigquery.LoadJobConfig(write_disposition="WRITE_APPEND")
    plain = json.loads(json.dumps(rows, default=str))
    client.load_table_from_json(plain, f"{DATASET}.{table}", job_config=config).result()


@pytest.fixture(scope="session")
def made_rows() -> list[Fields]:
    return generated.rows()


@pytest.fixture(scope="session")
def loaded(bigquery_endpoint: str, made_rows: list[Fields]) -> Iterator[bigquery.Client]:
    with connected(bigquery_endpoint, f"p-{uuid.uuid4().hex[:12]}") as client:
        tables.create(client, DATASET)
        load(client, "rows", made_rows)
        yield client


class OnceRunner(ReportRunner):
    """Runs each query only once, because nothing writes to the generated rows and most queries take
    seconds.

    A machine busy with other work may need more time than a report is allowed in production.
    """

    def __init__(self, client: bigquery.Client) -> None:
        super().__init__(client, DATASET, budgets_usd=BUDGETS_USD)
        self._answered: dict[tuple[str, ReportQuestion], ReportResult] = {}

    def run(
        self,
        report: Report,
        question: ReportQuestion,
        values: Mapping[str, float] | None = None,
        limit_s: float = START_LIMIT_S,
    ) -> ReportResult:
        assert values is None, "it is no part of what is kept"
        asked = (report.name, question)
        if asked not in self._answered:
            self._answered[asked] = super().run(report, question, limit_s=limit_s)
        return self._answered[asked]


@pytest.fixture(scope="session")
def runner(loaded: bigquery.Client) -> ReportRunner:
    return OnceRunner(loaded)


@pytest.fixture(scope="session")
def nothing(bigquery_endpoint: str) -> Iterator[bigquery.Client]:
    """Empty tables, for tests that only read."""
    with connected(bigquery_endpoint, f"p-{uuid.uuid4().hex[:12]}") as client:
        tables.create(client, DATASET)
        yield client


@pytest.fixture(scope="session")
def written(bigquery_endpoint: str) -> Iterator[bigquery.Client]:
    with connected(bigquery_endpoint, f"p-{uuid.uuid4().hex[:12]}") as client:
        tables.create(client, DATASET)
        yield client


@pytest.fixture
def empty(written: bigquery.Client) -> bigquery.Client:
    """Empty tables for a test to write to.

    They are emptied rather than recreated, because creating the views takes a long time.
    """
    for table in tables.tables():
        written.query(f"TRUNCATE TABLE {DATASET}.{table}").result()
    return written
