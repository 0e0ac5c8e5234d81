"""`penstock load` against the whole pipeline: ledger and BigQuery agree until a row is
corrupted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.cloud import bigquery

from infra.local.stack import Stack
from penstock_load.ledger import read_ledger
from shared.settings import environment_with
from shared.usage.bigquery import open_client
from tests.end_to_end.conftest import LOAD_KEYS
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow

REQUESTS = 60


def load(stack: Stack, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the JSON output."""
    command = [sys.executable, "-m", "infra.cli.main", "load", "--json", *words]
    environment = environment_with(stack.environment)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=WAIT_LIMIT_S
    )
    return done.returncode, json.loads(done.stdout)


def test_ledger_and_bigquery_agree_until_a_row_is_spoiled(stack: Stack, tmp_path: Path) -> None:
    keys = tmp_path / "keys.csv"
    lines = [f"{tenant},{key}\n" for tenant, key in LOAD_KEYS.items()]
    keys.write_text("".join(["tenant,key\n", *lines]))
    ledger = str(tmp_path / "ledger.jsonl")
    words = ["--url", stack.api_url, "--keys", str(keys), "--requests", str(REQUESTS)]
    models = ["--model", "all-MiniLM-L6-v2=9", "--model", "stable-diffusion-tiny=1"]
    day = ["--speed", "43200", "--set", "cancel_share=0.05", "--set", "cancel_within_s=0.01"]
    status, sent = load(stack, *words, *models, *day, "--ledger", ledger)
    assert (status, sent["due"], sent["not_sent"]) == (0, REQUESTS, 0)
    assert sent["outcomes"]["200"] >= 0.9 * REQUESTS
    assert sent["cost_usd"] > 0

    status, found = load(stack, "--check", ledger)
    assert found["differences"] == []
    assert (status, found["lines"]) == (0, REQUESTS)
    assert found["rows"] >= REQUESTS - 3
    assert found["cost_usd"] > 0

    answered = [line for line in read_ledger(Path(ledger)).lines if line.status == 200]
    spoil(stack, "DELETE FROM", "WHERE", answered[0].id)
    spoil(stack, "UPDATE", "SET cost_usd = cost_usd + 0.01 WHERE", answered[1].id)
    status, found = load(stack, "--check", ledger, "--wait", "0")
    named = {(one["kind"], one["what"]) for one in found["differences"]}
    assert status == 1
    assert {("row missing", answered[0].id), ("wrong cost", answered[1].id)} <= named


def spoil(stack: Stack, verb: str, change: str, client_request_id: str) -> None:
    """Changes one request's data in BigQuery."""
    settings = stack.settings
    one = "received_at > '2020-01-01' AND client_request_id = @id"
    sql = f"{verb} `{settings.dataset}.rows` {change} {one}"
    config = bigquery.QueryJobConfig(
        query_parameters=[bigquery.ScalarQueryParameter("id", "STRING", client_request_id)]
    )
    client = open_client(settings.project, settings.bigquery_endpoint)
    client.query_and_wait(sql, job_config=config, wait_timeout=WAIT_LIMIT_S)
    client.close()
