"""The discovery document, which describes this API to generated clients such as `bq`.

It lists this server's methods; request bodies are described only as being objects. Source:
https://developers.google.com/discovery/v1/reference/apis
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

_PATH = {"type": "string", "required": True, "location": "path"}
_QUERY = {"type": "string", "location": "query"}
_PROJECT = "projects/{+projectId}"
_DATASETS = f"{_PROJECT}/datasets"
_DATASET = f"{_DATASETS}/{{+datasetId}}"
_TABLE = f"{_DATASET}/tables/{{+tableId}}"
_JOB = f"{_PROJECT}/jobs/{{+jobId}}"
_RESULT_PARAMETERS = (
    *(
        "startIndex",
        "maxResults",
        "pageToken",
        "timeoutMs",
        "location",
        "formatOptions.useInt64Timestamp",
    ),
    "formatOptions.timestampOutputFormat",
)
# resource: method: verb, path, query parameters, body schema, response schema.
_METHODS: dict[str, dict[str, tuple[str, str, tuple[str, ...], str | None, str | None]]] = {
    "projects": {
        "list": ("GET", "projects", ("maxResults", "pageToken"), None, "ProjectList"),
        "getServiceAccount": (
            "GET",
            f"{_PROJECT}/serviceAccount",
            (),
            None,
            "GetServiceAccountResponse",
        ),
    },
    "datasets": {
        "list": (
            "GET",
            _DATASETS,
            ("all", "filter", "maxResults", "pageToken"),
            None,
            "DatasetList",
        ),
        "insert": ("POST", _DATASETS, ("accessPolicyVersion",), "Dataset", "Dataset"),
        "get": ("GET", _DATASET, ("accessPolicyVersion", "datasetView"), None, "Dataset"),
        "patch": ("PATCH", _DATASET, ("accessPolicyVersion", "updateMode"), "Dataset", "Dataset"),
        "update": ("PUT", _DATASET, ("accessPolicyVersion", "updateMode"), "Dataset", "Dataset"),
        "delete": ("DELETE", _DATASET, ("deleteContents",), None, None),
    },
    "tables": {
        "list": ("GET", f"{_DATASET}/tables", ("maxResults", "pageToken"), None, "TableList"),
        "insert": ("POST", f"{_DATASET}/tables", (), "Table", "Table"),
        "get": ("GET", _TABLE, ("selectedFields", "view"), None, "Table"),
        "patch": ("PATCH", _TABLE, ("autodetect_schema",), "Table", "Table"),
        "update": ("PUT", _TABLE, ("autodetect_schema",), "Table", "Table"),
        "delete": ("DELETE", _TABLE, (), None, None),
    },
    "tabledata": {
        "insertAll": (
            "POST",
            f"{_TABLE}/insertAll",
            (),
            "TableDataInsertAllRequest",
            "TableDataInsertAllResponse",
        ),
        "list": (
            "GET",
            f"{_TABLE}/data",
            ("selectedFields", *_RESULT_PARAMETERS),
            None,
            "TableDataList",
        ),
    },
    "jobs": {
        "list": (
            *("GET", f"{_PROJECT}/jobs"),
            (
                *("allUsers", "maxResults", "minCreationTime", "maxCreationTime"),
                *("pageToken", "projection", "stateFilter", "parentJobId"),
            ),
            *(None, "JobList"),
        ),
        "insert": ("POST", f"{_PROJECT}/jobs", (), "Job", "Job"),
        "get": ("GET", _JOB, ("location",), None, "Job"),
        "cancel": ("POST", f"{_JOB}/cancel", ("location",), None, "JobCancelResponse"),
        "delete": ("DELETE", f"{_JOB}/delete", ("location",), None, None),
        "query": ("POST", f"{_PROJECT}/queries", (), "QueryRequest", "QueryResponse"),
        "getQueryResults": (
            *(
                "GET",
                f"{_PROJECT}/queries/{{+jobId}}",
                _RESULT_PARAMETERS,
                None,
                "GetQueryResultsResponse",
            ),
        ),
    },
    # bq lists these alongside tables, but this server does not have any.
    "models": {
        "list": (
            "GET",
            f"{_DATASET}/models",
            ("maxResults", "pageToken"),
            None,
            "ListModelsResponse",
        )
    },
    "routines": {
        "list": (
            *(
                "GET",
                f"{_DATASET}/routines",
                ("filter", "maxResults", "pageToken", "readMask"),
                None,
            ),
            "ListRoutinesResponse",
        ),
    },
    "rowAccessPolicies": {
        "list": (
            *("GET", f"{_TABLE}/rowAccessPolicies", ("pageSize", "pageToken"), None),
            "ListRowAccessPoliciesResponse",
        ),
    },
}
_REPEATED = ("stateFilter",)


async def describe(request: Request) -> Response:
    """Returns the discovery document for the address that received the request."""
    root = f"{request.url.scheme}://{request.url.netloc}/"
    return JSONResponse(document(root))


def document(root_url: str) -> dict[str, Any]:
    """Returns this API's discovery document for `root_url`, which ends in a slash."""
    names = {
        name
        for methods in _METHODS.values()
        for method in methods.values()
        for name in method[3:]
        if name is not None
    }
    return {
        "kind": "discovery#restDescription",
        "discoveryVersion": "v1",
        "id": "bigquery:v2",
        "name": "bigquery",
        "version": "v2",
        "title": "BigQuery API",
        "protocol": "rest",
        "rootUrl": root_url,
        "servicePath": "bigquery/v2/",
        "basePath": "/bigquery/v2/",
        "baseUrl": f"{root_url}bigquery/v2/",
        "batchPath": "batch/bigquery/v2",
        "parameters": {
            name: _QUERY
            for name in (
                "alt",
                "fields",
                "key",
                "oauth_token",
                "prettyPrint",
                "quotaUser",
                "userIp",
            )
        },
        "schemas": {
            name: {"id": name, "type": "object", "additionalProperties": {"type": "any"}}
            for name in sorted(names)
        },
        "resources": {
            resource: {"methods": {name: _method(resource, name) for name in methods}}
            for resource, methods in _METHODS.items()
        },
    }


def _method(resource: str, name: str) -> dict[str, Any]:
    verb, path, query, body, answer = _METHODS[resource][name]
    in_path = [part[2:-1] for part in path.split("/") if part.startswith("{+")]
    parameters = {part: _PATH for part in in_path} | {part: dict(_QUERY) for part in query}
    for part in _REPEATED:
        if part in parameters:
            parameters[part] = {**_QUERY, "repeated": True}
    method: dict[str, Any] = {
        "id": f"bigquery.{resource}.{name}",
        "path": path,
        "flatPath": path.replace("{+", "{"),
        "httpMethod": verb,
        "parameters": parameters,
        "parameterOrder": in_path,
    }
    if body is not None:
        method["request"] = {"$ref": body}
    if answer is not None:
        method["response"] = {"$ref": answer}
    if (resource, name) == ("jobs", "insert"):
        method |= {"supportsMediaUpload": True, "mediaUpload": _MEDIA_UPLOAD}
    return method


_MEDIA_UPLOAD = {
    "accept": ["*/*"],
    "protocols": {
        kind: {"multipart": True, "path": "/" + mount + "/bigquery/v2/projects/{+projectId}/jobs"}
        for kind, mount in (("simple", "upload"), ("resumable", "resumable/upload"))
    },
}
