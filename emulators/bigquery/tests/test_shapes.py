"""Rows that arrive while their table is being changed: the order of events, not durations."""

import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest

from bigquery_emulator.app import create_app
from bigquery_emulator.engine.information.views import InformationViews
from bigquery_emulator.engine.jobs import Jobs
from bigquery_emulator.engine.query import Queries, Result
from bigquery_emulator.engine.service import BigQueryService
from bigquery_emulator.errors import UnavailableError
from bigquery_emulator.googlesql.translate import Translator
from bigquery_emulator.store import Store
from bigquery_emulator.tables.catalog import TableCatalog
from bigquery_emulator.tables.resources import DatasetKey, TableKey
from bigquery_emulator.tables.schema import parse_schema
from bigquery_emulator.tables.shapes import Shapes
from bigquery_emulator.threads import Threads
from tests.limits import WAIT_LIMIT_S

ONE, OTHER = (TableKey("p", "d", name) for name in ("one", "other"))


@asynccontextmanager
async def requests_to(catalog: TableCatalog, store: Store) -> AsyncIterator[httpx.AsyncClient]:
    async def keep(_: Result) -> None:
        pass

    async with anyio.create_task_group() as tasks:
        jobs, threads = Jobs(tasks, keep), Threads()
        translator = Translator(catalog.table, InformationViews(store, catalog, jobs).listing)
        service = BigQueryService(store, catalog, threads, Queries(store), translator, jobs)
        transport = httpx.ASGITransport(create_app(service))
        base = "http://bigquery/bigquery/v2/projects/p/datasets/d/tables"
        async with httpx.AsyncClient(transport=transport, base_url=base) as http:
            yield http


async def insert(http: httpx.AsyncClient, key: TableKey) -> httpx.Response:
    return await http.post(f"/{key.table_id}/insertAll", json={"rows": [{"json": {"a": 1}}]})


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(None)
    store.open()
    TableCatalog(store).load()
    yield store
    store.close()


@pytest.mark.anyio
async def test_rows_of_a_table_that_is_changed_are_refused_and_those_of_others_are_not(
    store: Store,
) -> None:
    catalog = TableCatalog(store)
    catalog.shapes = Shapes(patience_s=0)
    catalog.create_dataset(DatasetKey("p", "d"), {})
    for key in (ONE, OTHER):
        catalog.create_table(key, parse_schema([{"name": "a", "type": "INT64"}]), {})
    async with requests_to(catalog, store) as http:
        with catalog.shapes.changing(ONE):
            refused = await insert(http, ONE)
            assert refused.status_code == 503, refused.text
            (error,) = refused.json()["error"]["errors"]
            assert error["reason"] == "backendError"
            assert "p:d.one is being changed" in error["message"]
            assert (await insert(http, OTHER)).json().keys() == {"kind"}
        assert (await insert(http, ONE)).json().keys() == {"kind"}


def test_rows_wait_for_a_short_change() -> None:
    shapes, is_changing, may_end = Shapes(WAIT_LIMIT_S), threading.Event(), threading.Event()

    def change() -> None:
        with shapes.changing(ONE):
            is_changing.set()
            assert may_end.wait(WAIT_LIMIT_S)

    def add() -> bool:
        with shapes.adding(ONE):
            return may_end.is_set()

    with ThreadPoolExecutor(2) as pool:
        changing = pool.submit(change)
        assert is_changing.wait(WAIT_LIMIT_S)
        adding = pool.submit(add)
        may_end.set()
        changing.result(WAIT_LIMIT_S)
        assert adding.result(WAIT_LIMIT_S)


def add_until_done(shapes: Shapes, changing: Future[None]) -> None:
    while not changing.done():
        with shapes.adding(ONE):
            pass


def test_a_change_waits_for_the_rows_that_came_first_and_keeps_later_ones_out() -> None:
    shapes, events = Shapes(patience_s=0), list[str]()

    def change() -> None:
        with shapes.changing(ONE):
            events.append("changed")

    with ThreadPoolExecutor(1) as pool:
        with shapes.adding(ONE):
            changing = pool.submit(change)
            # The change has begun once rows are rejected.
            with pytest.raises(UnavailableError):
                add_until_done(shapes, changing)
            assert not changing.done()
            events.append("added")
        changing.result(WAIT_LIMIT_S)
    assert events == ["added", "changed"]


def test_a_change_that_fails_lets_rows_in_again() -> None:
    shapes = Shapes(patience_s=0)
    with pytest.raises(ZeroDivisionError), shapes.changing(ONE):
        raise ZeroDivisionError
    with shapes.adding(ONE):
        pass
