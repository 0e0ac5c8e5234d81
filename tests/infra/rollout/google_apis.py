"""A server that responds like Cloud Run, Monitoring, Secret Manager and the API itself, as far as a
rollout needs them.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

LATEST, NAMED = "TRAFFIC_TARGET_ALLOCATION_TYPE_LATEST", "TRAFFIC_TARGET_ALLOCATION_TYPE_REVISION"
PROJECT, SERVICE = "example-project", "penstock-api"
KEY = "first-key"


class Region:
    """One region's service:

    `deploy` creates a revision as an apply does; `counts` holds the numbers that Monitoring shows
    for each revision.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.revisions = ["api-1"]
        self.traffic: list[dict[str, Any]] = [{"type": LATEST, "percent": 100}]
        self.history: list[dict[str, int]] = []
        self.counts: dict[str, dict[str, int]] = {}

    @property
    def shares(self) -> dict[str, int]:
        """The percentage of traffic per revision, as callers experience it."""
        found: dict[str, int] = {}
        for target in self.traffic:
            if target.get("percent"):
                revision = target.get("revision", self.revisions[-1])
                found[revision] = found.get(revision, 0) + target["percent"]
        return found

    def deploy(self, revision: str) -> None:
        self.revisions.append(revision)

    def shown(self) -> dict[str, Any]:
        statuses = [
            target | {"uri": self.url if target.get("tag") else ""} for target in self.traffic
        ]
        newest = f"projects/x/revisions/{self.revisions[-1]}"
        return {"latestReadyRevision": newest, "traffic": self.traffic, "trafficStatuses": statuses}

    def change(self, traffic: list[dict[str, Any]]) -> str | None:
        """Returns the error from Cloud Run, or None."""
        unknown = [
            target["revision"] for target in traffic if target["revision"] not in self.revisions
        ]
        if unknown:
            return f"Revision {unknown[0]} does not exist"
        if sum(target.get("percent", 0) for target in traffic) != 100:
            return "traffic must be 100 percent"
        self.traffic = traffic
        self.history.append(self.shares)
        return None


class GoogleApis:
    """The state behind the server: regions by name, and the API's responses."""

    def __init__(self) -> None:
        self.url = ""
        self.regions: dict[str, Region] = {}
        self.dimensions = 3
        self.cuts_off = False
        """True if the embeddings response is cut off before the end of the body."""
        self.garbled = ""
        """The end of the paths whose responses are not JSON."""
        self.secret = base64.b64encode(f"{KEY}\n".encode()).decode()
        self.asked: list[str] = []

    def answer(self, verb: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if path == "/healthz":  # like Google's front end, before the API is called
            return 404, {"error": "The requested URL /healthz was not found on this server."}
        if path == "/readyz":
            return 200, {"status": "ready"}
        if path == "/v1/embeddings":
            self.asked.append(body["input"])
            return 200, {"data": [{"embedding": [1.0] + [0.0] * (self.dimensions - 1)}]}
        if path.endswith(":access"):
            return 200, {"payload": {"data": self.secret}}
        if path.endswith("/timeSeries"):
            return 200, self._series(query["filter"])
        if "/operations/" in path:
            return 200, {"name": path.removeprefix("/v2/"), "done": True}
        return self._service(verb, path, query, body)

    def _service(self, verb: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        region = self.regions.get(path.split("/")[5])
        if region is None or not path.endswith(f"/services/{SERVICE}"):
            return 404, {"error": {"message": "no such service"}}
        if verb == "GET":
            return 200, region.shown()
        assert query == {"updateMask": "traffic"}
        refused = region.change(body["traffic"])
        return (
            (400, {"error": {"message": refused}})
            if refused
            else (200, {"name": "projects/x/operations/1"})
        )

    def _series(self, wanted: str) -> dict[str, Any]:
        terms = dict(term.split(" = ") for term in wanted.split(" AND "))
        labels = {name: value.strip('"') for name, value in terms.items()}
        assert labels["resource.labels.service_name"] == SERVICE
        region = self.regions[labels["resource.labels.location"]]
        counts = region.counts.get(labels["resource.labels.revision_name"], {})
        return {
            "timeSeries": [
                {
                    "metric": {"labels": {"response_code_class": kind}},
                    "points": [
                        {"value": {"int64Value": str(count)}},
                        {"value": {"int64Value": "0"}},
                    ],
                }
                for kind, count in counts.items()
            ]
        }


@contextmanager
def serving(apis: GoogleApis) -> Iterator[str]:
    """Serves `apis` on a free port; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        do_POST = do_PATCH = do_GET

        def _answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            if parts.path == "/v1/embeddings" and self.headers["authorization"] != f"Bearer {KEY}":
                status, found = 401, {"error": "no such key"}
            else:
                status, found = apis.answer(self.command, parts.path, query, body)
            is_garbled = bool(apis.garbled) and parts.path.endswith(apis.garbled)
            reply = b"<html>" if is_garbled else json.dumps(found).encode()
            is_cut_off = apis.cuts_off and parts.path == "/v1/embeddings"
            self.send_response(status)
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply[:-5] if is_cut_off else reply)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        apis.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield apis.url
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
