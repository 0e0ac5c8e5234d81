"""A model hub over HTTP, for huggingface_hub: one repository, protected by a token."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar


class Hub:
    """`files` and `commit` may change between requests."""

    def __init__(self, files: dict[str, bytes], token: str = "") -> None:
        self.files, self.token = files, token
        self.commit = "0123456789abcdef0123456789abcdef01234567"
        self.url = ""
        self.asked: list[str] = []


@contextmanager
def served(hub: Hub) -> Iterator[Hub]:
    """Serves the hub on a free loopback port."""

    class Handler(_Handler):
        of: ClassVar[Hub] = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    of: ClassVar[Hub]

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        hub, path = self.of, self.path.partition("?")[0]
        hub.asked.append(path)
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}
            self._send(401, b'{"error": "Access is restricted."}', headers, with_body)
        elif path.startswith("/api/models/org/gated/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": _git_hash(content)}
                for name, content in hub.files.items()
            ]
            body = json.dumps(tree).encode()
            self._send(200, body, {"Content-Type": "application/json"}, with_body)
        elif path.startswith("/api/models/org/gated/"):
            siblings = [{"rfilename": name} for name in hub.files]
            info = {"id": "org/gated", "modelId": "org/gated", "sha": hub.commit}
            body = json.dumps(info | {"siblings": siblings}).encode()
            self._send(200, body, {"Content-Type": "application/json"}, with_body)
        else:
            name = path.partition(f"/resolve/{hub.commit}/")[2]
            content = hub.files.get(name)
            if content is None:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
                return
            headers = {"ETag": f'"{_git_hash(content)}"', "X-Repo-Commit": hub.commit}
            self._send(200, content, headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
