"""The function behind Cloud Scheduler, as functions-framework runs it."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from google.cloud import bigquery
from typer.testing import CliRunner

from infra.cli.main import app
from infra.local.process import answers, free_port
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S
from tests.workers.functions.conftest import functions_process
from tests.workers.functions.tokens import Issuer

pytestmark = pytest.mark.slow


@pytest.fixture
def url(functions_port: int, table: bigquery.Client) -> str:
    """The function's URL. The tables it writes to already exist."""
    return f"http://127.0.0.1:{functions_port}/reports"


def yesterday() -> date:
    """The last completed day, which may change between calls."""
    return (datetime.now(UTC) - timedelta(days=1)).date()


async def call(url: str, body: object, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=WAIT_LIMIT_S) as client:
        return await client.post(url, json=body, headers=headers)


async def test_call_does_the_last_days(url: str) -> None:
    before = yesterday()
    answer = await call(url, {})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    last = told["days"][-1]
    assert len(told["days"]) == 4
    assert last in (str(before), str(yesterday())), "midnight may be in between"
    assert told["subject"].startswith(f"Penstock {last}: $")


async def test_backfill_and_hours(url: str) -> None:
    day = str(yesterday() - timedelta(days=30))
    backfill = await call(url, {"from": day, "to": day})
    assert backfill.json()["days"] == [day]
    hours = await call(url, {"only": "anomalies"})
    assert (hours.status_code, hours.json()["objects"]) == (200, 0)


def test_command_calls_the_function(url: str) -> None:
    day = str(yesterday() - timedelta(days=2))
    done = CliRunner().invoke(app, ["run-daily", "--day", day, "--function", url])
    assert (done.exit_code, json.loads(done.stdout)["days"]) == (0, [day])
    hours = CliRunner().invoke(app, ["run-daily", "--hours", "--function", url])
    assert json.loads(hours.stdout)["subject"] is None
    late = CliRunner().invoke(app, ["run-daily", "--day", "9998-01-01", "--function", url])
    assert (late.exit_code, late.stdout) == (1, "")
    assert "the function returned 400: to: 9998-01-01 is not over yet" in late.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--function", "file:///etc/passwd"], "must be an http or https URL"),
        (["--function", "http://127.0.0.1:1/"], "the function is unreachable"),
    ],
)
def test_command_without_a_function_says_why(words: list[str], reason: str) -> None:
    done = CliRunner().invoke(app, ["run-daily", *words])
    assert (done.exit_code, done.stdout) == (1, "")
    assert reason in done.stderr


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            {"from": "2020-01-01", "to": "2020-12-31"},
            "from: the range must be at most 31 days, got 366",
        ),
        ({"to": "9998-01-01"}, "to: 9998-01-01 is not over yet"),
        ({"since": "2026-10-01"}, "since: is not a valid field"),
        ({"only": "invoices"}, "only: must be anomalies"),
        ({"only": "anomalies", "from": "2026-10-01"}, "only: must be anomalies"),
        ([], "the body is not a JSON object"),
        ("x" * 5000, "larger than 4096 bytes"),
    ],
)
async def test_wrong_bodies_are_refused_by_name(url: str, body: object, reason: str) -> None:
    answer = await call(url, body)
    assert (answer.status_code, reason in answer.text) == (400, True), answer.text


@pytest.mark.parametrize("body", [b"{", b"[" * 2048 + b"]" * 2048], ids=["cut", "nested"])
async def test_body_that_is_no_json_is_refused(url: str, body: bytes) -> None:
    async with httpx.AsyncClient(timeout=WAIT_LIMIT_S) as client:
        answer = await client.post(url, content=body)
    assert (answer.status_code, "not valid JSON" in answer.text) == (400, True)


async def test_only_the_scheduler_may_call(issuer: Issuer, guarded_url: str) -> None:
    body = {"to": "9998-01-01"}
    nobody = await call(f"{guarded_url}/reports", body)
    token = f"Bearer {Issuer().token()}"
    other = await call(f"{guarded_url}/reports", body, authorization=token)
    ours = await call(f"{guarded_url}/reports", body, authorization=f"Bearer {issuer.token()}")
    # The body is invalid. Only the caller's identity was tested.
    assert [answer.status_code for answer in (nobody, other, ours)] == [401, 401, 400]


async def test_call_comes_again_while_bigquery_is_away(
    functions_settings: dict[str, str], tmp_path: Path
) -> None:
    port = free_port()
    settings = functions_settings | {
        "PENSTOCK_BIGQUERY_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "PENSTOCK_OBJECTS_URL": f"file://{tmp_path / 'objects'}",
    }
    with functions_process(settings, "reports", port, tmp_path) as process:
        process.wait_ready(lambda: answers(port, "/"), START_LIMIT_S)
        answer = await call(f"http://127.0.0.1:{port}/", {})
        async with httpx.AsyncClient(timeout=WAIT_LIMIT_S) as client:
            metrics = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    assert (answer.status_code, "BigQuery" in answer.text) == (503, True), answer.text
    assert 'penstock_reports_runs_total{outcome="failed",run="daily"} 1.0' in metrics
