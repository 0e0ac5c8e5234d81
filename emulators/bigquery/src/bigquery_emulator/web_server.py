"""A web server in a `with` block: binds a port and runs uvicorn without its signal handlers."""

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
"""How long an idle connection stays open between requests, as on Google's front ends.

A client that writes to a connection that has just been closed gets a broken pipe error.
"""
_log = logging.getLogger(__name__)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound but not listening yet.

    Args:
        port: 0 selects a free port.

    Raises:
        OSError: the port is in use, or the address does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without an explicit protocol, asyncio leaves Nagle's algorithm on, and each response waits 40
    # ms for an acknowledgment.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


class _Server(uvicorn.Server):
    """Leaves signal handling to the program that runs this server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def answering(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Serve on a listening socket until the block ends and open requests have completed."""
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
