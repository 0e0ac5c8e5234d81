"""A short version of the long malformed-request run (malformed.py)."""

import http.client

import pytest

from tests import malformed
from tests.connecting import request


@pytest.mark.parametrize("seed", [11, 12])
def test_malformed_requests_are_refused_and_harm_nothing(bigquery_endpoint: str, seed: int) -> None:
    findings = malformed.send(bigquery_endpoint.removeprefix("http://"), seed, 400)
    assert findings.wrong == []
    assert findings.statuses[http.client.BAD_REQUEST] > 0
    assert request(bigquery_endpoint, "GET", "/healthz")[0] == http.client.OK


def test_a_seed_gives_the_same_requests() -> None:
    first, second = (malformed.Generator(7) for _ in range(2))
    assert [first.request() for _ in range(200)] == [second.request() for _ in range(200)]
