"""The functions as functions-framework runs them, with real pushes and real servers."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery

from infra.bigquery import create
from infra.local.process import Process, answers, free_port
from infra.local.redis_server import RedisServer
from shared.broker.pubsub.admin import PubSubAdmin
from shared.broker.pubsub.client import PubSubTransport
from shared.settings import environment_with
from tests.limits import START_LIMIT_S
from tests.record_stores import RecordStores
from tests.workers.functions.receiver import Receiver
from tests.workers.functions.tokens import ACCOUNT, AUDIENCE, Issuer, certificates_of
from tests.workers.functions.world import World

PROJECT, DATASET = "functions", "penstock"
SECRETS = "whsec_" + "bmV3" * 11 + ",whsec_" + "b2xk" * 11


@pytest.fixture(scope="session")
def functions_settings(
    redis_server: RedisServer, pubsub_endpoint: str, bigquery_endpoint: str
) -> dict[str, str]:
    return {
        "PENSTOCK_PROJECT": PROJECT,
        "PENSTOCK_DATASET": DATASET,
        "PENSTOCK_REGION": "here",
        "PENSTOCK_PUBSUB_ENDPOINT": pubsub_endpoint,
        "PENSTOCK_BIGQUERY_ENDPOINT": bigquery_endpoint,
        "PENSTOCK_REDIS_URL": redis_server.url,
        "PENSTOCK_SECRET": "links",
        "PENSTOCK_WEBHOOK_SECRETS": SECRETS,
        "PENSTOCK_WEBHOOKS_PRIVATE": "1",
    }


def functions_process(settings: dict[str, str], target: str, port: int, folder: Path) -> Process:
    source = ["--source", "workers/functions/main.py", "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-m", "functions_framework", "--target", target, *source]
    return Process(f"functions-{target}", command, folder, environment=environment_with(settings))


@pytest.fixture(scope="session")
def functions_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("functions")


@pytest.fixture(scope="session")
def functions_port(functions_settings: dict[str, str], functions_folder: Path) -> Iterator[int]:
    """Both functions in one process, the way they run on one machine."""
    port = free_port()
    with functions_process(functions_settings, "functions", port, functions_folder) as process:
        process.wait_ready(lambda: answers(port, "/"), START_LIMIT_S)
        yield port


@pytest.fixture
def functions_log(functions_folder: Path) -> Path:
    """The output and logs of the functions process."""
    (found,) = functions_folder.glob("*.log")
    return found


@pytest.fixture(scope="session")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture(scope="session")
def guarded_url(
    functions_settings: dict[str, str], issuer: Issuer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """As in the cloud, only one account may call it, and it reaches only public addresses."""
    port, folder = free_port(), tmp_path_factory.mktemp("guarded")
    settings = functions_settings | {
        "PENSTOCK_PUSH_AUDIENCE": AUDIENCE,
        "PENSTOCK_PUSH_ACCOUNT": ACCOUNT,
        "PENSTOCK_WEBHOOKS_PRIVATE": "0",
    }
    with certificates_of(issuer) as (certs_url, _):
        settings["PENSTOCK_PUSH_CERTS_URL"] = certs_url
        with functions_process(settings, "functions", port, folder) as process:
            process.wait_ready(lambda: answers(port, "/"), START_LIMIT_S)
            yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def table(bigquery_endpoint: str) -> Iterator[bigquery.Client]:
    options = {"api_endpoint": bigquery_endpoint}
    client = bigquery.Client(
        project=PROJECT, credentials=AnonymousCredentials(), client_options=options
    )
    create(client, DATASET)
    with client:
        yield client


@pytest.fixture
async def world(
    functions_port: int,
    functions_settings: dict[str, str],
    table: bigquery.Client,
    pubsub_endpoint: str,
) -> AsyncIterator[World]:
    """A separate model for the test, with everything provisioned for it."""
    redis_url = functions_settings["PENSTOCK_REDIS_URL"]
    async with (
        PubSubAdmin(PROJECT, pubsub_endpoint) as admin,
        PubSubTransport(PROJECT, pubsub_endpoint) as broker,
        RecordStores(redis_url) as stores,
    ):
        made = World(
            admin,
            broker,
            stores,
            table,
            f"http://127.0.0.1:{functions_port}",
            uuid.uuid4().hex[:8],
        )
        async with made.running():
            yield made


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver() as running:
        yield running
