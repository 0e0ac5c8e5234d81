"""Fixtures for many tests: a clean environment, and real servers on separate ports, each started
when first used.
"""

import gc
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest
import redis
from hypothesis import settings

from api.idempotency.store import IdempotencyStore
from api.limits.accounts import LimitStore
from infra.local.process import Process, free_port, listens
from infra.local.reaper import child_marks
from infra.local.redis_server import RedisServer
from infra.local.stack import Broker
from infra.local.stack_processes import RabbitServer
from shared.process.gc_tuning import YOUNG_OBJECTS
from shared.process.loopback import exempt_loopback_from_proxies
from shared.stores.cache import ResultCache
from shared.stores.key_stores import KeyRedis
from shared.stores.records_redis import RecordsRedis
from tests.groups import GroupScheduling, longest_first
from tests.limits import REDIS_LIMIT_S, START_LIMIT_S, TEST_LIMIT_S
from tests.rabbitmq import needs_rabbitmq
from tests.tiers import QUICK_EXAMPLES, QuickTests, has_none_of

if TYPE_CHECKING:
    # Otherwise, every process in a run would import OpenTelemetry, although few tests need it.
    from tests.kept_spans import KeptSpans
    from tests.otlp import Collector

# Torch threads wait for one another. By default they spin, which blocks a core that another thread
# needs. At a load of 20, that takes 8 s of CPU time rather than 0.7 s. A model process spins less
# (GOMP_SPINS).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The same threshold as in a serving process. Python's default threshold of 700 takes a fifth of the
# CPU time when collecting tests, and a twentieth when running small tests.
gc.set_threshold(YOUNG_OBJECTS, 20, 20)

# Uses the same examples every time, so that any new failure is caused by the change under test. A
# quick run uses few examples, and `make test-slow` uses many, for these tests too;
# `--hypothesis-profile=explore` tries different ones.
settings.register_profile(
    "few", derandomize=True, deadline=None, print_blob=True, max_examples=QUICK_EXAMPLES
)
settings.register_profile("many", settings.get_profile("few"), max_examples=100)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("few")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.timeout is None:
        config.option.timeout = TEST_LIMIT_S
    config.pluginmanager.register(QuickTests(is_enforced="CI" in os.environ), "quick-tests")
    exempt_loopback_from_proxies()
    # Everything that tests start exits along with this process, even if it is killed.
    os.environ.update(child_marks())


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Undoes the effect of `settle_heap` in an API in this process.

    Python does not free frozen objects when it exits, so libraries would report thousands of leaks.
    """
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--broker",
        choices=get_args(Broker),
        default="pubsub",
        help="of the stack that the end-to-end tests start",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> GroupScheduling | None:
    return GroupScheduling(config, log) if config.option.dist == "loadfile" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return has_none_of(config.option.markexpr, collection_path) or None


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Returns the length of a bytes parameter as its id.

    For other values, None leaves the choice to pytest.

    Two processes collect the tests and must get the same names. Packed bytes include the second
    when they were packed.
    """
    return f"{argname}-{len(val)}-bytes" if isinstance(val, bytes) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the slowest tests first, and adds an event loop to the async tests in this folder."""
    ours = Path(__file__).parent
    for item in items:
        names = item.fixturenames if isinstance(item, pytest.Function) else []
        if "anyio_backend" in names and item.path.is_relative_to(ours):
            names.insert(0, "_one_event_loop")
    items[:] = longest_first(items)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
async def _one_event_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Keeps one event loop for all tests in a process, just like one of our processes.

    gRPC's poller serves all of a process's loops: pending work from a closed loop would fail the
    next test with "Event loop is closed".
    """
    yield  # noqa: PT022  what follows a yield keeps the loop


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("PENSTOCK_", "GOOGLE_", "BIGQUERY_", "PUBSUB_", "OTEL_")):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _patient_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis may be slow on a busy machine; a test about slow Redis sets its own limit."""
    for kind in (LimitStore, ResultCache, RecordsRedis, IdempotencyStore, KeyRedis):
        monkeypatch.setitem(kind.__init__.__kwdefaults__ or {}, "timeout_s", REDIS_LIMIT_S)


@pytest.fixture(scope="session")
def artifacts_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder where workers store their choice of backend, shared by all processes in this test run.

    The first process spends about ten seconds measuring; the others don't have to.
    """
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "artifacts"


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("redis")
    with RedisServer(folder, folder) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """An empty Redis; a test that stops or pauses a server must start its own."""
    return emptied(redis_server)


def emptied(server: RedisServer) -> str:
    """Empties a Redis and returns its URL; if the server has died, fails the test with the end of
    its log.
    """
    if not server.is_running:
        pytest.fail(f"{server.name} {server.ending}{server.last_words()}")
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return server.url


@pytest.fixture(scope="session")
def pubsub_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of an embedded Pub/Sub. It is shared, so each test uses its own project or
    topics.
    """
    port = free_port()
    command = [sys.executable, "-m", "pubsub_emulator", "--port", str(port)]
    with _running("pubsub", command, port, tmp_path_factory.mktemp("pubsub")):
        yield f"127.0.0.1:{port}"


@pytest.fixture(scope="session")
def collector() -> "Iterator[Collector]":
    from tests.otlp import running_collector

    with running_collector() as made:
        yield made


@pytest.fixture
def kept() -> "Iterator[KeptSpans]":
    """The spans this process creates during the test."""
    from tests.kept_spans import keeping_spans

    with keeping_spans() as spans:
        yield spans


@pytest.fixture(scope="session")
def rabbitmq_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    """A RabbitMQ server from this machine's packages.

    It is shared, so each test uses its own project.
    """
    needs_rabbitmq()
    folder = tmp_path_factory.mktemp("rabbitmq")
    with RabbitServer(folder / "data", folder) as server:
        yield server


@pytest.fixture(scope="session")
def bigquery_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an embedded BigQuery. It is shared, so each test uses its own project or dataset."""
    port, folder = free_port(), tmp_path_factory.mktemp("bigquery")
    command = [
        sys.executable,
        "-m",
        "bigquery_emulator",
        "--port",
        str(port),
        "--data-dir",
        str(folder / "data"),
    ]
    with _running("bigquery", command, port, folder):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _running(name: str, command: list[str], port: int, folder: Path) -> Iterator[None]:
    with Process(name, command, folder) as process:
        process.wait_ready(lambda: listens(port), START_LIMIT_S)
        yield
