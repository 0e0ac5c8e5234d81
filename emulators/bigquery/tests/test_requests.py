"""Requests with fields of the wrong type: every route rejects them and names the field."""

import gzip
import json
from typing import Any

import pytest

from tests.connecting import request

JOBS, QUERIES = "/bigquery/v2/projects/p/jobs", "/bigquery/v2/projects/p/queries"
DATASETS = "/bigquery/v2/projects/p/datasets"
TABLES = f"{DATASETS}/d/tables"
UPLOADS = f"/upload{JOBS}?uploadType="
QUERY = {"query": "SELECT 1", "useLegacySql": False}
PLACE = {"projectId": "p", "datasetId": "d", "tableId": "t"}


def job(kind: str, **shared: Any) -> Any:
    def made(**fields: Any) -> Any:
        return {"configuration": {kind: fields, **shared}}

    return made


DEEP_TYPE = b'{"type": "ARRAY", "arrayType": ' * 400 + b'{"type": "INT64"' + b"}" * 401


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (QUERIES, {**QUERY, "timeoutMs": "soon"}, "timeoutMs"),
        (QUERIES, {**QUERY, "timeoutMs": -1}, "timeoutMs"),
        (QUERIES, {**QUERY, "maxResults": 10**30}, "maxResults"),
        (QUERIES, {**QUERY, "maxResults": "9" * 5_000}, "maxResults"),
        (QUERIES, {**QUERY, "jobTimeoutMs": "abc"}, "jobTimeoutMs"),
        (QUERIES, {**QUERY, "maximumBytesBilled": 1.5}, "maximumBytesBilled"),
        (QUERIES, {**QUERY, "labels": {"a": 1}}, "labels"),
        (QUERIES, {**QUERY, "query": ["SELECT 1"]}, "query"),
        (QUERIES, {**QUERY, "query": "SELECT '\ud800'"}, "query"),
        (QUERIES, {**QUERY, "requestId": {}}, "requestId"),
        (QUERIES, {**QUERY, "defaultDataset": "d"}, "defaultDataset"),
        (QUERIES, {**QUERY, "defaultDataset": {}}, "defaultDataset.datasetId"),
        (QUERIES, {**QUERY, "formatOptions": []}, "formatOptions"),
        (QUERIES, {**QUERY, "queryParameters": [7]}, "queryParameters[0]"),
        (JOBS, {"configuration": []}, "configuration"),
        (JOBS, job("query")(), "configuration.query.query"),
        (JOBS, job("query", jobTimeoutMs="abc")(query="SELECT 1"), "configuration.jobTimeoutMs"),
        (JOBS, job("query")(query="SELECT 1", writeDisposition=1), "query.writeDisposition"),
        (JOBS, job("query")(query="SELECT 1", destinationTable={}), "destinationTable.tableId"),
        (JOBS, {**job("query")(query="SELECT 1"), "jobReference": {"jobId": "a b"}}, "jobId"),
        (JOBS, job("copy")(destinationTable=PLACE), "configuration.copy.sourceTable"),
        (JOBS, job("copy", dryRun=True)(destinationTable=PLACE, sourceTable=PLACE), "dryRun"),
        (f"{UPLOADS}resumable", job("load")(), "load.destinationTable"),
        (
            f"{UPLOADS}resumable",
            job("load")(destinationTable=PLACE, maxBadRecords="many"),
            "configuration.load.maxBadRecords",
        ),
        (DATASETS, {"datasetReference": {"datasetId": 7}}, "datasetReference.datasetId"),
        (TABLES, {"tableReference": "t"}, "tableReference"),
        (TABLES, {"tableReference": {"tableId": "t"}, "schema": []}, "schema"),
        (TABLES, {"tableReference": {"tableId": "t"}, "schema": {"fields": {}}}, "schema.fields"),
        (TABLES, {"tableReference": {"tableId": "t"}, "view": {"query": []}}, "view.query"),
        (f"{TABLES}/t/insertAll", {"rows": [{}], "skipInvalidRows": "perhaps"}, "skipInvalidRows"),
        (f"{UPLOADS}odd", {}, "uploadType"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_by_its_name(
    bigquery_endpoint: str, path: str, body: Any, named: str
) -> None:
    status, _, answer = request(bigquery_endpoint, "POST", path, json.dumps(body).encode())
    assert (status, answer["error"]["status"]) == (400, "INVALID_ARGUMENT"), answer
    assert named in answer["error"]["message"]


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999"])
def test_a_number_that_json_has_not_is_refused(bigquery_endpoint: str, number: bytes) -> None:
    body = b'{"datasetReference": {"datasetId": "n"}, "access": [{"role": %s}]}' % number
    status, _, answer = request(bigquery_endpoint, "POST", DATASETS, body)
    assert (status, answer["error"]["status"]) == (400, "INVALID_ARGUMENT"), answer
    assert "Parse Error" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (f"{DATASETS}?maxResults=1e999", "maxResults"),
        (f"{DATASETS}?pageToken=next", "pageToken"),
        (f"{TABLES}/t/data?startIndex=-1", "startIndex"),
        (f"{TABLES}/t/data?maxResults=1{'0' * 30}", "maxResults"),
    ],
)
def test_a_parameter_of_the_wrong_type_is_refused_by_its_name(
    bigquery_endpoint: str, path: str, named: str
) -> None:
    # The table is looked up first.
    _made(bigquery_endpoint)
    status, _, answer = request(bigquery_endpoint, "GET", path)
    assert status == 400
    assert f"Invalid value for {named}: " in answer["error"]["message"]


def _made(endpoint: str) -> None:
    dataset = {"datasetReference": {"datasetId": "d"}}
    table = {"tableReference": PLACE, "schema": {"fields": [{"name": "a", "type": "INT64"}]}}
    request(endpoint, "POST", DATASETS, json.dumps(dataset).encode())
    request(endpoint, "POST", TABLES, json.dumps(table).encode())


def test_numbers_may_be_text_null_is_not_set_and_the_unknown_is_ignored(
    bigquery_endpoint: str,
) -> None:
    body = {**QUERY, "timeoutMs": "9000", "maxResults": None, "someNewField": {"a": [1]}}
    status, _, answer = request(bigquery_endpoint, "POST", QUERIES, json.dumps(body).encode())
    assert (status, answer["rows"]) == (200, [{"f": [{"v": "1"}]}])


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        # The time of day is not included, because the test names must be the same in every process.
        (gzip.compress(b"{}", mtime=0)[:-4], "gzip", 400),
        (gzip.compress(b"{}", mtime=0) + b"no gzip", "gzip", 400),
        (b"{}", "gzip", 400),
        (b"{}", "br", 400),
        # A gzip bomb: 40 KB that decompress to 40 MB.
        (gzip.compress(b" " * 40_000_000, mtime=0), "gzip", 413),
        (b"[" * 100_000, "identity", 400),
        (
            b'{"query": "SELECT ?", "queryParameters": [{"parameterType": ' + DEEP_TYPE + b"}]}",
            "identity",
            501,
        ),
        (b'{"query": "\xff"}', "identity", 400),
        (b'{"timeoutMs": ' + b"9" * 5_000 + b"}", "identity", 400),
    ],
)
def test_a_body_that_is_no_json_is_refused(
    bigquery_endpoint: str, body: bytes, encoding: str, status: int
) -> None:
    headers = {"Content-Encoding": encoding}
    answered, _, answer = request(bigquery_endpoint, "POST", QUERIES, body, **headers)
    assert (answered, answer["error"]["code"]) == (status, status)


def test_a_gzip_body_may_consist_of_several_files(bigquery_endpoint: str) -> None:
    whole = json.dumps(QUERY).encode()
    body = gzip.compress(whole[:20], mtime=0) + gzip.compress(whole[20:], mtime=0)
    status, _, answer = request(
        bigquery_endpoint, "POST", QUERIES, body, **{"Content-Encoding": "gzip"}
    )
    assert (status, answer["rows"]) == (200, [{"f": [{"v": "1"}]}])


def test_an_upload_goes_on_after_a_part_that_makes_no_sense(bigquery_endpoint: str) -> None:
    _made(bigquery_endpoint)
    place = {**PLACE, "tableId": "uploaded"}
    load = job("load")(destinationTable=place, sourceFormat="CSV", autodetect=True)
    started = request(bigquery_endpoint, "POST", f"{UPLOADS}resumable", json.dumps(load).encode())
    name = started[1]["x-guploader-uploadid"]
    path = f"{UPLOADS}resumable&upload_id={name}"
    for nonsense in ("bytes 0-1", "bytes -1-2/3", f"bytes 0-1/{'9' * 5_000}", "lines 0-1/2"):
        headers = {"Content-Range": nonsense}
        assert request(bigquery_endpoint, "PUT", path, b"ab", **headers)[0] == 400
    done = request(bigquery_endpoint, "PUT", path, b"a\n1\n", **{"Content-Range": "bytes 0-3/4"})
    assert (done[0], done[2]["configuration"]["jobType"]) == (200, "LOAD")


def test_an_answer_can_carry_what_it_quotes(bigquery_endpoint: str) -> None:
    _made(bigquery_endpoint)
    rows = {"rows": [{"json": {"a": "\ud800"}}, {"json": {"\ud800": 1}}]}
    status, _, answer = request(
        bigquery_endpoint, "POST", f"{TABLES}/t/insertAll", json.dumps(rows).encode()
    )
    assert (status, [row_error["index"] for row_error in answer["insertErrors"]]) == (200, [0, 1])
    load = job("load")(destinationTable=PLACE)
    path = f"{UPLOADS}resumable".replace("/p/", "/%F0%9F%98%80/")
    status, headers, _ = request(bigquery_endpoint, "POST", path, json.dumps(load).encode())
    assert status == 200
    assert "/%F0%9F%98%80/" in headers["location"]
