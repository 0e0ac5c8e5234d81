"""Runs the embedded Pub/Sub on a port, with timers driven by the event loop's clock."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import grpc

from pubsub_emulator.calls.broker import DEFAULT_STORAGE_BYTES, Broker
from pubsub_emulator.delivery_loops import delivery_loops
from pubsub_emulator.errors import ServerUnavailable
from pubsub_emulator.protocols.grpc_handlers import service_handlers
from pubsub_emulator.state.timers import Timers
from pubsub_emulator.storage.data_dir import durable_broker

_STOP_GRACE_S = 1.0
_REST_BACKLOG = 1024
_CHANNEL_OPTIONS = (
    # A second server on the same port must fail to start rather than share connections.
    ("grpc.so_reuseport", 0),
    # Larger than any valid call, so that calls that are only slightly too large are rejected with a
    # reason. Even larger calls are rejected before they are read.
    ("grpc.max_receive_message_length", 16 * 1024**2),
    ("grpc.max_send_message_length", -1),
    # Beyond this limit, further calls on the connection wait silently. The service allows about
    # 100, which is too few for the streams of a single process.
    ("grpc.max_concurrent_streams", 1000),
    # Google's clients ping every 30 s, even on idle channels; by default, gRPC would disconnect
    # them.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


@dataclass(frozen=True)
class PubsubServer:
    """A listening server. `broker` is its state, for inspection within the same process."""

    host: str
    port: int
    broker: Broker
    rest_port: int | None = None

    @property
    def endpoint(self) -> str:
        """`host:port`, in the format of `PUBSUB_EMULATOR_HOST`."""
        return f"{self.host}:{self.port}"

    @property
    def rest_endpoint(self) -> str | None:
        """The REST server's URL, or None."""
        return None if self.rest_port is None else f"http://{self.host}:{self.rest_port}"


@asynccontextmanager
async def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    rest_port: int | None = None,
    socket_path: Path | None = None,
    storage_bytes: int = DEFAULT_STORAGE_BYTES,
    data_dir: Path | None = None,
    fsync: bool = False,
    bigquery_endpoint: str = "",
) -> AsyncIterator[PubsubServer]:
    """Listen until the block ends. Any streams still open at that point end with UNAVAILABLE.

    Args:
        port: gRPC port; 0 picks any free port.
        rest_port: REST port; 0 picks any free port. None: no REST.
        socket_path: an additional Unix socket to listen on. It saves 0.1 ms per local call.
        storage_bytes: maximum memory for messages. Publishes that exceed it are rejected.
        data_dir: directory that stores the state across restarts. None keeps it in memory.
        fsync: True if the state must survive power failures, not just a crash of the process.
        bigquery_endpoint: URL of a BigQuery server that requires no credentials, to which BigQuery
            subscriptions write. Empty: such subscriptions are rejected.

    Yields:
        The server with its actual ports.

    Raises:
        OSError: a port or the socket is in use, the address does not belong to this machine, or the
            directory can't be used.
    """
    async with (
        _open_broker(data_dir, storage_bytes, bigquery_endpoint, fsync=fsync) as broker,
        # Outside the gRPC block, because exiting that block also ends the pulls that wait here.
        _answering_rest(broker, host, rest_port) as bound_rest_port,
        _listening(broker, host, port, socket_path) as bound_port,
    ):
        yield PubsubServer(host, bound_port, broker, bound_rest_port)


def _open_broker(
    data_dir: Path | None, storage_bytes: int, bigquery_endpoint: str, *, fsync: bool
) -> AbstractAsyncContextManager[Broker]:
    clock = _steady_clock()
    if data_dir is None:
        return nullcontext(Broker(clock, storage_bytes, bigquery_endpoint=bigquery_endpoint))
    return durable_broker(data_dir, clock, storage_bytes, bigquery_endpoint, fsync=fsync)


@asynccontextmanager
async def _answering_rest(broker: Broker, host: str, port: int | None) -> AsyncIterator[int | None]:
    if port is None:
        yield None
        return
    # Callers that don't use REST shouldn't have to wait for its imports.
    from pubsub_emulator.protocols.rest_app import rest_app
    from pubsub_emulator.web_server import answering, bound

    try:
        listener = bound(host, port)
    except OSError as error:
        raise OSError(f"Pub/Sub can't listen on {host}:{port}: {error}") from error
    with listener:
        listener.listen(_REST_BACKLOG)
        async with answering(rest_app(broker), listener):
            yield listener.getsockname()[1]


@asynccontextmanager
async def _listening(
    broker: Broker, host: str, port: int, socket_path: Path | None
) -> AsyncIterator[int]:
    server = grpc.aio.server(options=_CHANNEL_OPTIONS)
    server.add_generic_rpc_handlers(tuple(service_handlers(broker)))
    bound_port = _listen(server, f"{host}:{port}")
    if socket_path is not None:
        _listen(server, f"unix:{socket_path}")
    alarm = _Alarm(broker.timers, asyncio.get_running_loop())
    async with delivery_loops(broker):
        await server.start()
        try:
            yield bound_port
        finally:
            for subscription in broker.registry.subscriptions.values():
                subscription.backlog.consumers.end(
                    ServerUnavailable("The server is shutting down.")
                )
            await server.stop(_STOP_GRACE_S)
            alarm.close()


def _listen(server: grpc.aio.Server, address: str) -> int:
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"Pub/Sub can't listen on {address}: {error}") from error


class _Alarm:
    """Runs due timers with a single pending loop call, which is rescheduled for earlier timers."""

    def __init__(self, timers: Timers, loop: asyncio.AbstractEventLoop) -> None:
        self._timers = timers
        self._loop = loop
        self._pending: asyncio.TimerHandle | None = None
        timers.on_earlier = self._set
        self._set()

    def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()

    def _set(self) -> None:
        self.close()
        due_s = self._timers.next_due_s
        if due_s is not None:
            self._pending = self._loop.call_later(
                max(0.0, due_s - self._timers.now_s()), self._ring
            )

    def _ring(self) -> None:
        try:
            self._timers.run_due()
        finally:
            # One failing action must not prevent the others from running.
            self._set()


def _steady_clock() -> Callable[[], float]:
    # Wall-clock time, because messages contain it and seeks refer to it; unlike the wall clock, it
    # never goes backward.
    ahead_s = time.time() - time.monotonic()
    return lambda: ahead_s + time.monotonic()
