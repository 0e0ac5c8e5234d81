"""Load jobs for Parquet files. DuckDB reads the file, whose types must match the table's.

Source: https://docs.cloud.google.com/bigquery/docs/loading-data-cloud-storage-parquet
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import duckdb

from bigquery_emulator.duckdb_words import message_of
from bigquery_emulator.errors import InvalidError, UnsupportedError
from bigquery_emulator.store import Cursor, Store
from bigquery_emulator.tables.schema import (
    Field,
    Json,
    Schema,
    parse_schema,
    quoted,
    result_schema,
)

# Other types from which each column type may be read.
_SOURCES = {
    "TIMESTAMP": ("DATETIME",),
    "DATETIME": ("TIMESTAMP",),
    "FLOAT": ("INTEGER",),
    "NUMERIC": ("INTEGER",),
    "JSON": ("STRING",),
}


class ParquetFile:
    """An uploaded file in a location that DuckDB may read.

    Args:
        path: a file in the store's upload directory.
    """

    def __init__(self, store: Store, path: Path) -> None:
        self._store = store
        self._path = path

    def schema(self, config: Json, known: Schema | None) -> Schema:
        """Returns the fields to load: the job's if given, else the table's, else the file's.

        Args:
            known: the table's fields. None if the table is new or will be replaced.

        Raises:
            InvalidError: the file is not in Parquet format, or a column does not match.
            UnsupportedError: this server does not support a type.
        """
        schema = self._fields(config)
        fields = config.get("schema", {}).get("fields")
        wanted = parse_schema(fields) if fields else known
        if wanted is None:
            return schema
        _check(schema, wanted, bool(config.get("ignoreUnknownValues")))
        return wanted

    def stage(self, cursor: Cursor, config: Json, schema: Schema, physical: str) -> int:
        """Reads the rows into a DuckDB table. Returns the number of rows.

        Raises:
            InvalidError: a value does not match the schema, or the file is damaged.
        """
        there = {field.name.lower(): field.name for field in self._fields(config)}
        columns = ", ".join(_column(field, there.get(field.name.lower())) for field in schema)
        with self._readable():
            (rows,) = cursor.execute(
                f"INSERT INTO {physical} SELECT {columns} FROM {self._rows}"
            ).fetchone()
        for field in schema:
            if field.mode == "REPEATED":
                self._check_elements(cursor, physical, field)
        return int(rows)

    @property
    def _rows(self) -> str:
        return f"read_parquet('{str(self._path).replace(chr(39), chr(39) * 2)}')"

    def _fields(self, config: Json) -> Schema:
        with self._store.reading() as cursor, self._readable():
            columns = cursor.execute(f"DESCRIBE SELECT * FROM {self._rows}").fetchall()
        schema = result_schema([(name, duckdb.sqltype(kind)) for name, kind, *_ in columns])
        if _has_array(schema) and not (config.get("parquetOptions") or {}).get(
            "enableListInference"
        ):
            raise UnsupportedError(
                "Parquet lists without enableListInference: not supported by the embedded BigQuery"
            )
        return parse_schema([field.resource() for field in schema])

    def _check_elements(self, cursor: Cursor, physical: str, field: Field) -> None:
        name = quoted(field.name)
        query = f"SELECT count(*) FROM {physical} WHERE len({name}) <> list_count({name})"
        if cursor.execute(query).fetchone()[0]:
            raise InvalidError(
                f"Error while reading data, error message: Field {field.name}: an array contains "
                "NULL"
            )

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except duckdb.InterruptException:
            raise
        except (duckdb.Error, UnicodeDecodeError) as error:
            text = message_of(error).replace(str(self._path), "the file")
            raise InvalidError(f"Error while reading data, error message: {text}") from error


@contextmanager
def parquet_file(store: Store, file: IO[bytes]) -> Iterator[ParquetFile]:
    """Puts an upload in a location that DuckDB may read, and removes it afterward."""
    file.seek(0)
    with tempfile.NamedTemporaryFile(dir=store.uploads_dir, suffix=".parquet") as copy:
        shutil.copyfileobj(file, copy)
        copy.flush()
        yield ParquetFile(store, Path(copy.name))


def _check(found: Schema, wanted: Schema, ignores_unknown: bool, path: str = "") -> None:
    there = {field.name.lower(): field for field in found}
    for field in wanted:
        match = there.pop(field.name.lower(), None)
        if match is None:
            if field.mode == "REQUIRED":
                raise InvalidError(f"Field {path}{field.name} is missing in the Parquet file")
            continue
        is_same = match.type == field.type or match.type in _SOURCES.get(field.type, ())
        if not is_same or (match.mode == "REPEATED") != (field.mode == "REPEATED"):
            raise InvalidError(
                f"Field {path}{field.name} has type {_shown(match)} in the Parquet file, which"
                f" does not match {_shown(field)}"
            )
        _check(match.fields, field.fields, ignores_unknown, f"{path}{field.name}.")
    if there and not ignores_unknown:
        raise InvalidError(f"No such field: {path}{next(iter(there.values())).name}")


def _shown(field: Field) -> str:
    return f"ARRAY<{field.type}>" if field.mode == "REPEATED" else field.type


def _column(field: Field, name: str | None) -> str:
    value = "NULL" if name is None else quoted(name)
    value = f"CAST({value} AS {field.duckdb_type})"
    if field.duckdb_type == "JSON":
        value = f"CAST(bq_json_canonical(CAST({value} AS VARCHAR)) AS JSON)"
    return f"coalesce({value}, [])" if field.mode == "REPEATED" else value


def _has_array(schema: Schema) -> bool:
    return any(field.mode == "REPEATED" or _has_array(field.fields) for field in schema)
