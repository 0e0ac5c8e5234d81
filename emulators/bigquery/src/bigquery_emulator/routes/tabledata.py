"""Routes for rows: insertAll and list.

Source: https://docs.cloud.google.com/bigquery/docs/reference/rest/v2/tabledata
"""

import time
from collections import OrderedDict
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bigquery_emulator.engine.query import Result
from bigquery_emulator.engine.service import BigQueryService
from bigquery_emulator.errors import InvalidError, UnsupportedError
from bigquery_emulator.routes.messages import RowsResponse, json_body, service_of, table_key
from bigquery_emulator.routes.options import RowOptions, query_options
from bigquery_emulator.tables.fields import read_fields
from bigquery_emulator.tables.job_fields import InsertAllRequest
from bigquery_emulator.tables.partition_ids import partition_start, undecorated
from bigquery_emulator.tables.records import RowReader
from bigquery_emulator.tables.resources import TableKey, TableResource
from bigquery_emulator.tables.rows import insert_rows, read_all_rows, read_rows, wire_rows
from bigquery_emulator.tables.schema import Json, Schema
from bigquery_emulator.tables.values import BadValueError

# Limits on a single insertAll request:
# https://docs.cloud.google.com/bigquery/quotas#streaming_inserts
_MOST_REQUEST_BYTES = 10 * 1024 * 1024
_MOST_ROWS = 50_000
_LONGEST_INSERT_ID = 128
_DEDUPE_S = 60.0
_MOST_INSERT_IDS = 500_000
_DEFAULT_PAGE_ROWS = 10_000


class InsertIds:
    """The insertIds from the last minute, so that a row sent twice is stored only once.

    As in the service, this is done on a best-effort basis.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int, str], float] = OrderedDict()

    def is_new(self, table: TableResource, insert_id: str) -> bool:
        """True if no row with this ID was inserted recently."""
        self._forget_old()
        return (table.number, insert_id) not in self._seen

    def remember(self, table: TableResource, insert_ids: list[str]) -> None:
        """Stores the IDs of rows that were just inserted."""
        now_s = time.monotonic()
        for insert_id in insert_ids:
            self._seen[(table.number, insert_id)] = now_s

    def _forget_old(self) -> None:
        oldest_s = time.monotonic() - _DEDUPE_S
        while self._seen:
            key, seen_s = next(iter(self._seen.items()))
            if seen_s >= oldest_s and len(self._seen) <= _MOST_INSERT_IDS:
                return
            del self._seen[key]


async def insert_all(request: Request) -> Response:
    """Streams rows into a table. Each row that doesn't match the schema gets its own error."""
    service = service_of(request)
    body = await json_body(request, _MOST_REQUEST_BYTES)
    # Rows are checked against the table's schema, and each gets a separate error.
    rows = body.pop("rows", None)
    options = read_fields(body, InsertAllRequest)
    if options.get("templateSuffix"):
        raise UnsupportedError("templateSuffix: not supported by the embedded BigQuery")
    if not isinstance(rows, list) or not rows:
        raise InvalidError("No rows present in the request.")
    if len(rows) > _MOST_ROWS:
        raise InvalidError(
            f"Too many rows present in the request, limit: {_MOST_ROWS} row count: {len(rows)}."
        )
    insert_ids = request.app.state.insert_ids
    insert = partial(_insert, service, insert_ids, table_key(request), options, rows)
    errors = await service.threads.append(insert)
    answer: Json = {"kind": "bigquery#tableDataInsertAllResponse"}
    return JSONResponse(answer | ({"insertErrors": errors} if errors else {}))


def _insert(
    service: BigQueryService, insert_ids: InsertIds, key: TableKey, options: Json, rows: list[Any]
) -> list[Json]:
    key, partition_id = undecorated(key)
    with service.catalog.shapes.adding(key):
        table = service.catalog.table(key)
        return _insert_into(service, insert_ids, table, partition_id, options, rows)


def _insert_into(
    service: BigQueryService,
    insert_ids: InsertIds,
    table: TableResource,
    partition_id: str | None,
    options: Json,
    rows: list[Any],
) -> list[Json]:
    key = table.key
    if table.view_query is not None:
        raise InvalidError(f"Cannot add rows to a view: {key}")
    moment = None if partition_id is None else _find_ingestion_time(table, partition_id)
    if not table.schema:
        raise InvalidError(f"Table {key} has no schema.")
    reader = RowReader(table.schema, options.get("ignoreUnknownValues", False))
    good, new_ids, errors = [], {}, {}
    for index, row in enumerate(rows):
        try:
            canonical, insert_id = _canonical(reader, row), _insert_id(row)
        except BadValueError as error:
            errors[index] = error
            continue
        if insert_id is not None:
            if insert_id in new_ids or not insert_ids.is_new(table, insert_id):
                continue
            new_ids[insert_id] = index
        good.append(canonical)
    if errors and not options.get("skipInvalidRows"):
        return [_row_error(index, errors.get(index)) for index in range(len(rows))]
    if good:
        with service.store.transaction() as cursor:
            insert_rows(cursor, table.physical, table.schema, good, moment)
        insert_ids.remember(table, list(new_ids))
    return [_row_error(index, error) for index, error in sorted(errors.items())]


def _find_ingestion_time(table: TableResource, partition_id: str) -> str:
    # As in the service, rows may be streamed to a partition decorator only if the partition is not
    # determined by the rows' own values.
    if not table.has_partition_time:
        raise InvalidError(
            f"Streaming to the partition {table.key}${partition_id}: only tables partitioned "
            "by ingestion time accept a decorator here"
        )
    return partition_start(table, partition_id)


def _canonical(reader: RowReader, row: Any) -> Json:
    values = row.get("json") if isinstance(row, dict) else None
    if not isinstance(values, dict):
        raise BadValueError("", "Row must have a JSON object.")
    return reader.canonical(values)


def _insert_id(row: Json) -> str | None:
    insert_id = row.get("insertId")
    if insert_id is not None and not isinstance(insert_id, str | int | float):
        raise BadValueError("", "insertId must be a string.")
    if len(str(insert_id or "")) > _LONGEST_INSERT_ID:
        raise BadValueError("", f"insertId must be at most {_LONGEST_INSERT_ID} characters.")
    return None if insert_id is None else str(insert_id)


def _row_error(index: int, error: BadValueError | None) -> Json:
    # A valid row sent along with an invalid one is "stopped": it was not inserted either.
    reason = "stopped" if error is None else "invalid"
    location, message = ("", "") if error is None else (error.location, error.message)
    detail = {"reason": reason, "location": location, "debugInfo": "", "message": message}
    return {"index": index, "errors": [detail]}


async def list_rows(request: Request) -> Response:
    """Returns a page of a table's rows, or of a query's result by way of its hidden table."""
    service, key = service_of(request), table_key(request)
    options = query_options(request, RowOptions)
    start = int(options.get("pageToken") or options.get("startIndex") or 0)
    count = min(int(options.get("maxResults", _DEFAULT_PAGE_ROWS)), _DEFAULT_PAGE_ROWS)
    names = options.get("selectedFields")
    is_micros = options.get("formatOptions.useInt64Timestamp", False)
    job = service.jobs.result_of(key)
    if job is not None and job.result is not None:
        result = job.result
        wanted = _select_fields(result.schema, names)
        rows = await read_result(service, result, wanted, start, count, is_micros)
        total = result.rows
    else:
        table = service.catalog.table(key)
        if table.view_query is not None:
            raise InvalidError(f"Cannot list a table of type VIEW: {key}")
        wanted = _select_fields(table.schema, names)
        read = partial(_read_page, service, table.physical, wanted, start, count, is_micros)
        total, rows = await service.threads.read(read)
    page: Json = {
        "kind": "bigquery#tableDataList",
        "etag": "list",
        "totalRows": str(total),
        "rows": rows,
    }
    if start + len(rows) < total:
        page["pageToken"] = str(start + len(rows))
    return RowsResponse(page)


def _read_page(
    service: BigQueryService, physical: str, schema: Schema, start: int, count: int, is_micros: bool
) -> tuple[int, list[Json]]:
    with service.store.reading() as cursor:
        (total,) = cursor.execute(f"SELECT count(*) FROM {physical}").fetchone()
        return int(total), read_rows(cursor, physical, schema, start, count, is_micros)


async def read_result(
    service: BigQueryService,
    result: Result,
    wanted: Schema,
    start: int,
    count: int,
    is_micros: bool,
) -> list[Json]:
    """Returns a page of a query's result in the wire format."""
    if not result.physical:
        values = result.values[start : start + count]
        if wanted != result.schema:
            places = [result.schema.index(field) for field in wanted]
            values = [tuple(row[place] for place in places) for row in values]
        return wire_rows(wanted, values, is_micros)

    def read() -> list[Json]:
        with service.store.reading() as cursor:
            if start == 0 and count >= result.rows:
                return read_all_rows(cursor, result.physical, wanted, is_micros)
            return read_rows(cursor, result.physical, wanted, start, count, is_micros)

    return await service.threads.read(read)


def _select_fields(schema: Schema, names: str | None) -> Schema:
    if not names:
        return schema
    wanted = {name.strip().lower() for name in names.split(",")}
    if any("." in name for name in wanted):
        raise UnsupportedError(
            "selectedFields inside a RECORD: not supported by the embedded BigQuery"
        )
    unknown = wanted - {field.name.lower() for field in schema}
    if unknown:
        raise InvalidError(f"Invalid value for selectedFields: {', '.join(sorted(unknown))}")
    return tuple(field for field in schema if field.name.lower() in wanted)
