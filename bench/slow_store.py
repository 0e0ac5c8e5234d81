"""An object store with limited rates, which supports the part of S3's protocol for reading."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from obstore.store import S3Store

BUCKET = "weights"
CHUNK_BYTES = 64 * 1024
_MODIFIED = "2026-11-01T00:00:00.000Z"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class SlowStore:
    """Sends objects at a total rate and, on each connection, at another one.

    Args:
        objects: the store's contents, as a mapping from keys to bytes.
        bytes_per_s: the total rate. 0 means no limit.
        connection_bytes_per_s: the rate of each connection. 0 means no limit.
        on_get: called before each response with an object's bytes.
    """

    def __init__(
        self,
        objects: Mapping[str, bytes],
        bytes_per_s: float = 0.0,
        connection_bytes_per_s: float = 0.0,
        on_get: Callable[[], None] = lambda: None,
    ) -> None:
        self.objects = objects
        self.on_get = on_get
        self._bytes_per_s = bytes_per_s
        self._connection_bytes_per_s = connection_bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def send(self, data: bytes, write: Callable[[bytes], object]) -> None:
        began_s, rate = time.monotonic(), self._connection_bytes_per_s
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            until_s = self._reserve(len(chunk))
            if rate:
                until_s = max(until_s, began_s + (start + len(chunk)) / rate)
            time.sleep(max(0.0, until_s - time.monotonic()))
            write(chunk)

    def _reserve(self, size_bytes: int) -> float:
        """Returns when the store has sent these bytes, in monotonic seconds."""
        if not self._bytes_per_s:
            return 0.0
        with self._lock:
            self._free_at_s = (
                max(self._free_at_s, time.monotonic()) + size_bytes / self._bytes_per_s
            )
            return self._free_at_s

    @contextmanager
    def running(self) -> Iterator[S3Store]:
        """Serves the objects, and yields a client."""
        handler = type("Handler", (_Handler,), {"store": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield S3Store(
                BUCKET,
                endpoint=f"http://127.0.0.1:{server.server_port}",
                region="here",
                skip_signature=True,
                client_options={"allow_http": True, "timeout": "1h"},
            )
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: SlowStore

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        key = unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/")
        if not key:
            self._list(parse_qs(url.query).get("prefix", [""])[0])
        elif key in self.store.objects:
            self._send_object(self.store.objects[key])
        else:
            self._answer(HTTPStatus.NOT_FOUND, 0)

    def do_HEAD(self) -> None:
        key = unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")
        data = self.store.objects.get(key)
        status = HTTPStatus.NOT_FOUND if data is None else HTTPStatus.OK
        self._answer(status, 0 if data is None else len(data))

    def _list(self, prefix: str) -> None:
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_MODIFIED}</LastModified>"
            f'<ETag>"1"</ETag><Size>{len(data)}</Size></Contents>'
            for key, data in sorted(self.store.objects.items())
            if key.startswith(prefix)
        )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
        self._answer(HTTPStatus.OK, len(body))
        self.wfile.write(body.encode())

    def _send_object(self, data: bytes) -> None:
        self.store.on_get()
        span = _RANGE.fullmatch(self.headers.get("Range", ""))
        first, last = (int(span[1]), int(span[2])) if span else (0, len(data) - 1)
        content_range = f"bytes {first}-{last}/{len(data)}" if span else ""
        part = data[first : last + 1]
        status = HTTPStatus.PARTIAL_CONTENT if span else HTTPStatus.OK
        self._answer(status, len(part), content_range)
        self.store.send(part, self.wfile.write)

    def _answer(self, status: HTTPStatus, length: int, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Sun, 01 Nov 2026 00:00:00 GMT")
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keeps requests out of the output."""
