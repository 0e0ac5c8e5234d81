"""A keep-alive HTTP/1.1 connection to a push endpoint or BigQuery.

It uses h11 instead of an HTTP client, because the service accepts a 102 as an ack but clients
swallow informational responses.
"""

import asyncio
import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

import h11

MOST_BODY_BYTES = 32 * 1024**2
"""Maximum bytes of a response body to keep. The rest is read and discarded."""
_READ_BYTES = 65_536


class HttpFailed(Exception):
    """The other side was unreachable or did not speak HTTP."""


class HttpAnswer(NamedTuple):
    """The status, which may be 102, and up to `MOST_BODY_BYTES` of the body."""

    status: int
    body: bytes


class HttpConnection:
    """Sends one request at a time over a connection opened on demand.

    Args:
        base_url: an http or https URL.
    """

    def __init__(self, base_url: str) -> None:
        url = urlsplit(base_url)
        self._host = url.hostname or ""
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._tls else 80)
        self._authority = url.netloc.rpartition("@")[2]
        self._target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        self._http: h11.Connection | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, headers: list[tuple[str, str]], body: bytes) -> HttpAnswer:
        """Send a POST to the URL itself. See `send`."""
        return await self.send("POST", self._target, headers, body)

    async def send(
        self, method: str, target: str, headers: list[tuple[str, str]], body: bytes
    ) -> HttpAnswer:
        """Send one request to the URL's host and return the response.

        The caller sets the timeout. Interrupting a request closes the connection.

        Args:
            target: path, including the leading slash.

        Raises:
            HttpFailed: connecting failed, the response is not HTTP, or HTTP can't send the target
                or a header.
        """
        try:
            request = h11.Request(
                method=method,
                target=target,
                headers=[("Host", self._authority), ("Content-Length", str(len(body))), *headers],
            )
        except (UnicodeError, h11.ProtocolError) as error:
            raise HttpFailed(f"the URL or a header is invalid: {error}") from error
        while True:
            is_reused = self._http is not None
            try:
                return await self._send(request, body)
            except (OSError, EOFError, UnicodeError, h11.ProtocolError) as error:
                self.close()
                # The other side may close an idle connection at any time, so only failures on new
                # connections are treated as errors.
                if not is_reused:
                    raise HttpFailed(str(error) or type(error).__name__) from error
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the connection if it is open."""
        if self._writer is not None:
            self._writer.close()
        self._http = self._reader = self._writer = None

    async def _send(self, request: h11.Request, body: bytes) -> HttpAnswer:
        if self._http is None or self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._tls
            )
            self._http = h11.Connection(h11.CLIENT)
        http, reader, writer = self._http, self._reader, self._writer
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(http.send(event) or b"")
        await writer.drain()
        answer = await self._read_answer(http, reader)
        if http.our_state is h11.DONE and http.their_state is h11.DONE:
            http.start_next_cycle()
        else:
            self.close()
        return answer

    async def _read_answer(self, http: h11.Connection, reader: asyncio.StreamReader) -> HttpAnswer:
        status, body = 0, bytearray()
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                data = await reader.read(_READ_BYTES)
                if not data and not status:
                    raise EOFError("the endpoint closed the connection without a response")
                http.receive_data(data)
            elif isinstance(event, h11.InformationalResponse):
                if event.status_code == 102:
                    return HttpAnswer(102, b"")
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data[: MOST_BODY_BYTES - len(body)]
            else:
                # The response or the connection has ended, so the status is valid.
                return HttpAnswer(status, bytes(body))
