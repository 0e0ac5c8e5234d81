"""One kept-alive HTTP/1.1 connection to a push endpoint.

h11 rather than an HTTP client: the service takes a 102 for an ack, and clients swallow
informational answers.
"""

import asyncio
import ssl
from urllib.parse import urlsplit

import h11

_READ_BYTES = 65_536


class PushFailed(Exception):
    """The endpoint could not be reached, or did not speak HTTP."""


class PushConnection:
    """Posts to one endpoint, one request at a time, over a connection that is opened on demand.

    Args:
        endpoint: an http or https URL.
    """

    def __init__(self, endpoint: str) -> None:
        url = urlsplit(endpoint)
        self._host = url.hostname or ""
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._tls else 80)
        self._authority = url.netloc.rpartition("@")[2]
        self._target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        self._http: h11.Connection | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, headers: list[tuple[str, str]], body: bytes) -> int:
        """Send one POST and return the status of the answer, 102 included.

        The caller limits the time. A post that was cut off closes the connection.

        Raises:
            PushFailed: no connection, or an answer that is no HTTP.
        """
        while True:
            is_reused = self._http is not None
            try:
                return await self._post(headers, body)
            except (OSError, EOFError, UnicodeError, h11.ProtocolError) as error:
                self.close()
                # The other side may close an idle connection at any time; only a fresh one's
                # failure counts.
                if not is_reused:
                    raise PushFailed(str(error) or type(error).__name__) from error
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Drop the connection, if there is one."""
        if self._writer is not None:
            self._writer.close()
        self._http = self._reader = self._writer = None

    async def _post(self, headers: list[tuple[str, str]], body: bytes) -> int:
        if self._http is None or self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._tls
            )
            self._http = h11.Connection(h11.CLIENT)
        http, reader, writer = self._http, self._reader, self._writer
        request = h11.Request(
            method="POST",
            target=self._target,
            headers=[("Host", self._authority), ("Content-Length", str(len(body))), *headers],
        )
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(http.send(event) or b"")
        await writer.drain()
        status = await self._read_status(http, reader)
        if http.our_state is h11.DONE and http.their_state is h11.DONE:
            http.start_next_cycle()
        else:
            self.close()
        return status

    async def _read_status(self, http: h11.Connection, reader: asyncio.StreamReader) -> int:
        status = 0
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                data = await reader.read(_READ_BYTES)
                if not data and not status:
                    raise EOFError("the endpoint closed the connection without an answer")
                http.receive_data(data)
            elif isinstance(event, h11.InformationalResponse):
                if event.status_code == 102:
                    return 102
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif not isinstance(event, h11.Data):
                # End of the answer, or of the connection: the status stands.
                return status
