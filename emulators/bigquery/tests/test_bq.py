"""The `bq` tool used with the embedded BigQuery, as in a shell."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from google.cloud import bigquery

from tests.connecting import rows_of
from tests.limits import WAIT_LIMIT_S

BQ = shutil.which("bq")
Bq = Callable[..., str]

pytestmark = [
    pytest.mark.skipif(
        BQ is None, reason="the bq tool of the Google Cloud CLI is not on this machine"
    ),
]


@pytest.fixture
def bq(client: bigquery.Client, dataset: str, bigquery_endpoint: str, tmp_path: Path) -> Bq:
    """Runs the tool in the client's project, which has the dataset `d`."""
    # Any token works: the server does not check credentials, but bq requires a token.
    flags = [
        "--api",
        bigquery_endpoint,
        "--project_id",
        client.project,
        "--oauth_access_token=none",
        "--quiet",
    ]
    assert dataset == "d"

    def run(*arguments: str, status: int = 0) -> str:
        environment = {**os.environ, "HOME": str(tmp_path), "CLOUDSDK_CONFIG": str(tmp_path)}
        command = [BQ or "", *flags, "--bigqueryrc", str(tmp_path / "none"), *arguments]
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=WAIT_LIMIT_S,
            check=False,
        )
        assert ended.returncode == status, ended.stdout + ended.stderr
        # The tool wraps its messages.
        return " ".join(ended.stdout.split())

    return run


def test_datasets_are_made_and_listed(bq: Bq) -> None:
    bq("mk", "--dataset", "other")
    assert [
        item["datasetReference"]["datasetId"] for item in json.loads(bq("ls", "--format=json"))
    ] == ["d", "other"]


def test_a_table_is_made_and_shown(bq: Bq) -> None:
    options = [
        "--time_partitioning_field=ts",
        "--clustering_fields=name",
        "--require_partition_filter",
    ]
    bq("mk", "--table", *options, "d.t", "id:INTEGER,name:STRING,ts:TIMESTAMP")
    resource = json.loads(bq("show", "--format=json", "d.t"))
    assert (resource["timePartitioning"]["field"], resource["clustering"]) == (
        "ts",
        {"fields": ["name"]},
    )
    assert (resource["numRows"], resource["requirePartitionFilter"]) == ("0", True)


def test_rows_are_inserted_and_read(bq: Bq, client: bigquery.Client, tmp_path: Path) -> None:
    fields = [bigquery.SchemaField("id", "INT64"), bigquery.SchemaField("ts", "TIMESTAMP")]
    client.create_table(bigquery.Table(f"{client.project}.d.t", fields))
    (tmp_path / "rows.json").write_text('{"id": 1, "ts": "2024-01-01 00:00:00"}\n')
    bq("insert", "d.t", "rows.json")
    assert json.loads(bq("head", "--format=json", "d.t")) == [
        {"id": "1", "ts": "2024-01-01 00:00:00"}
    ]


def test_what_is_removed_is_gone(bq: Bq, client: bigquery.Client) -> None:
    for name in ("a", "b"):
        client.create_table(
            bigquery.Table(f"{client.project}.d.{name}", [bigquery.SchemaField("id", "INT64")])
        )
    bq("rm", "-f", "-t", "d.a")
    assert f"Not found: Table {client.project}:d.a" in bq("show", "d.a", status=2)
    bq("rm", "-r", "-f", "--dataset", "d")
    assert list(client.list_datasets()) == []


def test_a_query_is_answered(bq: Bq) -> None:
    options = ["query", "--use_legacy_sql=false", "--format=json", "--parameter=x:INT64:5"]
    assert json.loads(bq(*options, "SELECT @x + 1 AS y, [1, 2] AS zs")) == [
        {"y": "6", "zs": ["1", "2"]}
    ]


def test_a_wrong_query_is_explained(bq: Bq) -> None:
    options = ["query", "--use_legacy_sql=false", "SELECT nothing FROM UNNEST([1]) AS x"]
    assert "Unrecognized name: nothing" in bq(*options, status=1)
    assert "--use_legacy_sql=false" in bq("query", "SELECT 1", status=1)


def test_a_dry_run_names_the_bytes(bq: Bq) -> None:
    assert "will process 0 bytes" in bq("query", "--use_legacy_sql=false", "--dry_run", "SELECT 1")


def test_a_file_is_loaded(bq: Bq, client: bigquery.Client, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("id,name\n1,x\n2,y\n")
    bq("load", "--skip_leading_rows=1", "d.csv", "rows.csv", "id:INTEGER,name:STRING")
    assert rows_of(client, "SELECT * FROM d.csv ORDER BY id") == [(1, "x"), (2, "y")]


def test_an_extract_is_refused_at_once(bq: Bq, client: bigquery.Client) -> None:
    client.create_table(
        bigquery.Table(f"{client.project}.d.t", [bigquery.SchemaField("id", "INT64")])
    )
    output = bq("extract", "d.t", "gs://bucket/rows.csv", status=1)
    assert "Extract jobs: not supported by the embedded BigQuery" in output


def test_a_view_is_made_and_asked(bq: Bq) -> None:
    bq("mk", "--use_legacy_sql=false", "--view=SELECT 2 AS id", "d.v")
    assert json.loads(
        bq("query", "--use_legacy_sql=false", "--format=json", "SELECT * FROM d.v")
    ) == [{"id": "2"}]
    assert [item["type"] for item in json.loads(bq("ls", "--format=json", "d"))] == ["VIEW"]
