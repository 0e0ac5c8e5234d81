"""`penstock provision`, as a container runs it before the API starts."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from google.cloud.bigquery import Table

from infra.local.process import free_port
from infra.reports.tables import check_bigquery
from shared.broker.pubsub.admin import PubSubAdmin
from shared.broker.transport import WEBHOOKS_SUBSCRIPTION_ID, workers_subscription_id
from shared.errors import Unavailable
from shared.models.catalog_file import read_catalog
from shared.settings import Settings, read_settings
from tests.bigquery_client import connected
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def provision(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infra.cli.main", "provision", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | settings
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_LIMIT_S
    )


async def exist(project: str, endpoint: str, names: list[str]) -> list[bool]:
    async with PubSubAdmin(project, endpoint) as admin:
        return [await admin.subscription_exists(name) for name in names]


def test_makes_everything_once_and_again(pubsub_endpoint: str, bigquery_endpoint: str) -> None:
    name = f"p-{uuid4().hex[:8]}"
    settings = {
        "PENSTOCK_PROJECT": name,
        "PENSTOCK_DATASET": name.replace("-", "_"),
        "PENSTOCK_PUBSUB_ENDPOINT": pubsub_endpoint,
        "PENSTOCK_BIGQUERY_ENDPOINT": bigquery_endpoint,
    }
    for _ in range(2):
        reported = provision("--functions-url", "http://functions", **settings)
        assert reported.returncode == 0, reported.stderr
        assert pubsub_endpoint in reported.stdout
        assert bigquery_endpoint in reported.stdout
    models = read_catalog(Path("models.yaml")).models
    wanted = [WEBHOOKS_SUBSCRIPTION_ID, *(workers_subscription_id(model.name) for model in models)]
    assert all(asyncio.run(exist(name, pubsub_endpoint, wanted)))
    given = read_settings(
        Settings,
        project=name,
        dataset=settings["PENSTOCK_DATASET"],
        bigquery_endpoint=bigquery_endpoint,
    )
    check_bigquery(given, WAIT_LIMIT_S)
    _check_of_an_older_dataset(given)


def _check_of_an_older_dataset(settings: Settings) -> None:
    table = f"{settings.dataset}.worker_hours"
    with connected(settings.bigquery_endpoint, settings.project) as client:
        schema = [field for field in client.get_table(table).schema if field.name != "batches"]
        client.delete_table(table)
        with pytest.raises(Unavailable, match="worker_hours"):
            check_bigquery(settings, WAIT_LIMIT_S)
        client.create_table(Table(f"{settings.project}.{table}", schema))
    with pytest.raises(Unavailable, match=r"worker_hours is missing batches; apply Terraform"):
        check_bigquery(settings, WAIT_LIMIT_S)


def test_leaves_google_alone() -> None:
    reported = provision(PENSTOCK_PUBSUB_ENDPOINT="", PENSTOCK_BIGQUERY_ENDPOINT="")
    assert reported.returncode == 0, reported.stderr
    assert reported.stdout.count("managed by Terraform") == 2


def test_server_that_does_not_come_is_named() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    reported = provision("--wait-s", "0", PENSTOCK_PUBSUB_ENDPOINT=endpoint)
    assert reported.returncode == 1
    assert reported.stderr.startswith(f"penstock: no Pub/Sub at {endpoint}: ")
    assert reported.stdout == ""
