"""dbt: seeds, views, tables, incremental models, snapshots and data tests in BigQuery."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery

from tests.clients.python.checks import LIMIT_S, bigquery_url, check, main

PROJECT = f"clients-{uuid4().hex[:12]}"
FOLDER = Path(tempfile.mkdtemp(prefix="penstock-dbt-")) / "project"


def dbt(*arguments: str) -> str:
    """Runs dbt and returns its output. Fails if dbt fails."""
    command = [str(Path(sys.executable).parent / "dbt"), "--no-use-colors", *arguments]
    environment = {**os.environ, "BIGQUERY_PROJECT": PROJECT, "HOME": str(FOLDER.parent)}
    ended = subprocess.run(
        [*command, "--profiles-dir", "."],
        cwd=FOLDER,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-500:]
    return ended.stdout


def rows(sql: str) -> list[Sequence[Any]]:
    """A query's rows, read without dbt."""
    client = bigquery.Client(
        project=PROJECT,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": bigquery_url()},
    )
    return [row.values() for row in client.query(sql).result(timeout=LIMIT_S)]


@check
def everything_is_built_and_its_tests_pass() -> None:
    bigquery_url()
    shutil.copytree(Path(__file__).parent / "dbt_project", FOLDER)
    assert "ERROR=0" in dbt("build")
    assert rows("SELECT model, price FROM reporting.dear") == [("sd", 2.25)]
    assert rows("SELECT COUNT(*) FROM reporting.merged") == [(2,)]


@check
def incremental_models_merge_and_replace_partitions() -> None:
    bigquery_url()
    seed = FOLDER / "seeds/prices.csv"
    seed.write_text(
        "model,price,since\nminilm,0.75,2026-01-01\nsd,3,2026-01-02\nsdxl,4,2026-01-03\n"
    )
    assert "ERROR=0" in dbt("build")
    assert rows("SELECT model FROM reporting.merged ORDER BY 1") == [
        ("minilm",),
        ("sd",),
        ("sdxl",),
    ]
    # Nothing was selected from the first day's partition, so it keeps its price.
    replaced = "SELECT model, CAST(price AS FLOAT64) FROM reporting.overwritten ORDER BY model"
    assert rows(replaced) == [("minilm", 0.5), ("sd", 3.0), ("sdxl", 4.0)]
    static = "SELECT model, CAST(price AS FLOAT64) FROM reporting.static ORDER BY model"
    assert rows(static) == [("minilm", 0.5), ("sd", 3.0)]


@check
def the_catalog_of_the_documentation_is_complete() -> None:
    bigquery_url()
    printed = dbt("docs", "generate")
    assert "failure" not in printed, printed
    catalog = (FOLDER / "target/catalog.json").read_text()
    assert "Prices by day" in catalog
    assert "the model's name" in catalog


if __name__ == "__main__":
    try:
        main()
    finally:
        shutil.rmtree(FOLDER.parent)
