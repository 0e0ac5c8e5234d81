"""Connects the tests to the embedded BigQuery with Google's own client."""

import gzip
import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery

from tests.limits import WAIT_LIMIT_S


@contextmanager
def connected(endpoint: str, project: str) -> Iterator[bigquery.Client]:
    client = bigquery.Client(
        project=project,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": endpoint},
    )
    with closing(client):
        yield client


def rows_of(client: bigquery.Client, sql: str, **config: Any) -> list[tuple[Any, ...]]:
    """Returns a query's result, running the query as users do."""
    job_config = bigquery.QueryJobConfig(**config) if config else None
    return [
        row.values()
        for row in client.query(sql, job_config=job_config).result(timeout=WAIT_LIMIT_S)
    ]


def request(
    endpoint: str, verb: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str], Any]:
    """Returns a response's status, headers by lowercase name, and JSON.

    The JSON is None if the response has no body.
    """
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=WAIT_LIMIT_S)
    try:
        connection.request(verb, path, body, headers)
        response = connection.getresponse()
        data = response.read()
        names = {name.lower(): value for name, value in response.getheaders()}
        if names.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        return response.status, names, json.loads(data) if data else None
    finally:
        connection.close()
