"""Table and partition expiration, with a clock that the test controls."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from bigquery_emulator.engine.expiration import expire
from bigquery_emulator.errors import InvalidError
from bigquery_emulator.store import Store
from bigquery_emulator.tables.catalog import TableCatalog
from bigquery_emulator.tables.resources import DatasetKey, TableKey
from bigquery_emulator.tables.rows import insert_rows
from bigquery_emulator.tables.schema import Json, parse_schema

DAY_MS = 86_400_000
NOW_MS = 20_000 * DAY_MS
SCHEMA = parse_schema([{"name": "day", "type": "DATE"}])


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(None)
    store.open()
    yield store
    store.close()


@pytest.fixture
def catalog(store: Store) -> TableCatalog:
    catalog = TableCatalog(store, now_ms=lambda: NOW_MS)
    catalog.load()
    return catalog


def table(catalog: TableCatalog, settings: Json, **dataset: str) -> TableKey:
    catalog.create_dataset(DatasetKey("p", "d"), dataset)
    return catalog.create_table(TableKey("p", "d", "t"), SCHEMA, settings).key


def days(store: Store, catalog: TableCatalog, key: TableKey) -> list[str]:
    with store.transaction() as cursor:
        rows = cursor.execute(
            f"SELECT day FROM {catalog.table(key).physical} ORDER BY day"
        ).fetchall()
    return [str(day) for (day,) in rows]


def test_a_table_lives_until_its_expiration(store: Store, catalog: TableCatalog) -> None:
    key = table(catalog, {"expirationTime": str(NOW_MS + 1)})
    expire(store, catalog, NOW_MS)
    assert key in catalog.tables
    expire(store, catalog, NOW_MS + 1)
    assert key not in catalog.tables


def test_a_dataset_gives_its_tables_their_expiration(store: Store, catalog: TableCatalog) -> None:
    key = table(catalog, {}, defaultTableExpirationMs="3600000")
    assert catalog.table(key).settings["expirationTime"] == str(NOW_MS + 3_600_000)


def test_a_table_that_expires_after_the_last_year_is_kept(
    store: Store, catalog: TableCatalog
) -> None:
    key = table(catalog, {}, defaultTableExpirationMs=str(2**63 - 1))
    again = TableCatalog(store)
    again.load()
    assert again.tables.keys() == {key}


def test_partitions_leave_one_by_one(store: Store, catalog: TableCatalog) -> None:
    partitioning = {"type": "DAY", "field": "day", "expirationMs": str(2 * DAY_MS)}
    key = table(catalog, {"timePartitioning": partitioning})
    # Day 20,000 after 1970 is 4 October 2024.
    rows: list[Json] = [{"day": f"2024-10-0{day}"} for day in (1, 2, 3, 4)]
    with store.transaction() as cursor:
        insert_rows(cursor, catalog.table(key).physical, SCHEMA, [*rows, {"day": None}])
    expire(store, catalog, NOW_MS - 1)
    assert days(store, catalog, key) == ["2024-10-02", "2024-10-03", "2024-10-04", "None"]
    expire(store, catalog, NOW_MS)
    assert days(store, catalog, key) == ["2024-10-03", "2024-10-04", "None"]


def test_an_expiration_of_zero_is_none(store: Store, catalog: TableCatalog) -> None:
    partitioning = {"type": "DAY", "field": "day", "expirationMs": "0"}
    key = table(catalog, {"timePartitioning": partitioning})
    with store.transaction() as cursor:
        insert_rows(cursor, catalog.table(key).physical, SCHEMA, [{"day": "2001-01-01"}])
    expire(store, catalog, NOW_MS)
    assert days(store, catalog, key) == ["2001-01-01"]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"expirationTime": "2027-01-01T00:00:00Z"}, "expirationTime"),
        ({"expirationTime": -1}, "expirationTime"),
        ({"expirationTime": 10**30}, "expirationTime"),
        ({"timePartitioning": "DAY"}, "timePartitioning"),
        ({"timePartitioning": {"expirationMs": "soon"}}, "timePartitioning.expirationMs"),
        ({"rangePartitioning": {"field": []}}, "rangePartitioning.field"),
        ({"clustering": ["day"]}, "clustering"),
        ({"clustering": {"fields": [1.5]}}, r"clustering.fields\[0\]"),
        ({"labels": {"a": {}}}, r"labels\[...\]"),
        ({"requirePartitionFilter": "perhaps"}, "requirePartitionFilter"),
        ({"view": {"query": 7.5}}, "view.query"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_by_name(
    catalog: TableCatalog, settings: Json, field: str
) -> None:
    with pytest.raises(InvalidError, match=f"Invalid value for {field}: "):
        table(catalog, settings)
    assert not catalog.tables


def test_what_an_earlier_server_let_in_ends_no_expiration_of_others(
    store: Store, catalog: TableCatalog, caplog: pytest.LogCaptureFixture
) -> None:
    broken = table(catalog, {})
    catalog.tables[broken] = replace(catalog.table(broken), settings={"expirationTime": "soon"})
    key = catalog.create_table(TableKey("p", "d", "u"), SCHEMA, {"expirationTime": "1"}).key
    expire(store, catalog, NOW_MS)
    assert set(catalog.tables) == {broken}
    assert str(broken) in caplog.text
    assert key not in catalog.tables
