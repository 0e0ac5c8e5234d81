"""Routes for datasets and projects.

Source: https://docs.cloud.google.com/bigquery/docs/reference/rest/v2/datasets
"""

import zlib
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bigquery_emulator.routes.messages import dataset_key, json_body, page, service_of
from bigquery_emulator.routes.options import DeleteOptions, query_options
from bigquery_emulator.tables.fields import read_fields
from bigquery_emulator.tables.resource_fields import NewDataset
from bigquery_emulator.tables.resources import DatasetKey


async def insert(request: Request) -> Response:
    service, body = service_of(request), await json_body(request)
    reference = read_fields(body, NewDataset)["datasetReference"]
    key = DatasetKey(request.path_params["project"], reference["datasetId"])
    dataset = await service.threads.write(service.catalog.create_dataset, key, body)
    return JSONResponse(dataset.resource())


async def get(request: Request) -> Response:
    return JSONResponse(service_of(request).catalog.dataset(dataset_key(request)).resource())


async def list_all(request: Request) -> Response:
    project = request.path_params["project"]
    datasets = [
        data for key, data in service_of(request).catalog.datasets.items() if key.project == project
    ]
    items = [
        {
            "kind": "bigquery#dataset",
            "id": str(dataset.key),
            "datasetReference": dataset.key.resource(),
            "location": dataset.settings.get("location", "US"),
            **{
                name: dataset.settings[name]
                for name in ("labels", "friendlyName")
                if name in dataset.settings
            },
        }
        for dataset in sorted(datasets, key=lambda dataset: dataset.key.dataset_id)
    ]
    page_items, rest = page(request, items)
    return JSONResponse(
        {"kind": "bigquery#datasetList", "etag": "list", "datasets": page_items, **rest}
    )


async def update(request: Request) -> Response:
    """Changes a dataset: PATCH keeps fields that the body omits; PUT does not."""
    service, body = service_of(request), await json_body(request)
    change = partial(
        service.catalog.update_dataset,
        dataset_key(request),
        body,
        request.headers.get("if-match"),
        request.method == "PATCH",
    )
    dataset = await service.threads.write(change)
    return JSONResponse(dataset.resource())


async def delete(request: Request) -> Response:
    """Deletes a dataset, with its tables if requested."""
    service = service_of(request)
    with_contents = query_options(request, DeleteOptions).get("deleteContents", False)
    await service.threads.write(service.catalog.delete_dataset, dataset_key(request), with_contents)
    return Response(status_code=204)


async def list_projects(request: Request) -> Response:
    """Lists projects that have at least one dataset."""
    names = sorted({key.project for key in service_of(request).catalog.datasets})
    items = [
        {
            "kind": "bigquery#project",
            "id": name,
            "numericId": str(zlib.crc32(name.encode())),
            "projectReference": {"projectId": name},
            "friendlyName": name,
        }
        for name in names
    ]
    page_items, rest = page(request, items)
    return JSONResponse(
        {
            "kind": "bigquery#projectList",
            "etag": "list",
            "projects": page_items,
            "totalItems": len(items),
            **rest,
        }
    )
