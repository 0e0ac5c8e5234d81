"""A bucket, with credentials from workload identity federation: a token from the cluster is
exchanged for one from Google.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from infra.kubernetes.overlay import credentials
from shared.errors import Unavailable
from shared.stores.objects import ObjectStore

AUDIENCE = (
    "//iam.googleapis.com/projects/1/locations/global"
    "/workloadIdentityPools/penstock-elsewhere/providers/cluster"
)


class Google(ThreadingHTTPServer):
    """Exchanges one known token and serves objects to callers that present the resulting token."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token = "of-the-cluster"
        self.exchanged: list[dict[str, list[str]]] = []
        self.objects: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Google

    def do_POST(self) -> None:
        asked = parse_qs(self._body().decode())
        self.server.exchanged.append(asked)
        known = asked["subject_token"] == [self.server.token]
        given = {"access_token": "of-google", "expires_in": 3600, "token_type": "Bearer"}
        self._answer(
            200 if known else 400,
            json.dumps(given if known else {"error": "invalid_grant"}).encode(),
        )

    def do_PUT(self) -> None:
        body = self._body()
        if self._is_let_in():
            self.server.objects[self.path.partition("?")[0]] = body
            self._answer(200, b"")

    def do_GET(self) -> None:
        if self._is_let_in():
            found = self.server.objects.get(self.path.partition("?")[0])
            self._answer(404 if found is None else 200, found or b"")

    def _is_let_in(self) -> bool:
        known = self.headers["Authorization"] == "Bearer of-google"
        if not known:
            self._answer(401, b"")
        return known

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", "1")
        self.send_header("Last-Modified", "Sat, 01 Jan 2022 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def running(server: Google) -> Iterator[Google]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Google]:
    with running(Google()) as server:
        config = json.loads(credentials(AUDIENCE))
        config["token_url"] = f"{server.url}/v1/token"
        config["credential_source"]["file"] = str(tmp_path / "token")
        (tmp_path / "token").write_text("of-the-cluster")
        (tmp_path / "credentials.json").write_text(json.dumps(config))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "credentials.json"))
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "example-project")
        monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
        yield server


@pytest.mark.anyio
async def test_token_of_the_cluster_opens_the_bucket(google: Google) -> None:
    objects = ObjectStore("gs://bucket")
    await objects.put("results/1", b"drawn", "image/png")
    assert await objects.get("results/1", 100) == b"drawn"
    (exchange,) = google.exchanged
    assert exchange["audience"] == [AUDIENCE]
    assert exchange["grant_type"] == ["urn:ietf:params:oauth:grant-type:token-exchange"]


@pytest.mark.anyio
async def test_token_that_google_does_not_take_is_said(google: Google) -> None:
    google.token = "another"
    with pytest.raises(Unavailable, match="results/1"):
        await ObjectStore("gs://bucket").put("results/1", b"drawn", "image/png")
    assert google.objects == {}
