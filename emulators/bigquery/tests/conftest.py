"""A client of the shared embedded BigQuery, in a project that only this test knows."""

import uuid
from collections.abc import Iterator

import pytest
from google.cloud import bigquery

from tests.infra.bigquery.connecting import connected


@pytest.fixture
def client(bigquery_endpoint: str) -> Iterator[bigquery.Client]:
    with connected(bigquery_endpoint, f"p-{uuid.uuid4().hex[:12]}") as client:
        yield client


@pytest.fixture
def dataset(client: bigquery.Client) -> str:
    return str(client.create_dataset("d").dataset_id)
