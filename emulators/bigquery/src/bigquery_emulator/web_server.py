"""A web server in a `with` block: a bound port, and uvicorn on it without its signals."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

_SHUTDOWN_S = 5
_MOST_CONNECTIONS = 1_000
_IDLE_S = 620
"""How long a connection stays open between requests, as Google's frontends hold it. A client that
writes on one that was just closed sees a broken pipe.
"""
_log = logging.getLogger(__name__)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet.

    Args:
        port: 0 takes a free one.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without the protocol asyncio leaves Nagle on, and each answer waits 40 ms for an
    # acknowledgment.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


class _Server(uvicorn.Server):
    """Signals belong to the program that runs this server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def answering(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Answer on a socket that listens, until the block ends and open requests are answered.

    Args:
        listener: closed at the end.
    """
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="warning",
        access_log=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    serving.add_done_callback(_tell_failure)
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.wait((serving,), timeout=_SHUTDOWN_S + 1)
        serving.cancel()


def _tell_failure(serving: "asyncio.Task[None]") -> None:
    if not serving.cancelled() and serving.exception() is not None:
        _log.error("the web server ended, this is a bug", exc_info=serving.exception())
