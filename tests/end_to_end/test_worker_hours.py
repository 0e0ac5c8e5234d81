"""A worker's time is in BigQuery once the worker has exited, and adds up to its lifetime."""

import openai
import pytest

from infra.local.process import answers
from infra.local.stack import Stack
from tests.end_to_end.conftest import EMBEDDER
from tests.end_to_end.rows import Rows, eventually
from tests.limits import START_LIMIT_S

pytestmark = pytest.mark.slow(about_s=15)

REPORTS = (
    "SELECT * FROM `{dataset}.worker_hours_deduplicated` "
    "WHERE hour > TIMESTAMP_SUB(CURRENT_TIMESTAMP(), INTERVAL 1 DAY) AND worker = @worker "
    "ORDER BY since"
)
STARTS = (
    "SELECT * FROM `{dataset}.worker_starts_deduplicated` "
    "WHERE started_at > TIMESTAMP_SUB(CURRENT_TIMESTAMP(), INTERVAL 1 DAY) AND worker = @worker"
)


def test_a_worker_that_stops_accounts_for_its_time(
    stack: Stack, client: openai.OpenAI, rows: Rows, text: str
) -> None:
    answer = client.with_options(
        default_headers={"user-agent": "curl/8.5.0"}
    ).embeddings.with_raw_response.create(model=EMBEDDER, input=[f"{text} one", f"{text} two"])
    found = rows.of([answer.headers["x-request-id"]], count=2)
    assert {(row["user_agent_family"], row["priority"]) for row in found} == {
        ("curl", "interactive")
    }
    assert {row["cold_start"] for row in found} == {False}
    for row in found:
        assert row["padded_tokens"] >= row["input_tokens"] == row["tokens"]
        assert row["cost_usd"] == row["list_price_usd"] * row["charged_share"] > 0
        assert row["batch_size"] <= row["batch_capacity"]
    worker = found[0]["worker"]
    process = stack.processes[f"worker-{EMBEDDER}"]
    process.stop()
    process.start()
    process.wait_ready(lambda: answers(stack.ports.health[0], "/readyz"), START_LIMIT_S)
    reports = eventually(lambda: rows.query(REPORTS, worker=worker))
    at = reports[0]["started_at"]
    for report in reports:
        assert report["since"] == at
        told_s = report["busy_s"] + report["idle_s"] + report["loading_s"]
        at = report["reported_at"]
        assert told_s == pytest.approx((at - report["since"]).total_seconds(), abs=1e-3)
    assert sum(report["items"] for report in reports) >= 2
    assert sum(report["cold_starts"] for report in reports) >= 1
    assert reports[-1]["models"] == EMBEDDER
    assert reports[-1]["device"] == "cpu"
    (start,) = eventually(lambda: rows.query(STARTS, worker=worker))
    phases_s = [start[f"{phase}_s"] for phase in ("weights", "backend", "load", "compile")]
    assert 0 < max(phases_s) < start["ready_s"]
    assert start["first_batch_s"] > 0
    assert (start["node_s"], start["image_s"], start["device"]) == (None, None, "cpu")
