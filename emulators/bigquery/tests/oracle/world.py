"""Runs a query in two places: ZetaSQL's reference evaluator and the embedded BigQuery's engine."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from zetasql.wasi._pb2.zetasql.local_service import local_service_pb2 as service
from zetasql.wasi._pb2.zetasql.proto.options_pb2 import AnalyzerOptionsProto
from zetasql.wasi._pb2.zetasql.proto.simple_catalog_pb2 import SimpleCatalogProto
from zetasql.wasi._pb2.zetasql.public import type_pb2 as types

from bigquery_emulator.engine.query import Queries, Result
from bigquery_emulator.errors import ServiceError, UnsupportedError
from bigquery_emulator.googlesql.analysis.analyzer import (
    NamedTable,
    ParameterTypes,
)
from bigquery_emulator.googlesql.analysis.language import language
from bigquery_emulator.googlesql.analysis.module import (
    AnalyzerModule,
    AnalyzerRefusedError,
    AnalyzerTrappedError,
)
from bigquery_emulator.googlesql.analysis.types import type_of_field
from bigquery_emulator.googlesql.translate import Translator
from bigquery_emulator.store import Store
from bigquery_emulator.tables.catalog import TableCatalog
from bigquery_emulator.tables.resources import DatasetKey, TableKey
from bigquery_emulator.tables.rows import readable_columns
from bigquery_emulator.tables.schema import parse_schema, quoted

_REFUSAL = "not supported by the embedded BigQuery"
DATASET = DatasetKey("p", "d")
_PEOPLE: list[dict[str, Any]] = [
    {"name": "id", "type": "INT64"},
    {"name": "name", "type": "STRING"},
    {"name": "team", "type": "STRING"},
    {"name": "score", "type": "FLOAT64"},
    {"name": "born", "type": "DATE"},
    {"name": "seen", "type": "TIMESTAMP"},
    {"name": "tags", "type": "STRING", "mode": "REPEATED"},
    {
        "name": "address",
        "type": "RECORD",
        "fields": [{"name": "city", "type": "STRING"}, {"name": "zip", "type": "INT64"}],
    },
]
_ORDERS: list[dict[str, Any]] = [
    {"name": "person", "type": "INT64"},
    {"name": "item", "type": "STRING"},
    {"name": "paid", "type": "NUMERIC"},
]
_THINGS: list[dict[str, Any]] = [
    *(
        {"name": name, "type": kind}
        for name, kind in (
            ("k", "INT64"),
            ("n", "NUMERIC"),
            ("f", "FLOAT64"),
            ("b", "BOOL"),
            ("y", "BYTES"),
            ("dt", "DATETIME"),
            ("t", "TIME"),
            ("d", "DATE"),
            ("g", "STRING"),
            ("i", "INT64"),
        )
    ),
    {"name": "xs", "type": "INT64", "mode": "REPEATED"},
    {
        "name": "items",
        "type": "RECORD",
        "mode": "REPEATED",
        "fields": [{"name": "p", "type": "STRING"}, {"name": "q", "type": "INT64"}],
    },
]
"""NULLs and extreme values for all types."""
_ROWS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "people": (
        _PEOPLE,
        """
SELECT 1, 'ann', 'red', 1.5, DATE '1990-05-01', TIMESTAMP '2024-01-05 10:00:00+00',
  ['a', 'b'], STRUCT('Rome' AS city, 10 AS zip)
UNION ALL SELECT 2, 'bob', 'red', CAST('NaN' AS FLOAT64), DATE '2000-02-29',
  TIMESTAMP '2024-01-05 23:30:00.5+00', CAST([] AS ARRAY<STRING>), STRUCT('Oslo', 20)
UNION ALL SELECT 3, 'cyd', 'blue', 2.5, NULL, TIMESTAMP '2024-03-10 07:30:00+00', ['c'],
  STRUCT(NULL, 30)
UNION ALL SELECT 4, NULL, 'blue', NULL, DATE '1990-05-01', NULL, ['a'], STRUCT('Rome', 40)
UNION ALL SELECT 5, 'Ann', NULL, CAST('inf' AS FLOAT64), DATE '1969-12-31',
  TIMESTAMP '1969-12-31 23:59:59+00', ['d', 'e'], STRUCT('Rome', NULL)
UNION ALL SELECT 6, 'dan', 'green', -0.5, DATE '2024-12-30', TIMESTAMP '2024-11-03 06:30:00+00',
  CAST([] AS ARRAY<STRING>), STRUCT('', 0)
UNION ALL SELECT 7, 'eva', 'green', CAST('NaN' AS FLOAT64), NULL,
  TIMESTAMP '2024-01-05 10:00:00+00', ['b'], STRUCT('Oslo', 20)""",
    ),
    "orders": (
        _ORDERS,
        """
SELECT 1, 'pen', NUMERIC '1.5'
UNION ALL SELECT 1, 'ink', NUMERIC '2.25'
UNION ALL SELECT 3, 'cup', NUMERIC '0.1'
UNION ALL SELECT 9, 'hat', NULL
UNION ALL SELECT NULL, 'bag', NUMERIC '10'""",
    ),
    "things": (
        _THINGS,
        """
SELECT 1, NUMERIC '1.5', 1.5, TRUE, b'abc', DATETIME '2024-01-05 10:11:12.5',
  TIME '10:11:12.5', DATE '2024-02-29', 'a', 10, [1,2,3], [STRUCT('x' AS p, 1 AS q),
  STRUCT('y', 2)]
UNION ALL SELECT 2, NUMERIC '-2.25', CAST('NaN' AS FLOAT64), FALSE, b'',
  DATETIME '0001-01-01 00:00:00', TIME '00:00:00', DATE '0001-01-01', 'a', 20, [3,1],
  [STRUCT('z' AS p, CAST(NULL AS INT64) AS q)]
UNION ALL SELECT 3, NULL, CAST('-inf' AS FLOAT64), NULL, NULL, NULL, NULL, NULL, 'b', NULL,
  CAST([] AS ARRAY<INT64>), CAST([] AS ARRAY<STRUCT<p STRING, q INT64>>)
UNION ALL SELECT 4, NUMERIC '99999999999999999999999999999.999999999', -0.0, TRUE,
  b'\\xff\\x00', DATETIME '9999-12-31 23:59:59.999999', TIME '23:59:59.999999',
  DATE '9999-12-31', 'b', 10, [9], [STRUCT('x' AS p, 3 AS q)]
UNION ALL SELECT 5, NUMERIC '1.5', NULL, FALSE, b'abd', DATETIME '2024-01-05 10:11:12.5',
  TIME '10:11:12.5', DATE '2024-03-01', NULL, -5, [2,2], [STRUCT('y' AS p, 5 AS q)]
UNION ALL SELECT 6, NUMERIC '0', 1e10, TRUE, b'abc', DATETIME '2023-12-31 23:59:59',
  TIME '12:00:00', DATE '2023-12-31', 'c', 30, [5,4],
  [STRUCT(CAST(NULL AS STRING) AS p, 7 AS q)]
UNION ALL SELECT 7, NUMERIC '0.000000001', 1.5, NULL, b'zz', DATETIME '2024-02-29 12:00:00',
  TIME '06:30:00', DATE '2024-02-28', 'c', 30, [7],
  CAST([] AS ARRAY<STRUCT<p STRING, q INT64>>)""",
    ),
}


@dataclass(frozen=True)
class Found:
    """A query's result: rows in a comparable order, or an error."""

    rows: list[tuple[Any, ...]] | None
    error: str = ""
    is_unsupported: bool = False


class World:
    """Both engines, set up with the same tables: `people`, `orders`, and `things`."""

    def __init__(self) -> None:
        self._store = Store(None)
        self._store.open()
        self._catalog = TableCatalog(self._store)
        self._catalog.load()
        self._translator = Translator(self._catalog.table, lambda *_: _no_listing())
        self._queries = Queries(self._store)
        self._module: AnalyzerModule = self._translator.analyzer.load()
        self._simple = SimpleCatalogProto(name="root")
        self._simple.builtin_function_options.language_options.CopyFrom(language())
        self._content: dict[str, Any] = {}
        self._registered_id: int | None = None
        self._generation = 0
        self._named: list[NamedTable] = []
        self._catalog.create_dataset(DATASET, {})
        for name, (fields, rows) in _ROWS.items():
            self._fill(name, fields, rows)

    def close(self) -> None:
        self._store.close()

    def _fill(self, name: str, fields: list[dict[str, Any]], rows: str) -> None:
        schema = parse_schema(fields)
        table = self._simple.table.add(name=name, serialization_id=len(self._content) + 1)
        for field in schema:
            table.column.add(name=field.name).type.CopyFrom(type_of_field(field))
        columns = [(field.name, type_of_field(field)) for field in schema]
        self._named.append(NamedTable((name,), name, columns))
        self._content[name] = self._evaluate(rows).content.table_data
        self._registered_id = None
        self._catalog.create_table(TableKey("p", "d", name), schema, {})
        inserted = self._translator.translate(f"INSERT INTO {name} {rows}", "p", DATASET)
        self._queries.manipulate(inserted, lambda _: None)

    def _evaluate(self, sql: str) -> service.EvaluateQueryResponse:
        wanted = AnalyzerOptionsProto(language_options=language(), default_timezone="UTC")
        if self._registered_id is None or self._module.generation != self._generation:
            register = service.RegisterCatalogRequest(simple_catalog=self._simple)
            for name, rows in self._content.items():
                register.table_content[name].table_data.CopyFrom(rows)
            answer = self._module.call("RegisterCatalog", register, service.RegisterResponse)
            self._registered_id, self._generation = answer.registered_id, self._module.generation
        request = service.EvaluateQueryRequest(
            sql=sql, options=wanted, registered_catalog_id=self._registered_id
        )
        return self._module.call("EvaluateQuery", request, service.EvaluateQueryResponse)

    def expected(self, sql: str) -> Found:
        try:
            response = self._evaluate(sql)
        except (AnalyzerRefusedError, AnalyzerTrappedError) as error:
            unknown = str(error).startswith("Code: 12,") or isinstance(error, AnalyzerTrappedError)
            return Found(None, str(error), is_unsupported=unknown)
        kinds = [column.type for column in response.prepared.columns]
        rows = [
            tuple(
                _of_evaluator(cell, kind, is_top=True)
                for cell, kind in zip(row.cell, kinds, strict=True)
            )
            for row in response.content.table_data.row
        ]
        return Found(self._comparable(rows, sql))

    def _comparable(self, rows: list[tuple[Any, ...]], sql: str) -> list[tuple[Any, ...]]:
        """Returns the rows in the query's order if it specifies one, or else in a fixed order."""
        # Most queries return one row, and analyzing them would take a third of the test time.
        if len(rows) < 2:
            return rows
        tree = self._translator.analyzer.analyze(sql, self._named, ParameterTypes())
        return rows if tree.query.is_ordered else sorted(rows, key=repr)

    def given(self, sql: str) -> Found:
        try:
            statement = self._translator.translate(sql, "p", DATASET)
            result = self._queries.select(statement, lambda _: None)
        except UnsupportedError as error:
            return Found(None, error.message, is_unsupported=True)
        except ServiceError as error:
            return Found(None, error.message, _REFUSAL in error.message)
        kinds = [type_of_field(field) for field in result.schema]
        rows = [
            tuple(_of_duckdb(value, kind) for value, kind in zip(row, kinds, strict=True))
            for row in self._values(result)
        ]
        return Found(self._comparable(rows, sql))

    def _values(self, result: Result) -> Sequence[tuple[Any, ...]]:
        if not result.physical:
            return result.values
        columns = readable_columns(result.schema, [quoted(field.name) for field in result.schema])
        with self._store.reading() as cursor:
            raw: list[tuple[Any, ...]] = cursor.execute(
                f"SELECT {columns} FROM {result.physical}"
            ).fetchall()
        self._queries.drop(result.physical)
        return raw


def _of_evaluator(value: Any, kind: Any, *, is_top: bool = False) -> Any:
    if kind.type_kind == types.TYPE_ARRAY:
        # An array in a result is never NULL.
        if not value.HasField("array_value"):
            return [] if is_top else None
        element = kind.array_type.element_type
        return [_of_evaluator(item, element) for item in value.array_value.element]
    if not value.ListFields():
        return None
    if kind.type_kind == types.TYPE_STRUCT:
        parts = zip(value.struct_value.field, kind.struct_type.field, strict=True)
        return tuple(_of_evaluator(field, part.field_type) for field, part in parts)
    return _SCALARS[kind.type_kind](value)


def _datetime(value: Any) -> dt.datetime:
    bits = value.datetime_value.bit_field_datetime_seconds
    return dt.datetime(
        bits >> 26,
        bits >> 22 & 15,
        bits >> 17 & 31,
        bits >> 12 & 31,
        bits >> 6 & 63,
        bits & 63,
        value.datetime_value.nanos // 1_000,
    )


def _time(value: Any) -> dt.time:
    bits = value.time_value >> 30
    micros = (value.time_value & (1 << 30) - 1) // 1_000
    return dt.time(bits >> 12, bits >> 6 & 63, bits & 63, micros)


def _timestamp(value: Any) -> int:
    timestamp = value.timestamp_value
    return int(timestamp.seconds * 1_000_000 + timestamp.nanos // 1_000)


_SCALARS: dict[int, Callable[[Any], Any]] = {
    types.TYPE_INT64: lambda value: value.int64_value,
    types.TYPE_DOUBLE: lambda value: _float(value.double_value),
    types.TYPE_BOOL: lambda value: value.bool_value,
    types.TYPE_STRING: lambda value: value.string_value,
    types.TYPE_BYTES: lambda value: value.bytes_value,
    types.TYPE_DATE: lambda value: value.date_value,
    types.TYPE_TIMESTAMP: _timestamp,
    types.TYPE_DATETIME: _datetime,
    types.TYPE_TIME: _time,
    types.TYPE_NUMERIC: lambda value: (
        Decimal(int.from_bytes(value.numeric_value, "little", signed=True)) / 10**9
    ).normalize(),
    types.TYPE_JSON: lambda value: _json(value.json_value),
}


def _float(number: float) -> float | str:
    """Rounds a FLOAT64 to 12 digits. NaN equals itself, and -0 differs from 0."""
    if math.isnan(number):
        return "NaN"
    return "-0" if number == 0 and math.copysign(1, number) < 0 else float(f"{number:.12g}")


def _of_duckdb(value: Any, kind: Any) -> Any:
    if value is None:
        return None
    if kind.type_kind == types.TYPE_ARRAY:
        return [_of_duckdb(item, kind.array_type.element_type) for item in value]
    if kind.type_kind == types.TYPE_STRUCT:
        parts = zip(value.values(), kind.struct_type.field, strict=True)
        return tuple(_of_duckdb(field, part.field_type) for field, part in parts)
    if kind.type_kind == types.TYPE_DOUBLE:
        return _float(value)
    if kind.type_kind == types.TYPE_DATE:
        return (value - dt.date(1970, 1, 1)).days
    if kind.type_kind == types.TYPE_TIMESTAMP:
        return (value - dt.datetime(1970, 1, 1)) // dt.timedelta(microseconds=1)
    if kind.type_kind == types.TYPE_NUMERIC:
        return value.normalize()
    return _json(value) if kind.type_kind == types.TYPE_JSON else value


def _json(text: str) -> Any:
    """Returns a JSON value that preserves the order of the names in an object."""
    return json.loads(text, object_pairs_hook=lambda pairs: ("object", *pairs))


def _no_listing() -> Any:
    """Lists nothing: INFORMATION_SCHEMA is not used here."""
    raise AssertionError
