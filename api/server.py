"""uvicorn's configuration, and its HTTP protocol with limits on request heads and connections.

Tests use both. A head is a request's URL and headers. h11, uvicorn's other parser, limits the
head's size. httptools does not, and it copies the partial header each time another piece arrives,
so a single endless header blocks all other requests. A typical request, whose head arrives in one
piece, does not set a timer here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import resource
import socket
import ssl
import urllib.parse
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from types import FrameType
from typing import Any, ClassVar

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from api import metrics
from api.errors import HeadTooLarge, TooSlow, error_response
from api.http.connection import CONNECTION
from api.http.middleware import BODY_ARRIVED
from shared.errors import BadInput, ConfigurationError, Overloaded, PenstockError
from shared.settings import ApiSettings

HEAD_LIMIT_BYTES = 64 * 1024
"""Maximum size of a head, the same as for Google's load balancer."""
CHUNK_FRAME_BYTES = 24
"""Overhead allowed per body chunk. Longer chunk extensions and trailers count as part of the head.
"""
MAX_PIPELINED = 16
"""Maximum number of pipelined requests waiting for the current one to finish.

A single read may contain ten thousand requests.
"""
UNREAD_LIMIT_S = 60
"""How long to wait before closing a connection whose peer isn't reading."""
UNREAD_MAX_BYTES = 256 * 1024 * 1024
"""Maximum total memory for unread responses."""
RESERVED_FILES = 128
"""File descriptors reserved for the process itself."""
MAX_PORT = 65535
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_FRAMING = frozenset((b"connection", b"transfer-encoding"))
_HOST = re.compile(
    rb"(?:\[(?P<ipv6>[0-9A-Fa-f:.]{2,45})\]"
    rb"|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2}){1,255})"
    rb"(?::(?P<port>[0-9]{0,5}))?"
)

DATE_S = 1.0
"""Interval between updates of the Date header."""
DRAIN_S = 4
"""How long open requests may run after SIGTERM, in seconds.

Cloud Run kills the process after 10 s, and storing rows takes up to 5 s.
"""
KEEP_ALIVE_S = 620
"""Longer than the 600 s that Google's load balancer uses. Otherwise, the load balancer might reuse
a connection that was just closed.
"""

TLS_CIPHERS = (
    "@SECLEVEL=2:ECDH+AESGCM:ECDH+CHACHA20:ECDH+AES:DHE+AES:!aNULL:!eNULL:!aDSS:!SHA1:!AESCCM"
)
"""Ciphers accepted in TLS 1.2: only those with forward secrecy and without SHA-1.

The list is the same as in Python's own builds,
https://github.com/python/cpython/blob/v3.11.7/Modules/_ssl.c. Debian and Ubuntu build Python with
the system OpenSSL's list, which is less strict on both counts.
"""


class BoundedHttp(HttpToolsProtocol):
    """One connection. `protocol_with` sets the class's limits."""

    head_timeout_s: ClassVar[float]
    max_connections: ClassVar[int]
    idle: ClassVar[dict[BoundedHttp, None]]
    """Connections without a request, longest idle first."""
    unread: ClassVar[dict[BoundedHttp, int]]
    """Connections with an unread response, oldest first, with the response's size in bytes."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._beside_bytes = 0
        """Number of bytes outside bodies since the last complete head or request."""
        self._in_head = self._in_body = False
        self._timer: asyncio.TimerHandle | None = None
        self._error: PenstockError | None = None
        self._offers_protocol = False
        """True if the current head offers an upgrade to another protocol."""
        self.is_lost = False
        self.on_lost = set[Callable[[], None]]()
        """See api.http.connection.Connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts the connection.

        If there are too many idle connections, closes the one that has been idle longest.
        """
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if (
            connection is not None
            and connection.family != socket.AF_UNIX
            and hasattr(socket, "TCP_USER_TIMEOUT")
        ):
            connection.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_LIMIT_S * 1000
            )
        if len(self.connections) > self.max_connections:
            if self.idle:
                oldest = next(iter(self.idle))
                del self.idle[oldest]
                oldest._cut("idle")
            elif self.unread:
                next(iter(self.unread))._cut("unread")
            else:
                self._refuse("full", Overloaded("all connections are in use; try again later"))
                return
        self.idle[self] = None
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Removes the connection from every count."""
        self.idle.pop(self, None)
        self._leave_unread()
        self._disarm()
        super().connection_lost(exc)
        self.is_lost = True
        for hang_up in list(self.on_lost):
            hang_up()

    def pause_writing(self) -> None:
        """Called when the caller reads more slowly than the response is written.

        The rest of the response is buffered, up to a limit.
        """
        super().pause_writing()
        self.unread[self] = self.transport.get_write_buffer_size()
        metrics.CONNECTIONS_UNREAD.set(len(self.unread))
        while len(self.unread) > 1 and sum(self.unread.values()) > UNREAD_MAX_BYTES:
            next(iter(self.unread))._cut("unread")

    def resume_writing(self) -> None:
        """Called when the caller has read nearly all of the response."""
        self._leave_unread()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parses received bytes, and limits how many of them may be outside bodies."""
        self._unset_keepalive_if_required()
        self._beside_bytes += len(data)
        self._parse(data)
        if self._beside_bytes > HEAD_LIMIT_BYTES and not self.transport.is_closing():
            self._refuse("head_too_large", _too_large())
        elif self._timer is None and self._beside_bytes and not self._in_body:
            self._arm()

    def on_message_begin(self) -> None:
        """Called at the start of a request's head."""
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        """Called at the end of the head.

        Starts the request, unless the head is too large or too many requests are pipelined.
        """
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._error = BadInput("CONNECT requests a tunnel, but this server is not a proxy")
                raise self._error
            self._offers_protocol = True
            return
        if self._beside_bytes > HEAD_LIMIT_BYTES and self._head_bytes() > HEAD_LIMIT_BYTES:
            self._error = _too_large()
            raise self._error
        if reason := self._wrong_host():
            self._error = BadInput(f"host: {reason}", field="host")
            raise self._error
        if len(self.pipeline) >= MAX_PIPELINED:
            self._error = BadInput(
                f"more than {MAX_PIPELINED} pipelined requests are waiting on this connection, "
                "which is the maximum"
            )
            raise self._error
        self._disarm()
        self.idle.pop(self, None)
        self._beside_bytes, self._in_head, self._in_body = 0, False, True
        self._begin_request()
        # The parser reports trailers as headers (RFC 9110, 6.5.1). They must not become headers.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        self._beside_bytes -= len(body) + CHUNK_FRAME_BYTES
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_protocol:
            return
        self._beside_bytes, self._in_body = 0, False
        self._disarm()
        self.scope[BODY_ARRIVED] = True  # type: ignore[literal-required]
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called after the response has been written.

        An unread body may keep arriving for as long as a head may take.
        """
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.idle[self] = None
            if self._in_body:
                self._arm()

    def send_400_response(self, msg: str) -> None:
        """Rejects input that the parser can't read or that a callback rejected."""
        self._refuse("invalid", self._error or BadInput("this is not a valid HTTP/1.1 request"))

    def _begin_request(self) -> None:
        """Does the same thing as uvicorn's `on_headers_complete`, with our kind of cycle."""
        http_version, url = self.parser.get_http_version(), httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        self.scope["http_version"] = http_version
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        self.scope["raw_path"], self.scope["query_string"] = url.path, url.query or b""
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        earlier = self.cycle
        self.cycle = _Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=http_version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if earlier is None or earlier.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:  # pipelined
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _parse(self, data: bytes) -> None:
        """Feeds received bytes to the parser.

        Offers to switch to another protocol (RFC 9110, 7.8) are ignored, because Java's client
        offers h2c with every request. httptools treats such a request as having no body and treats
        its body as the next request, so the head, without the offer, is fed to a new parser.
        """
        head = b""
        while True:
            try:
                self.parser.feed_data(head + data)
            except httptools.HttpParserUpgrade as offer:
                data, head = (head + data)[offer.args[0] :], self._head_without_offer()
                # Without leniency, a parser stops after headers that close the connection.
                self.parser, self._offers_protocol = httptools.HttpRequestParser(self), False
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError:
                self.send_400_response("")
                return
            else:
                return

    def _head_without_offer(self) -> bytes:
        fields = b"".join(b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
        version = self.parser.get_http_version().encode()
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, fields)

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def _wrong_host(self) -> str:
        """Returns the reason for rejecting the Host header (RFC 9112, 3.2).

        Empty if the header is accepted.
        """
        hosts = [value for name, value in self.headers if name == b"host"]
        if not hosts:
            is_needed = self.parser.get_http_version() == "1.1"
            return "is required in an HTTP/1.1 request" if is_needed else ""
        if len(hosts) > 1:
            return f"must be sent only once, got {len(hosts)}"
        if not _is_host(hosts[0]):
            return (
                "must be a host name or IP address with an optional port, such as example.com:443"
            )
        return ""

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout_s, self._is_late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_late(self) -> None:
        self._timer = None
        if self._in_head:
            reason = f"the URL and headers did not arrive within {self.head_timeout_s:g} s"
            self._refuse("head_too_slow", TooSlow(reason))
        else:
            self._cut("idle")

    def _refuse(self, reason: str, error: PenstockError) -> None:
        """Sends the error unless another response is being written, then closes the connection."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            response = error_response(error)
            fields = [*response.raw_headers, (b"connection", b"close")]
            lines = b"".join(name + b": " + value + b"\r\n" for name, value in fields)
            self.transport.write(
                STATUS_LINE[response.status_code] + lines + b"\r\n" + bytes(response.body)
            )
        self._cut(reason)

    def _cut(self, reason: str) -> None:
        metrics.CONNECTIONS_CUT.labels(reason).inc()
        if self._leave_unread():
            # close() would wait until the caller has read everything.
            self.transport.abort()
        else:
            self.transport.close()

    def _leave_unread(self) -> bool:
        """Removes the connection from those with unread responses.

        Returns whether it was one of them.
        """
        was_unread = self.unread.pop(self, None) is not None
        metrics.CONNECTIONS_UNREAD.set(len(self.unread))
        return was_unread


class _Cycle(RequestResponseCycle):
    """A request and its response.

    Writes the head of a response with a known length together with its body. uvicorn writes them
    separately and checks each header by itself, which took a tenth of a short request's CPU time.
    """

    _head = b""
    """The response's head, until it is written."""

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start" and not self.response_started:
            self._head = self._head_of(message["status"], list(message.get("headers", ())))
            if self._head:
                self.response_started, self.waiting_for_100_continue = True, False
                return
        elif message["type"] == "http.response.body" and self._head:
            head, self._head = self._head, b""
            self.expected_content_length += len(head)
            message["body"] = head + message.get("body", b"")
        await super().send(message)

    def _head_of(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Returns a head that can wait for the body. Empty if uvicorn must write the head itself.

        Raises:
            RuntimeError: a header contains a line break or another control character.
        """
        fields = dict(headers)
        length = fields.get(b"content-length")
        if (
            length is None
            or not self.keep_alive
            or self.scope["method"] == "HEAD"
            or not fields.keys().isdisjoint(_FRAMING)
        ):
            return b""
        lines = [b"%b: %b" % field for field in (*self.default_headers, *headers)]
        if _CONTROL.search(b"".join(lines)):
            raise RuntimeError("a response header contains a control character")
        self.chunked_encoding, self.expected_content_length = False, int(length)
        return STATUS_LINE[status] + b"\r\n".join((*lines, b"", b""))


class QuietServer(uvicorn.Server):
    """Wakes up once per second, to update the Date header, instead of ten times."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Shuts down as soon as possible. Call it in the event loop."""
        self.should_exit = True
        self._stopping.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shuts down after a signal, which may arrive at any point in the event loop."""
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._stopping.set)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self._stopping.wait()


def protocol_with(settings: ApiSettings) -> type[BoundedHttp]:
    """Returns the protocol class with the limits from the given settings."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_connections = settings.max_connections
    if files != resource.RLIM_INFINITY:
        max_connections = max(1, min(max_connections, files - RESERVED_FILES))
    bounds = {
        "head_timeout_s": settings.head_timeout_s,
        "max_connections": max_connections,
        "idle": {},
        "unread": {},
    }
    return type("BoundedHttp", (BoundedHttp,), bounds)


@lru_cache(maxsize=256)
def _is_host(value: bytes) -> bool:
    """Returns whether the value is a nonempty `uri-host [ ":" port ]`.

    See RFC 9110, 7.2 and RFC 3986, 3.2.2.
    """
    match = _HOST.fullmatch(value)
    if match is None or int(match["port"] or 0) > MAX_PORT:
        return False
    if match["ipv6"] is None:
        return True
    try:
        ipaddress.IPv6Address(match["ipv6"].decode())
    except ValueError:
        return False
    return True


def _too_large() -> PenstockError:
    return HeadTooLarge(f"the URL and headers exceed the maximum of {HEAD_LIMIT_BYTES} bytes")


def server_config(app: ASGIApp, settings: ApiSettings) -> uvicorn.Config:
    """Returns uvicorn's configuration.

    Raises:
        ConfigurationError: the certificate and its key can't be used.
    """
    context = _tls_context(settings) if settings.tls_cert else None
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=protocol_with(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        # Decides whether links use https. A Host changed by a proxy is not restored from
        # X-Forwarded-Host, because Google's front end forwards that header exactly as the caller
        # sent it. Use PENSTOCK_PUBLIC_URL for that.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
        # uvicorn's own context does not set a list of ciphers.
        ssl_context_factory=None if context is None else lambda config, default: context,
    )


def _tls_context(settings: ApiSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(TLS_CIPHERS)
    try:
        # The password is empty, because otherwise an encrypted key would cause a prompt on the
        # terminal.
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except OSError as error:
        raise ConfigurationError(
            f"PENSTOCK_TLS_CERT: {settings.tls_cert} and {settings.tls_key} are not a valid "
            f"certificate and private key: {error.strerror or error}",
            field="tls_cert",
        ) from error
    return context
