"""Starts and stops the embedded BigQuery: its database, services, and web server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import duckdb
from anyio import to_thread
from anyio.abc import TaskGroup

from bigquery_emulator.app import create_app
from bigquery_emulator.engine.expiration import expire_forever
from bigquery_emulator.engine.information.views import InformationViews
from bigquery_emulator.engine.jobs import Jobs
from bigquery_emulator.engine.query import Queries, Result
from bigquery_emulator.engine.service import BigQueryService
from bigquery_emulator.googlesql.translate import Translator
from bigquery_emulator.store import Store
from bigquery_emulator.tables.catalog import TableCatalog
from bigquery_emulator.threads import Threads
from bigquery_emulator.web_server import answering, bound

_BACKLOG = 1_024


@dataclass(frozen=True)
class BigQueryServer:
    """A running server."""

    host: str
    port: int

    @property
    def endpoint(self) -> str:
        """The address to pass as a client's `api_endpoint`."""
        return f"http://{self.host}:{self.port}"


@asynccontextmanager
async def serve(host: str, port: int, data_dir: Path | None) -> AsyncIterator[BigQueryServer]:
    """Runs the server during a `with` block.

    Args:
        port: 0 selects a free port.
        data_dir: directory for the data. None keeps it in memory.

    Raises:
        OSError: the port is in use, or another process is using the data directory.
    """
    with bound(host, port) as listener:
        store = Store(data_dir)
        store.open()
        try:
            catalog = TableCatalog(store)
            try:
                catalog.load()
            except (duckdb.Error, ValueError, TypeError) as error:
                reason = str(error).split("\n")[0]
                raise OSError(f"cannot read the catalog in {data_dir}: {reason}") from error
            # Done last, because a listening port signals that the data is available.
            listener.listen(_BACKLOG)
            async with anyio.create_task_group() as tasks:
                service = _service(store, catalog, tasks)
                tasks.start_soon(expire_forever, service)
                tasks.start_soon(_load_analyzer, service)
                async with answering(create_app(service), listener):
                    yield BigQueryServer(host, listener.getsockname()[1])
                tasks.cancel_scope.cancel()
        finally:
            store.close()


async def _load_analyzer(service: BigQueryService) -> None:
    """Loads GoogleSQL's analyzer in the background. The first queries wait until it is loaded."""
    await to_thread.run_sync(service.translator.analyzer.load, abandon_on_cancel=True)


def _service(store: Store, catalog: TableCatalog, tasks: TaskGroup) -> BigQueryService:
    threads, queries = Threads(), Queries(store)

    async def let_go(result: Result) -> None:
        if result.physical:
            await threads.tidy(queries.drop, result.physical)

    jobs = Jobs(tasks, let_go)
    translator = Translator(catalog.table, InformationViews(store, catalog, jobs).listing)
    return BigQueryService(store, catalog, threads, queries, translator, jobs)
