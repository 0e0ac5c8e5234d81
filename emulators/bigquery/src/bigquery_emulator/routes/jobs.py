"""Routes for jobs and queries.

Source: https://docs.cloud.google.com/bigquery/docs/reference/rest/v2/jobs
"""

from collections import OrderedDict

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bigquery_emulator.engine.job import BigQueryJob, new_job_id
from bigquery_emulator.engine.service import BigQueryService
from bigquery_emulator.errors import InvalidError, NotFoundError, UnsupportedError
from bigquery_emulator.routes.messages import RowsResponse, json_body, page, service_of
from bigquery_emulator.routes.options import RowOptions, query_options
from bigquery_emulator.routes.tabledata import read_result
from bigquery_emulator.tables.fields import read_fields
from bigquery_emulator.tables.job_fields import JobFields, QueryRequest
from bigquery_emulator.tables.schema import Json

_DEFAULT_WAIT_MS = 10_000
_LONGEST_WAIT_MS = 200_000
_DEFAULT_PAGE_ROWS = 10_000
_KEPT_REQUEST_IDS = 1_000
_QUERY_FIELDS = (
    *(
        "query",
        "defaultDataset",
        "useLegacySql",
        "queryParameters",
        "parameterMode",
        "maximumBytesBilled",
    ),
    *(
        "useQueryCache",
        "destinationEncryptionConfiguration",
        "connectionProperties",
        "createSession",
    ),
)

_MULTI_REGIONS = ("US", "EU")
"""Locations that jobs.get assumes if there is no `location` parameter."""
_REFUSED = {"EXTRACT": "Extract jobs", "LOAD": "Loading from Cloud Storage"}
_STATEMENT_RESULTS = (
    *("numDmlAffectedRows", "dmlStats", "ddlOperationPerformed"),
    *("ddlTargetTable", "ddlTargetDataset"),
)


class RequestIds:
    """Jobs started by jobs.query, keyed by `requestId`, so that a repeated request is not rerun."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, BigQueryJob] = OrderedDict()

    def job_of(self, request_id: str | None) -> BigQueryJob | None:
        """Returns the job that an earlier request with this ID started."""
        return None if request_id is None else self._jobs.get(request_id)

    def remember(self, request_id: str | None, job: BigQueryJob) -> None:
        if request_id is not None:
            self._jobs[request_id] = job
            while len(self._jobs) > _KEPT_REQUEST_IDS:
                self._jobs.popitem(last=False)


async def insert(request: Request) -> Response:
    """Starts a query or copy job. Extract jobs fail, and so do loads from Cloud Storage.

    Loads with a file go to bigquery_emulator/routes/uploads.py.
    """
    service, body = service_of(request), await json_body(request)
    job = new_job(request.path_params["project"], body)
    if job.kind in _REFUSED:
        # It becomes a failed job, so clients see the error once. Clients would retry a request that
        # got a 501.
        service.jobs.start(job, _refuse)
        return JSONResponse(job.resource())
    if job.configuration.get("dryRun"):
        await service.dry_run(job)
        return JSONResponse(job.resource())
    service.jobs.start(job, service.run_query if job.kind == "QUERY" else service.run_copy)
    return JSONResponse(job.resource())


async def _refuse(job: BigQueryJob) -> None:
    raise UnsupportedError(f"{_REFUSED[job.kind]}: not supported by the embedded BigQuery")


def new_job(project: str, body: Json) -> BigQueryJob:
    """Returns the job that a request describes, without starting it.

    Raises:
        InvalidError: the request names no job kind or more than one, or a field has the wrong type.
    """
    body = read_fields(body, JobFields)
    configuration = body.get("configuration") or {}
    kinds = [kind for kind in ("query", "load", "copy", "extract") if kind in configuration]
    if len(kinds) != 1:
        raise InvalidError(
            "Job configuration must contain exactly one job-specific configuration object"
        )
    if configuration.get("dryRun") and kinds != ["query"]:
        raise InvalidError("Invalid value for configuration.dryRun: only queries support dry runs")
    copy = configuration.get("copy")
    if copy is not None and not copy.get("sourceTables") and "sourceTable" not in copy:
        raise InvalidError("Required parameter is missing: configuration.copy.sourceTable")
    reference = body.get("jobReference") or {}
    job_id = reference.get("jobId") or new_job_id()
    location = reference.get("location") or "US"
    return BigQueryJob(project, job_id, kinds[0].upper(), configuration, location)


async def get(request: Request) -> Response:
    return JSONResponse(_job(request).resource())


async def list_all(request: Request) -> Response:
    """Lists a project's jobs, latest first."""
    jobs = service_of(request).jobs.of_project(request.path_params["project"])
    states = {state.upper() for state in request.query_params.getlist("stateFilter")}
    items = [
        {
            **job.resource(),
            "state": job.state,
            **({"errorResult": job.error.proto()} if job.error else {}),
        }
        for job in jobs
        if not states or job.state in states
    ]
    page_items, rest = page(request, items)
    return JSONResponse({"kind": "bigquery#jobList", "etag": "list", "jobs": page_items, **rest})


async def cancel(request: Request) -> Response:
    """Asks a job to stop. The response may be sent before the job has stopped."""
    job = _job(request)
    job.cancel()
    return JSONResponse({"kind": "bigquery#jobCancelResponse", "job": job.resource()})


async def delete(request: Request) -> Response:
    service_of(request).jobs.forget(_job(request))
    return Response(status_code=204)


async def query(request: Request) -> Response:
    """Runs a query.

    Returns the first page of its result, or just the job if `timeoutMs` has passed.
    """
    service, body = service_of(request), read_fields(await json_body(request), QueryRequest)
    is_micros = body.get("formatOptions", {}).get("useInt64Timestamp", False)
    request_ids: RequestIds = request.app.state.request_ids
    job = request_ids.job_of(body.get("requestId"))
    if job is None:
        config = {name: body[name] for name in _QUERY_FIELDS if name in body}
        shared = {name: body[name] for name in ("labels", "jobTimeoutMs", "dryRun") if name in body}
        location = {"location": body["location"]} if body.get("location") else {}
        described: Json = {"configuration": {"query": config, **shared}, "jobReference": location}
        job = new_job(request.path_params["project"], described)
        if body.get("dryRun"):
            await service.dry_run(job)
            return JSONResponse(_dry_response(job))
        service.jobs.start(job, service.run_query)
        request_ids.remember(body.get("requestId"), job)
    wait_ms = int(body.get("timeoutMs", _DEFAULT_WAIT_MS))
    count = int(body.get("maxResults", _DEFAULT_PAGE_ROWS))
    results = await _results(service, job, wait_ms, 0, count, is_micros)
    return RowsResponse({**results, "kind": "bigquery#queryResponse"})


async def query_results(request: Request) -> Response:
    """Returns a page of a query's result, waiting up to `timeoutMs` for it."""
    service, job = service_of(request), _job(request)
    if job.kind != "QUERY":
        raise InvalidError(f"Job {job.job_id} is not a query job")
    options = query_options(request, RowOptions)
    results = await _results(
        service,
        job,
        int(options.get("timeoutMs", _DEFAULT_WAIT_MS)),
        int(options.get("pageToken") or options.get("startIndex") or 0),
        int(options.get("maxResults", _DEFAULT_PAGE_ROWS)),
        options.get("formatOptions.useInt64Timestamp", False),
    )
    return RowsResponse({**results, "kind": "bigquery#getQueryResultsResponse"})


async def _results(
    service: BigQueryService,
    job: BigQueryJob,
    wait_ms: int,
    start: int,
    count: int,
    is_micros: bool,
) -> Json:
    with anyio.move_on_after(min(wait_ms, _LONGEST_WAIT_MS) / 1_000):
        await job.done.wait()
    results: Json = {"jobReference": job.reference(), "jobComplete": job.state == "DONE"}
    if job.state != "DONE":
        return results
    if job.error is not None:
        raise job.error
    details = job.statistics.get("query", {})
    results |= {
        "etag": job.job_id,
        "cacheHit": False,
        "totalBytesProcessed": job.statistics.get("totalBytesProcessed", "0"),
        "statementType": details.get("statementType"),
        **{name: details[name] for name in _STATEMENT_RESULTS if name in details},
    }
    if job.result is None:
        # Sent without `totalRows`, because clients identify a query by that field, even if the
        # query has no rows.
        return results
    result = job.result
    count = min(count, _DEFAULT_PAGE_ROWS)
    rows = await read_result(service, result, result.schema, start, count, is_micros)
    results |= {
        "totalRows": str(result.rows),
        "schema": {"fields": [field.resource() for field in result.schema]},
        "rows": rows,
    }
    if start + len(rows) < result.rows:
        results["pageToken"] = str(start + len(rows))
    return results


def _dry_response(job: BigQueryJob) -> Json:
    details = job.statistics["query"]
    return {
        "kind": "bigquery#queryResponse",
        "jobComplete": True,
        "cacheHit": False,
        "totalBytesProcessed": job.statistics["totalBytesProcessed"],
        "jobReference": {"projectId": job.project, "location": job.location},
        **({"schema": details["schema"]} if "schema" in details else {}),
    }


def _job(request: Request) -> BigQueryJob:
    project, job_id = request.path_params["project"], request.path_params["job"]
    job = service_of(request).jobs.get(project, job_id)
    location = request.query_params.get("location")
    if job.location.upper() not in ((location.upper(),) if location else _MULTI_REGIONS):
        raise NotFoundError(f"Not found: Job {project}:{job_id}")
    return job
