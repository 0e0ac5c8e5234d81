"""A server that the tests share, and a client with its own project for each test."""

import os
import sys
import uuid
from collections.abc import Iterator

import pytest
from google.cloud import bigquery
from hypothesis import settings

from tests.connecting import connected
from tests.limits import START_LIMIT_S
from tests.process import Process, free_port, listens

# Uses the same examples each time, so that any failure is caused by the change;
# `--hypothesis-profile=explore` tries others.
settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("repeatable")

# The servers run on this machine, which a proxy from the environment could not reach.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "localhost,127.0.0.1,::1"


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Returns the length of a bytes parameter as its ID. None leaves any other value to pytest.

    Two processes collect the tests and must come up with the same names.
    """
    return f"{argname}-{len(val)}-bytes" if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("GOOGLE_", "BIGQUERY_", "PUBSUB_")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def bigquery_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server that all tests share, so each test uses its own project or dataset."""
    port, folder = free_port(), tmp_path_factory.mktemp("bigquery")
    data_dir = str(folder / "data")
    command = [sys.executable, "-m", "bigquery_emulator", "--port", str(port)]
    with Process("bigquery", [*command, "--data-dir", data_dir], folder) as process:
        process.wait_ready(lambda: listens(port), START_LIMIT_S)
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def client(bigquery_endpoint: str) -> Iterator[bigquery.Client]:
    with connected(bigquery_endpoint, f"p-{uuid.uuid4().hex[:12]}") as client:
        yield client


@pytest.fixture
def dataset(client: bigquery.Client) -> str:
    return str(client.create_dataset("d").dataset_id)
