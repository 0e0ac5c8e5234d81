"""The data directory at startup: damaged parts are skipped by name or rejected in one line."""

import logging
import struct
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from bigquery_emulator.engine.expiration import expire
from bigquery_emulator.store import FILE_NAME, Store
from bigquery_emulator.tables.catalog import TableCatalog
from bigquery_emulator.tables.resources import DatasetKey, TableKey
from bigquery_emulator.tables.schema import Field
from tests.limits import START_LIMIT_S

GOOD, BAD = TableKey("p", "d", "good"), TableKey("p", "d", "bad")
_DATABASE_HEADERS = (4_096, 8_192)
_VERSION_AT = 56
"""Positions of DuckDB's file headers and of the storage version in each (storage_info.hpp)."""


def filled(data_dir: Path) -> Path:
    store = Store(data_dir)
    store.open()
    catalog = TableCatalog(store)
    catalog.load()
    catalog.create_dataset(DatasetKey("p", "d"), {})
    for key in (GOOD, BAD):
        catalog.create_table(key, (Field("a", "INTEGER"),), {})
    with store.transaction() as cursor:
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
        (warning,) = caplog.messages
        assert warning.startswith("p:")
        assert ".bad can't be read and is left out: " in warning
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
    assert str(tmp_path) in refusal_of_a_start(tmp_path)


def test_a_file_of_a_newer_version_is_refused_with_its_name_and_both_versions(
    tmp_path: Path,
) -> None:
    path = filled(tmp_path)
    content = bytearray(path.read_bytes())
    for block in _DATABASE_HEADERS:
        (version,) = struct.unpack_from("<Q", content, block + _VERSION_AT)
        struct.pack_into("<Q", content, block + _VERSION_AT, version + 40)
        struct.pack_into("<Q", content, block, checksum(content[block + 8 : block + 4_096]))
    path.write_bytes(content)
    message = refusal_of_a_start(tmp_path)
    assert f"cannot open {path}: " in message
    assert f"storage version number {version + 40}, " in message
    assert f" and {version}." in message
    assert path.read_bytes() == content


def checksum(block: bytes | bytearray) -> int:
    """Returns DuckDB's checksum for a block (src/storage/checksum.cpp)."""
    checksum = 5381
    for (word,) in struct.iter_unpack("<Q", block):
        checksum ^= (word * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return checksum


def refusal_of_a_start(data_dir: Path) -> str:
    """Returns the single line that a server prints if it can't start."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", "bigquery_emulator", "--port", "0"),
            *("--data-dir", str(data_dir)),
        ],
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    assert (run.returncode, run.stdout) == (1, "")
    (line,) = run.stderr.splitlines()
    assert line.startswith("bigquery-emulator: cannot ")
    return line
