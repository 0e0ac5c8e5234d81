"""Opens and closes the embedded BigQuery: database, services and web server."""

import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import uvicorn
from anyio.abc import TaskGroup

from infra.emulators.bigquery.app import create_app
from infra.emulators.bigquery.engine.expiration import expire_forever
from infra.emulators.bigquery.engine.jobs import Jobs
from infra.emulators.bigquery.engine.query import Queries, Result
from infra.emulators.bigquery.engine.service import BigQueryService
from infra.emulators.bigquery.googlesql.translate import Translator
from infra.emulators.bigquery.store import Store
from infra.emulators.bigquery.tables.catalog import TableCatalog
from infra.emulators.bigquery.threads import Threads

_SHUTDOWN_S = 5
_BACKLOG = 1_024
_MOST_CONNECTIONS = 1_000


@dataclass(frozen=True)
class BigQueryServer:
    """A running server."""

    host: str
    port: int

    @property
    def endpoint(self) -> str:
        """The address to give to a client as its `api_endpoint`."""
        return f"http://{self.host}:{self.port}"


@asynccontextmanager
async def serve(host: str, port: int, data_dir: Path | None) -> AsyncIterator[BigQueryServer]:
    """Runs the server for the length of a `with` block.

    Args:
        host: the address to listen on.
        port: 0 takes a free one.
        data_dir: where the data is kept. None keeps it in memory.

    Raises:
        OSError: where the port is taken, or the data directory is in use by another process.
    """
    with _bound(host, port) as listener:
        store = Store(data_dir)
        store.open()
        try:
            catalog = TableCatalog(store)
            catalog.load()
            # Only now: a port that listens says that the data is there.
            listener.listen(_BACKLOG)
            async with anyio.create_task_group() as tasks:
                service = _service(store, catalog, tasks)
                tasks.start_soon(expire_forever, service)
                async with _listening(service, listener, tasks):
                    yield BigQueryServer(host, listener.getsockname()[1])
                tasks.cancel_scope.cancel()
        finally:
            store.close()


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without the protocol asyncio leaves Nagle on, and each answer waits 40 ms for an
    # acknowledgment.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def _service(store: Store, catalog: TableCatalog, tasks: TaskGroup) -> BigQueryService:
    threads, queries = Threads(), Queries(store)

    async def let_go(result: Result) -> None:
        await threads.read(queries.drop, result.physical)

    translator = Translator(catalog.table, catalog.tables_of)
    return BigQueryService(store, catalog, threads, queries, translator, Jobs(tasks, let_go))


class _Server(uvicorn.Server):
    """Signals belong to the program that runs this server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def _listening(
    service: BigQueryService, listener: socket.socket, tasks: TaskGroup
) -> AsyncIterator[None]:
    config = uvicorn.Config(
        create_app(service),
        lifespan="off",
        log_level="warning",
        access_log=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    server = _Server(config)
    stopped = anyio.Event()

    async def run() -> None:
        try:
            await server.serve(sockets=[listener])
        finally:
            stopped.set()

    tasks.start_soon(run)
    try:
        yield
    finally:
        server.should_exit = True
        with anyio.CancelScope(shield=True), anyio.move_on_after(_SHUTDOWN_S + 1):
            await stopped.wait()
