"""What a start finds in its data directory: taken, left out by name, or refused in one line."""

import logging
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from infra.emulators.bigquery.engine.expiration import expire
from infra.emulators.bigquery.store import FILE_NAME, Store
from infra.emulators.bigquery.tables.catalog import TableCatalog
from infra.emulators.bigquery.tables.resources import DatasetKey, TableKey
from infra.emulators.bigquery.tables.schema import Field
from tests.limits import START_LIMIT_S

GOOD, BAD = TableKey("p", "d", "good"), TableKey("p", "d", "bad")


def filled(data_dir: Path) -> Path:
    store = Store(data_dir)
    store.open()
    catalog = TableCatalog(store)
    catalog.load()
    catalog.create_dataset(DatasetKey("p", "d"), {})
    for key in (GOOD, BAD):
        catalog.create_table(key, (Field("a", "INTEGER"),), {})
    with store.cursor() as cursor:
        rows = "SELECT range FROM range(100000)"
        cursor.execute(f"INSERT INTO {catalog.table(GOOD).physical} {rows}")
    store.close()
    return data_dir / FILE_NAME


def changed(path: Path, sql: str) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute(sql)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE tables SET settings = '{' WHERE table_id = 'bad'",
        "UPDATE tables SET settings = '[]' WHERE table_id = 'bad'",
        "UPDATE tables SET settings = NULL WHERE table_id = 'bad'",
        """UPDATE tables SET settings = '{"expirationTime": "soon"}' WHERE table_id = 'bad'""",
        """UPDATE tables SET fields = '[{"name": 7}]' WHERE table_id = 'bad'""",
        "UPDATE tables SET dataset_id = 'gone' WHERE table_id = 'bad'",
        "DROP TABLE t2",
    ],
)
def test_a_record_that_cannot_be_read_is_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    changed(filled(tmp_path), damage)
    store = Store(tmp_path)
    store.open()
    try:
        catalog = TableCatalog(store)
        with caplog.at_level(logging.WARNING):
            catalog.load()
        assert list(catalog.tables) == [GOOD]
        (said,) = caplog.messages
        assert said.startswith("p:")
        assert ".bad can't be read and is left out: " in said
        expire(store, catalog, 2**62)
        assert list(catalog.tables) == [GOOD]
    finally:
        store.close()


@pytest.mark.parametrize("damage", ["overwritten", "cut", "text", "folder", "other"])
def test_a_file_that_cannot_be_trusted_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    path = filled(tmp_path)
    if damage == "overwritten":
        content = path.read_bytes()
        path.write_bytes(content[:4_096] + b"\xa5" * (len(content) - 4_096))
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:10_000])
    elif damage == "text":
        path.write_text("not a database" * 1_000)
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        changed(path, "DROP TABLE datasets; CREATE TABLE datasets (a INTEGER)")
        changed(path, "INSERT INTO datasets VALUES (1)")
    run = subprocess.run(
        [
            *(sys.executable, "-m", "infra.emulators.bigquery", "--port", "0"),
            *("--data-dir", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    assert (run.returncode, run.stdout) == (1, "")
    (said,) = run.stderr.splitlines()
    assert said.startswith("penstock bigquery: cannot ")
    assert str(tmp_path) in said
