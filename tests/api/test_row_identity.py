"""Rows are identified by our own ids: callers can't choose them, BigQuery accepts all of them, and
the caller's id is stored as well.
"""

import re
from pathlib import Path

import pytest

from shared.errors import Unavailable
from shared.messages import ItemOutcome, Job, Receipt
from shared.predictions import iso
from shared.usage.row import Row, row_of
from tests.api.harness import TEXT_MODEL, ApiUnderTest, api_with_redis
from tests.api.predicting import TEXT
from tests.limits import WAIT_LIMIT_S
from tests.shared.embedded_bigquery import Server, writer

pytestmark = pytest.mark.anyio

LONGEST = "q" * 128
HASHED = re.compile(r"sha256:[0-9a-f]{32}")
MAX_ITEMS = 2048


api = api_with_redis(secret="s")


def rows_by_worker(job: Job) -> list[Row]:
    """The rows that a worker writes for a job."""
    outcomes = [ItemOutcome(item.index, "succeeded", Receipt()) for item in job.body.items]
    return [row_of(job.envelope, outcome, TEXT_MODEL) for outcome in outcomes]


@pytest.mark.slow
async def test_bigquery_takes_the_rows_of_the_longest_ids(
    api: ApiUnderTest, tmp_path: Path
) -> None:
    texts = {"model": TEXT_MODEL.name, "input": [str(number) for number in range(MAX_ITEMS)]}
    for given in (LONGEST, LONGEST * 40):
        headers = {"x-request-id": given}
        for _ in range(2):  # computed first, then served from the cache
            answer = await api.http.post("/v1/embeddings", json=texts, headers=headers)
            assert answer.status_code == 200
        await api.http.post("/v1/predictions", json=TEXT, headers=headers)
        await api.http.put("/v1/predictions/" + "p" * 64, json=TEXT, headers=headers)
    await api.worker.until_taken(1)
    rows = [row for job in api.worker.jobs for row in rows_by_worker(job)] + api.rows
    assert {row.cache for row in api.rows} == {"memory"}
    server = Server(tmp_path)
    with server.running():
        async with writer(server, tmp_path / "spool") as sink:
            for row in rows:
                sink.write(row)
            assert await sink.flush(WAIT_LIMIT_S)
        assert set(server.row_ids()) == {row.row_id for row in rows}
    assert not (tmp_path / "spool" / "rejected.jsonl").exists()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("order-17", re.compile("order-17")),
        (LONGEST, re.compile(LONGEST)),
        (LONGEST + "q", HASHED),
        ("a b", HASHED),
        ("naïve", HASHED),
        ('{"a":1}', HASHED),
        ("", None),
    ],
)
async def test_id_of_the_caller_stands_in_its_rows_and_names_none(
    api: ApiUnderTest, given: str, kept: re.Pattern[str] | None
) -> None:
    headers = {b"x-request-id": given.encode("latin-1")}
    body = {"model": TEXT_MODEL.name, "input": "a cat"}
    answers = [await api.http.post("/v1/embeddings", json=body, headers=headers) for _ in range(2)]
    await api.http.post("/v1/predictions", json=TEXT, headers=headers)
    await api.worker.until_taken(2)
    (cached,) = api.rows
    rows = [cached, *(row for job in api.worker.jobs for row in rows_by_worker(job))]
    assert len(rows) == len({row.row_id for row in rows}) == 3
    for row in rows:
        assert re.fullmatch(r"(req|pred)_[0-9a-f]{24}:0", row.row_id)
        assert (
            row.client_request_id is None
            if kept is None
            else kept.fullmatch(row.client_request_id or "")
        )
    shown = {answer.headers["x-request-id"] for answer in answers}
    if kept is not None and kept is not HASHED:
        assert shown == {given}
    else:  # the responses' IDs are found in the rows
        assert shown <= {row.request_id for row in rows}


async def test_repeated_prediction_keeps_the_times_and_ids_of_its_record(api: ApiUnderTest) -> None:
    """A repeated request publishes its job if the first one couldn't, and the row belongs to the
    first.
    """
    api.broker.outage = Unavailable("the broker is away")
    first = await api.http.put("/v1/predictions/mine", json=TEXT, headers={"x-request-id": "first"})
    assert first.status_code == 503
    api.broker.outage = None
    again = await api.http.put("/v1/predictions/mine", json=TEXT, headers={"x-request-id": "again"})
    assert again.status_code == 200
    await api.worker.until_taken(1)
    (job,) = api.worker.jobs
    (seen,) = (await api.http.get("/v1/predictions")).json()["results"]
    (row,) = rows_by_worker(job)
    assert row.client_request_id == "first"
    assert seen["created_at"] == iso(row.received_at_s)
    assert seen["deadline"] == iso(job.envelope.deadline_s)
