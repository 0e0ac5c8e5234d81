"""An HTTP endpoint for one BigQuery table, including responses that the service rarely sends.

Penstock's own tests write to the embedded BigQuery.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.http_server import QuietHandler, serving

Json = dict[str, Any]


class TableEndpoint:
    """An endpoint that keeps the rows it accepted. If `columns` is None, the table does not exist.

    Each entry in `refusals` is the status and reason for one upcoming insertAll.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.columns: dict[str, str] | None = {"data": "STRING"}
        self.rows: list[Json] = []
        self.inserts = 0
        self.refusals: list[tuple[int, str]] = []
        self.most_rows = 1000

    def shown(self) -> tuple[int, Json]:
        if self.columns is None:
            return _error(404, "notFound")
        fields = [{"name": name, "type": kind} for name, kind in self.columns.items()]
        return 200, {"schema": {"fields": fields}}

    def insert(self, body: Json) -> tuple[int, Json]:
        self.inserts += 1
        if self.columns is None:
            return _error(404, "notFound")
        if self.refusals:
            return _error(*self.refusals.pop(0))
        if len(body["rows"]) > self.most_rows:
            return _error(413, "requestTooLarge")
        errors: list[Json] = []
        for index, row in enumerate(entry["json"] for entry in body["rows"]):
            unknown = sorted(row.keys() - self.columns.keys())
            if unknown and not body["ignoreUnknownValues"]:
                why = {"location": unknown[0], "message": "no such field"}
                errors.append({"index": index, "errors": [why]})
            else:
                self.rows.append({name: row[name] for name in row if name in self.columns})
        return 200, {"insertErrors": errors} if errors else {}


def _error(status: int, reason: str) -> tuple[int, Json]:
    error = {"message": f"not now: {reason}", "errors": [{"reason": reason}]}
    return status, {"error": error}


@contextmanager
def listening_table() -> Iterator[TableEndpoint]:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self._answer(*table.shown())

        def do_POST(self) -> None:
            assert self.path == "/bigquery/v2/projects/p/datasets/d/tables/t/insertAll"
            self._answer(*table.insert(json.loads(self.read_body())))

        def _answer(self, status: int, body: Mapping[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with serving(Handler) as url:
        table = TableEndpoint(url)
        yield table
