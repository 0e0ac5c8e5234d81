"""The embedded BigQuery's web application: maps paths to routes."""

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from bigquery_emulator.engine.service import BigQueryService
from bigquery_emulator.errors import NotFoundError, ServiceError
from bigquery_emulator.routes import datasets, discovery, jobs, tabledata, tables, uploads
from bigquery_emulator.routes.messages import answer_error

_Endpoint = Callable[[Request], Awaitable[Response]]
_DATASETS = "/projects/{project}/datasets"
_DATASET = _DATASETS + "/{dataset}"
_TABLES = _DATASET + "/tables"
_TABLE = _TABLES + "/{table}"
_JOBS = "/projects/{project}/jobs"
_JOB = _JOBS + "/{job}"
_QUERIES = "/projects/{project}/queries"


def create_app(service: BigQueryService) -> Starlette:
    """Returns a server's application.

    Args:
        service: the server's parts, open for as long as the application runs.
    """
    routes = [
        Mount(
            "/bigquery/v2",
            routes=[Route(path, endpoint, methods=[verb]) for verb, path, endpoint in _api()],
        ),
        *(
            Route(f"{mount}/bigquery/v2{_JOBS}", endpoint, methods=[verb])
            for mount in ("/upload", "/resumable/upload")
            for verb, endpoint in (("POST", uploads.upload), ("PUT", uploads.resume))
        ),
        # The first path is Google's old one; the bq tool uses the second.
        Route("/discovery/v1/apis/bigquery/v2/rest", discovery.describe),
        Route("/$discovery/rest", discovery.describe),
        Route("/healthz", _healthy),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(GZipMiddleware, minimum_size=1_000, compresslevel=1)],
        exception_handlers={
            ServiceError: answer_error,
            Exception: answer_error,
            404: _unknown_path,
            405: _unknown_path,
        },
    )
    app.state.service = service
    app.state.insert_ids = tabledata.InsertIds()
    app.state.request_ids = jobs.RequestIds()
    app.state.sessions = uploads.Sessions()
    return app


def _api() -> list[tuple[str, str, _Endpoint]]:
    return [
        ("GET", "/projects", datasets.list_projects),
        ("POST", _DATASETS, datasets.insert),
        ("GET", _DATASETS, datasets.list_all),
        ("GET", _DATASET, datasets.get),
        ("PATCH", _DATASET, datasets.update),
        ("PUT", _DATASET, datasets.update),
        ("DELETE", _DATASET, datasets.delete),
        ("POST", _TABLES, tables.insert),
        ("GET", _TABLES, tables.list_all),
        ("GET", _TABLE, tables.get),
        ("PATCH", _TABLE, tables.update),
        ("PUT", _TABLE, tables.update),
        ("DELETE", _TABLE, tables.delete),
        ("POST", _TABLE + "/insertAll", tabledata.insert_all),
        ("GET", _TABLE + "/data", tabledata.list_rows),
        ("GET", _TABLE + "/rowAccessPolicies", _list_nothing("rowAccessPolicies")),
        ("GET", _DATASET + "/models", _list_nothing("models")),
        ("GET", _DATASET + "/routines", _list_nothing("routines")),
        ("POST", _QUERIES, jobs.query),
        ("GET", _QUERIES + "/{job}", jobs.query_results),
        ("POST", _JOBS, jobs.insert),
        ("GET", _JOBS, jobs.list_all),
        ("GET", _JOB, jobs.get),
        ("POST", _JOB + "/cancel", jobs.cancel),
        ("DELETE", _JOB + "/delete", jobs.delete),
    ]


def _list_nothing(name: str) -> _Endpoint:
    async def answer(request: Request) -> Response:
        return JSONResponse({name: []})

    return answer


async def _healthy(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _unknown_path(request: Request, error: Exception) -> Response:
    return answer_error(request, NotFoundError(f"Not found: {request.method} {request.url.path}"))
