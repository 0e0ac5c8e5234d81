"""Sends malformed requests, which are valid requests mutated from a seed, and checks the responses.

    python -m tests.malformed --requests 25000 --seed 1

The long run starts its own server and prints its findings. test_malformed.py runs part of it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import http.client
import json
import random
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.limits import START_LIMIT_S, WAIT_LIMIT_S
from tests.process import Process, free_port, listens

_V2 = "/bigquery/v2"
_PROJECT = f"{_V2}/projects/p"
_DATASET = f"{_PROJECT}/datasets/d"
_TABLE = f"{_DATASET}/tables/t"
_PLACE = {"projectId": "p", "datasetId": "d", "tableId": "t"}
_OTHER = {**_PLACE, "tableId": "other"}
_SCHEMA = {
    "fields": [
        {"name": "a", "type": "INT64"},
        {"name": "b", "type": "STRING", "mode": "REPEATED"},
        {"name": "r", "type": "RECORD", "fields": [{"name": "x", "type": "NUMERIC"}]},
        {"name": "ts", "type": "TIMESTAMP"},
        {"name": "j", "type": "JSON"},
    ]
}
_ROW = {"a": "1", "b": ["x"], "r": {"x": "1.5"}, "ts": "2026-01-01 00:00:00", "j": "{}"}
_QUERY = {"query": "SELECT * FROM d.t WHERE a = @a", "useLegacySql": False}
_PARAMETERS = [
    {"name": "a", "parameterType": {"type": "INT64"}, "parameterValue": {"value": "1"}},
    {
        "name": "s",
        "parameterType": {
            "type": "STRUCT",
            "structTypes": [{"name": "x", "type": {"type": "DATE"}}],
        },
        "parameterValue": {"structValues": {"x": {"value": "2026-01-01"}}},
    },
]
_LOAD = {"destinationTable": _OTHER, "sourceFormat": "CSV", "schema": _SCHEMA, "quote": '"'}
_TABLE_BODY = {
    "tableReference": _OTHER,
    "schema": _SCHEMA,
    "expirationTime": "4000000000000",
    "timePartitioning": {"type": "DAY", "field": "ts", "expirationMs": "0"},
    "clustering": {"fields": ["a"]},
    "labels": {"a": "b"},
}
_JOB = {"jobReference": {"projectId": "p", "location": "US"}}
_MULTIPART = (
    b"--x\r\nContent-Type: application/json\r\n\r\n%s\r\n"
    b"--x\r\nContent-Type: text/csv\r\n\r\n1,2,3\r\n--x--\r\n"
)


@dataclass
class Asked:
    """A request."""

    verb: str
    path: str
    body: Any = None
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


_PAGE = {"maxResults": "10", "pageToken": "0"}
_ROWS = {**_PAGE, "startIndex": "0", "timeoutMs": "100", "formatOptions.useInt64Timestamp": "true"}
VALID = (
    Asked("GET", f"{_V2}/projects", query=_PAGE),
    Asked("POST", f"{_PROJECT}/datasets", {"datasetReference": {"datasetId": "d"}, "labels": {}}),
    Asked("GET", f"{_PROJECT}/datasets", query=_PAGE),
    Asked("GET", _DATASET),
    Asked("PATCH", _DATASET, {"defaultTableExpirationMs": "3600000"}, headers={"If-Match": "x"}),
    Asked("PUT", _DATASET, {"description": "d", "access": [{"role": "READER"}]}),
    Asked("DELETE", f"{_PROJECT}/datasets/none", query={"deleteContents": "true"}),
    Asked("POST", f"{_DATASET}/tables", _TABLE_BODY),
    Asked("POST", f"{_DATASET}/tables", {"tableReference": {"tableId": "bare"}}),
    Asked(
        "POST",
        f"{_DATASET}/tables",
        {
            "tableReference": {"tableId": "v"},
            "view": {"query": "SELECT a FROM d.t", "useLegacySql": False},
        },
    ),
    Asked("GET", f"{_DATASET}/tables", query=_PAGE),
    Asked("GET", _TABLE, query={"selectedFields": "a"}),
    Asked("PATCH", _TABLE, {"description": "x", "labels": {"a": "b"}, "schema": _SCHEMA}),
    Asked("PATCH", f"{_DATASET}/tables/bare", {"schema": _SCHEMA}),
    Asked("PUT", f"{_DATASET}/tables/other", {**_TABLE_BODY, "friendlyName": "o"}),
    Asked("DELETE", f"{_DATASET}/tables/other"),
    Asked("DELETE", f"{_DATASET}/tables/other$20260101"),
    Asked(
        "POST",
        f"{_TABLE}/insertAll",
        {"rows": [{"insertId": "1", "json": _ROW}], "skipInvalidRows": True},
    ),
    Asked("GET", f"{_TABLE}/data", query={**_ROWS, "selectedFields": "a,b"}),
    Asked("GET", f"{_TABLE}/rowAccessPolicies"),
    Asked(
        "POST",
        f"{_PROJECT}/queries",
        {
            **_QUERY,
            "queryParameters": _PARAMETERS,
            "parameterMode": "NAMED",
            "timeoutMs": 1_000,
            "maxResults": 10,
            "jobTimeoutMs": "5000",
            "maximumBytesBilled": "100000000",
            "defaultDataset": {"datasetId": "d"},
            "labels": {"a": "b"},
            "requestId": "r",
        },
    ),
    Asked("GET", f"{_PROJECT}/queries/known", query=_ROWS),
    Asked(
        "POST",
        f"{_PROJECT}/jobs",
        {
            **_JOB,
            "configuration": {
                "query": {
                    **_QUERY,
                    "queryParameters": _PARAMETERS,
                    "destinationTable": _OTHER,
                    "writeDisposition": "WRITE_TRUNCATE",
                    "createDisposition": "CREATE_IF_NEEDED",
                    "timePartitioning": {"type": "DAY", "field": "ts"},
                },
                "jobTimeoutMs": "5000",
                "dryRun": False,
            },
        },
    ),
    Asked(
        "POST",
        f"{_PROJECT}/jobs",
        {
            **_JOB,
            "configuration": {
                "copy": {
                    "sourceTables": [_PLACE],
                    "destinationTable": _OTHER,
                    "writeDisposition": "WRITE_APPEND",
                }
            },
        },
    ),
    Asked("GET", f"{_PROJECT}/jobs", query={**_PAGE, "stateFilter": "done"}),
    Asked("GET", f"{_PROJECT}/jobs/known"),
    Asked("POST", f"{_PROJECT}/jobs/known/cancel"),
    Asked("DELETE", f"{_PROJECT}/jobs/none/delete"),
    Asked(
        "POST",
        f"/upload{_PROJECT}/jobs",
        {"configuration": {"load": _LOAD}},
        {"uploadType": "multipart"},
        {"Content-Type": "multipart/related; boundary=x"},
    ),
    Asked(
        "POST",
        f"/upload{_PROJECT}/jobs",
        {"configuration": {"load": _LOAD}},
        {"uploadType": "resumable"},
    ),
    Asked(
        "PUT",
        f"/upload{_PROJECT}/jobs",
        None,
        {"uploadType": "resumable", "upload_id": "none"},
        {"Content-Range": "bytes 0-1/2"},
    ),
    Asked("GET", "/discovery/v1/apis/bigquery/v2/rest"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, -0.0, 10**30, 2**63, -(2**63) - 1, float("nan"), 1e308),
    *("", " ", "abc", "-1", "1e999", "9" * 5_000, "NaN", "true", "null", "\x00", "\ud800"),
    *("x" * 10_000, "'", '"', "`", "$", "$20260101", "../..", "%00", "\u202e", "\U0001f600"),
    *("2027-01-01T00:00:00Z", "9999-12-31 23:59:59", "10000-01-01", "WRITE_TRUNCATE", "STRING"),
    *([], {}, [[]], [None], {"": None}, [[[[]]]], {"a": {"b": {"c": []}}}, [1, "a", None, {}]),
)
_SQL = (
    *("SELECT", "SELECT 1; SELECT 2", "SELECT [1,2,3][1,2]", "SELECT [1,[2]]", "SELECT '\x00'"),
    *("SELECT " + "(" * 400 + "1" + ")" * 400, "SELECT TIMESTAMP '9999-12-31 23:59:59'"),
    *("SELECT DATE_ADD(DATE '9999-12-31', INTERVAL 9 DAY)", "SELECT * FROM d.bare"),
    *("SELECT " + "-" * 2_000 + "1", "SELECT 1 AS a, 2 AS a", "SELECT @a, ?, @@x", "SELECT 1/0"),
    *("SELECT REPEAT('x', 1000000000000)", "SELECT * FROM UNNEST(GENERATE_ARRAY(1, 100000000000))"),
    *("CREATE TABLE d.z (a INT64 OPTIONS(", "ALTER TABLE d.t", "DROP TABLE", "TRUNCATE TABLE x"),
    *("CREATE VIEW d.t AS SELECT 1", "INSERT d.t (a) VALUES ('x')", "MERGE d.t USING", "\\"),
    *("DELETE d.bare WHERE true", "INSERT d.bare (a) VALUES (1)", "SELECT * FROM d.`t$20260101`"),
    *("CREATE TABLE d.`a.b.c.d` AS SELECT 1", "CREATE SCHEMA ``", "SELECT * FROM ````", "/*", "--"),
)
_WORDS = ("SELECT", "FROM", "(", ")", "[", "]", ",", "'", "d.t", "@a", "NULL", "UNNEST", "STRUCT")
_VERBS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW")


class Generator:
    """Generates requests from a seed; the same seed yields the same requests."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def raw(self) -> bytes:
        """Returns bytes to write to the socket."""
        pick = self._random
        lines = [b"POST " + f"{_PROJECT}/queries".encode() + b" HTTP/1.1", b"Host: x"]
        body = json.dumps(_QUERY).encode()
        kind = pick.randrange(8)
        if kind == 0:
            return pick.randbytes(pick.randrange(1, 2_000))
        if kind == 1:
            lines += [b"Transfer-Encoding: chunked"]
            body = b"%s\r\nnonsense\r\n0\r\n\r\n" % pick.choice([b"zz", b"-1", b"f" * 40, b""])
        if kind == 2:
            lines += [b"Content-Length: " + pick.choice([b"-1", b"9" * 40, b"abc", b"1, 2"])]
        if kind == 3:
            lines += [b"X-Large: " + b"x" * pick.choice([10_000, 200_000])]
        if kind == 4:
            lines += [b"Bad\x00Name: x", b": none", b"\xff\xfe: y"]
        if kind == 5:
            lines[0] = pick.choice([b"GET", b"GET / HTTP/9.9", b"PRI * HTTP/2.0", b"\r\n" * 9])
        if kind == 6:
            lines += [b"Content-Length: 100000"]
        if kind == 7:
            lines += [b"Transfer-Encoding: chunked", b"Content-Length: 5"]
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    def request(self) -> tuple[str, str, bytes, dict[str, str]]:
        """Returns the verb, the path with its query string, the body, and the headers."""
        pick = self._random
        mutant = copy.deepcopy(pick.choice(VALID))
        mutant.headers.setdefault("Content-Type", "application/json")
        for _ in range(pick.choice([1, 1, 1, 2, 3])):
            self._mutate(mutant)
        body = self._packed(mutant)
        text = "&".join(
            f"{quote(name, safe='.')}={quote(value, errors='replace')}"
            for name, value in mutant.query.items()
        )
        path = quote(mutant.path, safe="/%$", errors="replace")
        return mutant.verb, f"{path}?{text}" if text else path, body, mutant.headers

    def _mutate(self, asked: Asked) -> None:
        pick = self._random
        choice = pick.randrange(12)
        if choice == 0:
            asked.verb = pick.choice(_VERBS)
        elif choice == 1:
            parts = asked.path.split("/")
            wrong = [str(value) for value in _VALUES if isinstance(value, str)]
            parts[pick.randrange(len(parts))] = pick.choice(wrong)
            asked.path = "/".join(parts)
        elif choice in (2, 3) and asked.query:
            asked.query[pick.choice(list(asked.query))] = str(pick.choice(_VALUES))
        elif choice == 4:
            name = pick.choice(["Content-Encoding", "Content-Range", "If-Match", "Content-Type"])
            plain = ("gzip", "br", "bytes */*", "bytes 9-1/0", "x" * 5_000, "*", "multipart/x")
            asked.headers[name] = pick.choice(plain)
        elif choice == 5 and isinstance(asked.body, dict) and "query" in str(asked.body):
            self._put_sql(asked.body)
        elif isinstance(asked.body, dict) and asked.body:
            self._put_value(asked.body)

    def _put_sql(self, body: Any) -> None:
        pick = self._random
        at = body.get("configuration", {}).get("query") if "configuration" in body else body
        if not isinstance(at, dict):
            return
        words = " ".join(pick.choice(_WORDS) for _ in range(pick.randrange(1, 12)))
        at["query"] = pick.choice([*_SQL, words])

    def _put_value(self, body: Any) -> None:
        pick = self._random
        places = list(_places(body))
        within, key = pick.choice(places)
        if pick.random() < 0.15:
            del within[key]
        else:
            within[key] = copy.deepcopy(pick.choice(_VALUES))

    def _packed(self, asked: Asked) -> bytes:
        pick = self._random
        if asked.body is None:
            return b""
        body = json.dumps(asked.body).encode()
        if asked.query.get("uploadType") == "multipart":
            body = _MULTIPART % body
        choice = pick.randrange(20)
        if choice == 0:
            body = body[: pick.randrange(len(body))]
        elif choice == 1:
            at = pick.randrange(len(body))
            body = body[:at] + pick.randbytes(3) + body[at + 1 :]
        elif choice == 2:
            body = b"[" * pick.choice([10, 5_000])
        elif choice == 3:
            body = gzip.compress(body, mtime=0)[: pick.choice([10, 10_000])]
            asked.headers["Content-Encoding"] = "gzip"
        return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list) and value[key]:
            yield from _places(value[key])


@dataclass
class Found:
    """A run's results: the number of responses by status, and every invalid response."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def prepare(address: str) -> None:
    """Creates the resources named in the valid requests."""
    for creation in VALID[1], Asked("POST", f"{_DATASET}/tables", {**_TABLE_BODY, **_named("t")}):
        _send(address, creation.verb, creation.path, json.dumps(creation.body).encode(), {})
    query = {"query": "SELECT 1", "useLegacySql": False}
    known = {"configuration": {"query": query}, "jobReference": {"jobId": "known"}}
    _send(address, "POST", f"{_PROJECT}/jobs", json.dumps(known).encode(), {})


def _named(name: str) -> Any:
    return {"tableReference": {**_PLACE, "tableId": name}}


def send(address: str, seed: int, count: int) -> Found:
    """Sends requests generated from a seed, one after another. A tenth of them are raw bytes."""
    generator, findings = Generator(seed), Found()
    for number in range(count):
        if number % 10 == 9:
            _send_raw(address, generator.raw(), findings)
            continue
        if number % 500 == 0:
            prepare(address)
        verb, path, body, headers = generator.request()
        try:
            status, reason = _send(address, verb, path, body, headers)
        except (TimeoutError, http.client.HTTPException, OSError, ValueError) as error:
            if isinstance(error, ValueError):
                # Python's own client won't send such a request.
                continue
            findings.wrong.append(f"{number}: {verb} {path[:200]} {body[:2000]!r}: {error!r}")
            continue
        findings.statuses[status] += 1
        # This server returns 501 for features that only the service supports.
        if status >= 500 and (status, reason) != (501, "notImplemented"):
            text = f"{number}: {verb} {path[:200]} {body[:2000]!r} {headers}: {status} {reason}"
            findings.wrong.append(text)
    return findings


def _send(
    address: str, verb: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=WAIT_LIMIT_S)
    with contextlib.closing(connection):
        connection.request(verb, path, body, headers)
        response = connection.getresponse()
        answer = response.read()
    if response.status < 500:
        return response.status, ""
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        error = json.loads(answer)["error"]
        reason = error["errors"][0]["reason"]
        return response.status, reason if reason == "notImplemented" else error["message"]
    return response.status, answer[:200].decode(errors="replace")


def _send_raw(address: str, sent: bytes, found: Found) -> None:
    host, _, port = address.partition(":")
    first = b""
    reached = socket.create_connection((host, int(port)), timeout=WAIT_LIMIT_S)
    # The server may close the connection before everything is sent, but it must not stay silent.
    with reached as connection, contextlib.suppress(ConnectionError):
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        first = connection.recv(12)
    if first.startswith(b"HTTP/1.1 5"):
        found.wrong.append(f"{sent[:300]!r}: {first!r}")


def memory_bytes(pid: int) -> int:
    """Returns a process's current memory usage."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def main() -> int:
    """Performs the long run and prints the results. Returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=25_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "bigquery_emulator", "--port", str(port)]
    with tempfile.TemporaryDirectory() as folder:
        place = ["--data-dir", f"{folder}/data"]
        with Process("bigquery", [*command, *place], Path(folder)) as process:
            process.wait_ready(lambda: listens(port), START_LIMIT_S)
            address = f"127.0.0.1:{port}"
            # Memory allocated by the first requests (the analyzer, DuckDB's pools) is not
            # considered growth.
            send(address, options.seed + 1, options.requests // 10)
            before = memory_bytes(process.pid)
            findings = send(address, options.seed, options.requests)
            after = memory_bytes(process.pid)
    print(dict(sorted(findings.statuses.items())), f"memory {before:,} -> {after:,} bytes")
    print(len(findings.wrong), "wrong", *findings.wrong[:40], sep="\n")
    return 1 if findings.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
