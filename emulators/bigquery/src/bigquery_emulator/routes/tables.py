"""Routes for tables and views.

Source: https://docs.cloud.google.com/bigquery/docs/reference/rest/v2/tables
"""

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bigquery_emulator.engine.query import table_size
from bigquery_emulator.engine.service import BigQueryService
from bigquery_emulator.routes.messages import (
    dataset_key,
    json_body,
    page,
    service_of,
    table_key,
)
from bigquery_emulator.tables.fields import read_fields
from bigquery_emulator.tables.partition_ids import partition_condition, undecorated
from bigquery_emulator.tables.resource_fields import NewTable
from bigquery_emulator.tables.resources import TableKey, TableResource
from bigquery_emulator.tables.schema import Json, Schema
from bigquery_emulator.tables.settings import given_schema, given_view_query


async def insert(request: Request) -> Response:
    """Creates a table or a view."""
    service, body = service_of(request), await json_body(request)
    reference = read_fields(body, NewTable)["tableReference"]
    dataset = dataset_key(request)
    key = TableKey(dataset.project, dataset.dataset_id, reference["tableId"])
    view_schema = await _view_schema(service, key, body)
    schema = view_schema if view_schema is not None else given_schema(body) or ()
    table = await service.threads.write(service.catalog.create_table, key, schema, body)
    return JSONResponse(await _shown(service, table))


async def get(request: Request) -> Response:
    """Returns a table, a view, or the hidden table of a query's result."""
    service, key = service_of(request), table_key(request)
    job = service.jobs.result_of(key)
    if job is None or job.result is None:
        return JSONResponse(await _shown(service, service.catalog.table(key)))
    hidden = TableResource(key, 0, job.result.schema, {}, job.created_ms, job.ended_ms)
    return JSONResponse(hidden.resource(job.result.rows, 0, job.location))


async def list_all(request: Request) -> Response:
    """Lists a dataset's tables and views."""
    tables = service_of(request).catalog.tables_of(dataset_key(request))
    page_items, rest = page(request, [table.short_resource() for table in tables])
    return JSONResponse(
        {
            "kind": "bigquery#tableList",
            "etag": "list",
            "tables": page_items,
            "totalItems": len(tables),
            **rest,
        }
    )


async def update(request: Request) -> Response:
    """Changes a table or view: PATCH keeps fields that the body omits; PUT does not."""
    service, body = service_of(request), await json_body(request)
    view_schema = await _view_schema(service, table_key(request), body)
    change = partial(
        service.catalog.update_table,
        table_key(request),
        body,
        request.headers.get("if-match"),
        request.method == "PATCH",
        view_schema,
    )
    return JSONResponse(await _shown(service, await service.threads.write(change)))


async def delete(request: Request) -> Response:
    """Deletes a table or view, or a partition's rows."""
    service = service_of(request)
    key, partition_id = undecorated(table_key(request))
    if partition_id is None:
        await service.threads.write(service.catalog.delete_table, key)
    else:
        await service.threads.write(_empty_partition, service, key, partition_id)
    return Response(status_code=204)


def _empty_partition(service: BigQueryService, key: TableKey, partition_id: str) -> None:
    table = service.catalog.table(key)
    within = partition_condition(table, partition_id)
    with service.store.transaction() as cursor:
        cursor.execute(f"DELETE FROM {table.physical} WHERE {within}")


async def _view_schema(service: BigQueryService, key: TableKey, body: Json) -> Schema | None:
    query = given_view_query(body)
    return None if query is None else await service.view_schema(query, key.project)


async def _shown(service: BigQueryService, table: TableResource) -> Json:
    def size() -> tuple[int, int]:
        with service.store.reading() as cursor:
            return table_size(cursor, table)

    rows, size_bytes = await service.threads.read(size)
    location = service.catalog.dataset(table.key.dataset).settings.get("location", "US")
    return table.resource(rows, size_bytes, location)
