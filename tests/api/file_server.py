"""An HTTPS server for files that inputs refer to by URL, with a separate certificate authority."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from aiohttp import web

from tests.tls import Certificate, make_certificate

NAME = "files.example"


class FileServer:
    """Responds according to the path.

    `asked` counts requests per path, and `headers` contains the latest request's headers.

    `go` releases the bodies that are waiting for it and the responses for the paths in `held`.
    """

    def __init__(self, port: int, certificate: Certificate) -> None:
        self.port = port
        self.certificate = certificate
        self.files: dict[str, Callable[[], web.StreamResponse]] = {}
        self.asked: Counter[str] = Counter()
        self.headers: dict[str, dict[str, str]] = {}
        self.is_asked = asyncio.Event()
        self.held: set[str] = set()
        self.go = asyncio.Event()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def settings(self) -> dict[str, str]:
        """Settings for an API that may fetch from this server."""
        return {
            "fetch_hosts": f"127.0.0.1:{self.port}, {NAME}:{self.port}",
            "fetch_networks": "127.0.0.1/32",
            "fetch_ca": str(self.certificate.cert),
        }

    def add(self, path: str, data: bytes, media_type: str = "image/png", **headers: str) -> str:
        """Serves a file. Returns its URL."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        self.files[path] = lambda: web.Response(body=data, content_type=media_type, headers=given)
        return f"{self.url}{path}"

    def add_chunked(self, path: str, data: bytes) -> str:
        """Serves a file without a Content-Length. Returns its URL."""

        async def send() -> AsyncIterator[bytes]:
            yield data

        self.files[path] = lambda: web.Response(body=send())
        return f"{self.url}{path}"

    def redirect(self, path: str, location: str) -> str:
        self.files[path] = lambda: web.Response(status=302, headers={"location": location})
        return f"{self.url}{path}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked[request.path] += 1
        self.headers[request.path] = {key.lower(): value for key, value in request.headers.items()}
        self.is_asked.set()
        if request.path == "/slow":
            return await self._slow(request)
        if request.path == "/endless":
            return await self._endless(request)
        if request.path not in self.files:
            return web.Response(status=404)
        if request.path in self.held:
            await self.go.wait()
        response = self.files[request.path]()
        if (tag := response.headers.get("etag")) and request.headers.get("if-none-match") == tag:
            return web.Response(status=304)
        return response

    async def _slow(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "image/png"})
        await response.prepare(request)
        await response.write(b"a")
        await self.go.wait()
        return response

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "image/png"})
        await response.prepare(request)
        # Writing to a reset TLS connection neither waits nor raises, and its transport reports that
        # it is closing only after the event loop has had a chance to run.
        with suppress(ConnectionError):
            while request.transport is not None and not request.transport.is_closing():
                await response.write(bytes(1 << 20))
                await asyncio.sleep(0)
        return response


@asynccontextmanager
async def serving_files(folder: Path) -> AsyncIterator[FileServer]:
    """Runs a server on this machine whose certificate is also valid for NAME."""
    certificate = make_certificate(folder, names=[NAME])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate.cert, certificate.key)
    app = web.Application()
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    server = FileServer(0, certificate)
    app.router.add_get("/{path:.*}", server.answer)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        server.port = runner.addresses[0][1]
        yield server
    finally:
        server.go.set()
        await runner.cleanup()
