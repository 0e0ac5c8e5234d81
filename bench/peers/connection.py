"""A kept HTTP connection of the load generator, the requests it sends and how a vector is read from an answer."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import httptools
import msgspec
import numpy as np

PLACE = "$TEXT"
"""Stands in a body where the text goes."""


class Owner(Protocol):
    """Who gives connections their requests."""

    def answered(self, connection: Connection, number: int, status: int, began_s: float, body: bytes) -> None:
        """The answer to request `number` is complete."""

    def lost(self, connection: Connection, number: int | None) -> None:
        """The server closed the connection; `number` was open on it."""


class Connection(asyncio.Protocol):
    """One kept connection, one request at a time."""

    def __init__(self, load: Owner) -> None:
        self._load = load
        self._number: int | None = None
        self._began_s = 0.0
        self._body: list[bytes] = []
        self.is_open = False

    def open(self, transport: asyncio.Transport) -> None:
        """Takes the transport that carries it."""
        self._transport = transport
        self.is_open = True

    def begin(self, number: int, request: bytes, began_s: float) -> None:
        """Sends request `number`, timed from `began_s`."""
        self._number, self._began_s, self._body = number, began_s, []
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Hands the parser what came."""
        if self._number is not None:
            self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Keeps a piece of the answer; the parser calls it."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Reports the answer; the parser calls it."""
        number, self._number = self._number, None
        assert number is not None, "an answer without a request; the server broke HTTP"
        if not self._parser.should_keep_alive():
            self.is_open = False
            self._transport.close()
        self._load.answered(self, number, self._parser.get_status_code(), self._began_s, b"".join(self._body))

    def connection_lost(self, error: Exception | None) -> None:
        """Reports the loss, with the request that was open."""
        self.is_open = False
        self._load.lost(self, self._number)

    def close(self) -> None:
        """Closes it."""
        self._transport.close()


def requests_of(port: int, path: str, body: Any, texts: Iterable[str]) -> Sequence[bytes]:
    """The whole requests, one per text, made beforehand as that isn't timed; PLACE gives way to the text."""
    before, after = msgspec.json.encode(body).split(msgspec.json.encode(PLACE))
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    bodies = (before + msgspec.json.encode(text) + after for text in texts)
    return [f"{head}content-length: {len(one)}\r\n\r\n".encode() + one for one in bodies]


def vector_of(body: bytes, answer: Sequence[str | int]) -> list[float]:
    """The vector in an answer, found by following keys and places; base64 of little-endian float32 is unpacked.

    Raises:
        ValueError: no JSON, or no list of numbers there.
        LookupError: no such key or place.
        TypeError: a key where a list stands, or the other way round.
    """
    found = msgspec.json.decode(body)
    for step in answer:
        found = found[step]
    if isinstance(found, str):
        found = np.frombuffer(base64.b64decode(found), "<f4").tolist()
    return msgspec.convert(found, list[float])
