"""Pub/Sub channels, raw protobuf classes, retries, ack batches, and errors.

The proto-plus wrappers cost about 0.1 ms per message, so only the underlying classes are used. The
full names of topics and subscriptions are built here as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import quote

import google.auth
import grpc
from google.auth.exceptions import DefaultCredentialsError
from google.auth.transport.grpc import AuthMetadataPlugin
from google.auth.transport.requests import Request
from google.pubsub_v1.types import pubsub
from grpc import StatusCode, aio

from shared.broker.transport import SmoothedDuration
from shared.errors import BadInput, ConfigurationError, Overloaded, PenstockError, Unavailable
from shared.process.concurrency import add_jitter, backoff

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    # These classes are created at run time, so type checkers know only their names.
    RawMessage: TypeAlias = Any
else:
    RawMessage = Any

PubsubMessage = pubsub.PubsubMessage.pb()
PublishRequest = pubsub.PublishRequest.pb()
StreamingPullRequest = pubsub.StreamingPullRequest.pb()
StreamingPullResponse = pubsub.StreamingPullResponse.pb()
AcknowledgeRequest = pubsub.AcknowledgeRequest.pb()
ModifyAckDeadlineRequest = pubsub.ModifyAckDeadlineRequest.pb()

GOOGLE_ENDPOINT = "pubsub.googleapis.com:443"
SCOPES = ("https://www.googleapis.com/auth/pubsub",)
MESSAGE_LIMIT_BYTES = 10_000_000
"""Maximum message size: https://docs.cloud.google.com/pubsub/quotas#resource_limits"""

TRANSIENT = frozenset(
    {
        StatusCode.UNAVAILABLE,
        StatusCode.INTERNAL,
        StatusCode.ABORTED,
        StatusCode.RESOURCE_EXHAUSTED,
        StatusCode.DEADLINE_EXCEEDED,
        StatusCode.CANCELLED,
        StatusCode.UNKNOWN,
    }
)
REFUSED_INPUT = frozenset(
    {StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND, StatusCode.OUT_OF_RANGE}
)
REFUSED_CALLER = frozenset(
    {StatusCode.PERMISSION_DENIED, StatusCode.UNAUTHENTICATED, StatusCode.UNIMPLEMENTED}
)

_MIN_ATTEMPT_S, _MAX_ATTEMPT_S = 0.05, 5.0
"""Time limits for one attempt. Even the longer limit is short enough to abandon a dead connection
in time.
"""

REQUEST_LIMIT_IDS = 1000
REQUEST_LIMIT_BYTES = 500_000
"""Less than the 512 KiB limit for a request with ack IDs:
https://docs.cloud.google.com/pubsub/quotas#resource_limits
"""
QUEUE_LIMIT_IDS = 50_000
REQUESTS_IN_FLIGHT = 4
"""With only one request in flight, acks to a distant broker would wait a full round trip for
earlier acks.
"""
RETRY_S = 10.0
"""How long to retry a batch of acks.

After that, its messages are redelivered (at-least-once delivery).
"""


def topic_path(project: str, topic_id: str) -> str:
    """Returns `projects/<project>/topics/<topic_id>`."""
    return f"projects/{project}/topics/{topic_id}"


def subscription_path(project: str, subscription_id: str) -> str:
    """Returns `projects/<project>/subscriptions/<subscription_id>`."""
    return f"projects/{project}/subscriptions/{subscription_id}"


@dataclass(frozen=True, slots=True)
class CallTarget:
    """The target for gRPC calls, and whether they use TLS and credentials."""

    target: str
    is_secure: bool


def parse_endpoint(endpoint: str) -> CallTarget:
    """Parses an endpoint setting.

    Empty means Google's global endpoint. `*.googleapis.com` (including regional endpoints) and
    `https://HOST:PORT` use TLS with the machine's credentials. Any other `HOST:PORT` is
    unencrypted, for emulators. `unix:///PATH` is the socket of a server on this machine.

    Raises:
        ConfigurationError: the endpoint has no host or path.
    """
    if endpoint.startswith("unix:///"):
        return CallTarget(f"unix:{endpoint.removeprefix('unix://')}", False)
    scheme, _, rest = endpoint.rpartition("://")
    target = rest.rstrip("/") if endpoint else GOOGLE_ENDPOINT
    host, _, port = (
        target.rpartition(":") if target.rpartition(":")[2].isdigit() else (target, "", "")
    )
    if not host or "/" in host or scheme not in ("", "http", "https"):
        raise ConfigurationError(
            f"Pub/Sub endpoint must be HOST:PORT, got {endpoint!r}", field="pubsub_endpoint"
        )
    is_secure = scheme == "https" or (scheme == "" and host.endswith(".googleapis.com"))
    return CallTarget(target if port else f"{host}:443", is_secure)


class Channels:
    """Opens channels to one endpoint, each with a separate connection, and closes them all.

    Connections are not shared, because each carries about 100 streams and any additional streams
    have to wait, as in https://github.com/googleapis/nodejs-pubsub/issues/550. Open streaming pulls
    on the same connection would delay publishes and acks.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = parse_endpoint(endpoint)
        self._credentials: grpc.ChannelCredentials | None = None
        self._open: list[aio.Channel] = []

    async def load_credentials(self) -> None:
        """Loads the machine's credentials if the endpoint needs them.

        Raises:
            ConfigurationError: the machine has no credentials.
        """
        if not self._endpoint.is_secure:
            return
        host = self._endpoint.target.rpartition(":")[0]
        try:
            # This reads files and may call the metadata server, so it must not run on the event
            # loop.
            credentials, _ = await asyncio.to_thread(google.auth.default, default_scopes=SCOPES)
        except DefaultCredentialsError as error:
            raise ConfigurationError(
                f"no Google credentials found for {host}: {error}", field="credentials"
            ) from error
        plugin = AuthMetadataPlugin(credentials, Request(), default_host=host)
        self._credentials = grpc.composite_channel_credentials(
            grpc.ssl_channel_credentials(), grpc.metadata_call_credentials(plugin)
        )

    def open(self) -> aio.Channel:
        """Returns a new channel, which connects on its first call."""
        options = _channel_options(self._endpoint.is_secure)
        if self._credentials is not None:
            channel = aio.secure_channel(self._endpoint.target, self._credentials, options)
        else:
            channel = aio.insecure_channel(self._endpoint.target, options)
        self._open.append(channel)
        return channel

    async def close(self) -> None:
        while self._open:
            await self._open.pop().close(None)


def _channel_options(is_secure: bool) -> list[tuple[str, int]]:
    # A plain gRPC server disconnects clients that ping an idle connection more often than once
    # every 5 minutes. Google's front end allows pings every 30 s, which are needed for an idle pull
    # behind a NAT.
    keepalive_ms = 30_000 if is_secure else 310_000
    return [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.enable_retries", 0),  # Method and PublishQueue retry instead
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


class Method:
    """A unary method of `google.pubsub.v1` on one channel.

    Args:
        path: `<Service>/<Method>`, for example `Publisher/Publish`.
        response: the raw response class, or None for `google.protobuf.Empty`.
        routed_by: the request field that Google's front end routes by (`x-goog-request-params`).
    """

    def __init__(self, channel: aio.Channel, path: str, response: Any, routed_by: str) -> None:
        decode = response.FromString if response is not None else bytes
        self._call: Any = channel.unary_unary(f"/google.pubsub.v1.{path}", _serialize, decode)
        self._routed_by = routed_by

    async def once(self, request: RawMessage, timeout_s: float) -> Any:
        """Makes one attempt.

        Raises:
            aio.AioRpcError: the attempt failed.
        """
        metadata = routing(self._routed_by, getattr(request, self._routed_by))
        return await self._call(request, timeout=timeout_s, metadata=metadata)

    async def until(self, request: RawMessage, end_s: float) -> Any:
        """Retries until an attempt succeeds, with jittered pauses after transient failures.

        Args:
            end_s: event loop time after which no new attempt is started.

        Raises:
            aio.AioRpcError: the error from the last attempt.
        """
        loop = asyncio.get_running_loop()
        pauses = backoff()
        while True:
            left_s = max(_MIN_ATTEMPT_S, end_s - loop.time())
            try:
                return await self.once(request, min(left_s, _MAX_ATTEMPT_S))
            except aio.AioRpcError as error:
                pause_s = next(pauses)
                if error.code() not in TRANSIENT or loop.time() + pause_s >= end_s:
                    raise
            await asyncio.sleep(pause_s)


@lru_cache(maxsize=1024)
def routing(name: str, value: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata that Google's front end uses to route a call (google.aip.dev/4222)."""
    return (("x-goog-request-params", f"{name}={quote(value, safe='')}"),)


def translate(error: aio.AioRpcError, action: str) -> PenstockError:
    """Translates a failed call into a PenstockError. The message begins with `action`."""
    code, message = error.code(), f"{action}: {error.code().name}: {error.details()}"
    if code in REFUSED_INPUT:
        return BadInput(message, public="the message was rejected")
    if code is StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(message, public="the broker is overloaded; try again")
    if code in REFUSED_CALLER:
        return ConfigurationError(message, field="credentials")
    return Unavailable(message)


def _serialize(message: RawMessage) -> bytes:
    data: bytes = message.SerializeToString()
    return data


class AckQueue:
    """Sends one subscription's acks and nacks in the background.

    The first ack is sent immediately. Acks queued while it is in flight are then sent together.
    With a positive `linger_s`, a non-urgent ack waits for that long, or until `linger_messages`
    acks are queued, and up to REQUESTS_IN_FLIGHT requests may be in flight.
    """

    def __init__(
        self,
        path: str,
        acknowledge: Method,
        modify: Method,
        *,
        linger_s: float = 0.0,
        linger_messages: int = 100,
    ) -> None:
        self._path = path
        self._acknowledge = acknowledge
        self._modify = modify
        self._linger_s = linger_s
        self._linger_messages = linger_messages
        self._acks: deque[str] = deque()
        self._nacks: deque[str] = deque()
        # There can be many lingering acks, and later messages are held up until the broker has
        # received those acks.
        self._requests_in_flight = REQUESTS_IN_FLIGHT if linger_s else 1
        self._send_tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.failed = 0
        """Number of acks and nacks that could not be sent. Their messages are redelivered."""
        self.round_trip = SmoothedDuration()
        """The broker's response time."""

    def __len__(self) -> int:
        return len(self._acks) + len(self._nacks)

    def ack(self, ack_id: str) -> None:
        if self._is_closed or len(self._acks) >= QUEUE_LIMIT_IDS:
            self.failed += 1
            return
        self._acks.append(ack_id)
        if self._linger_s == 0 or len(self._acks) >= self._linger_messages:
            self._start()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(
                add_jitter(self._linger_s), self._start
            )

    def nack(self, ack_id: str) -> None:
        """Queues a nack, which does not linger."""
        self._nacks.append(ack_id)
        self._start()

    async def flush(self, timeout_s: float) -> None:
        """Sends everything queued and waits up to `timeout_s` for it to finish."""
        self._start()
        if self._send_tasks:
            await asyncio.wait(self._send_tasks, timeout=timeout_s)

    async def close(self) -> None:
        """Cancels the requests in flight.

        Messages whose acks were not sent are redelivered elsewhere.
        """
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._send_tasks:
            task.cancel()
        await asyncio.gather(*self._send_tasks, return_exceptions=True)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if len(self._send_tasks) < self._requests_in_flight and len(self):
            self._send_tasks.add(asyncio.create_task(self._send()))

    async def _send(self) -> None:
        try:
            # Sent one iteration later, so that acks queued in the same event loop iteration share a
            # request.
            await asyncio.sleep(0)
            while self._acks or self._nacks:
                await self._send_some()
        finally:
            # This runs in the same iteration as the last check of the queues. Otherwise, an ack
            # queued in between would never be sent.
            self._send_tasks.discard(cast(asyncio.Task[None], asyncio.current_task()))

    async def _send_some(self) -> None:
        if self._nacks:
            ids = take_ids(self._nacks)
            request = ModifyAckDeadlineRequest(
                subscription=self._path, ack_ids=ids, ack_deadline_seconds=0
            )
            await self._call(self._modify, request, len(ids))
        if self._acks:
            ids = take_ids(self._acks)
            await self._call(
                self._acknowledge,
                AcknowledgeRequest(subscription=self._path, ack_ids=ids),
                len(ids),
            )

    async def _call(self, method: Method, request: RawMessage, messages: int) -> None:
        began_s = asyncio.get_running_loop().time()
        try:
            await method.until(request, began_s + RETRY_S)
            self.round_trip.record(asyncio.get_running_loop().time() - began_s)
        except aio.AioRpcError as error:
            self.failed += messages
            log.warning(
                "acks lost",
                extra={"subscription": self._path, "acks": messages, "code": error.code().name},
            )


def take_ids(ids: deque[str]) -> list[str]:
    """Takes as many IDs from the queue as fit in one request."""
    batch: list[str] = []
    size_bytes = 0
    while ids and len(batch) < REQUEST_LIMIT_IDS:
        size_bytes += len(ids[0]) + 4
        if batch and size_bytes > REQUEST_LIMIT_BYTES:
            break
        batch.append(ids.popleft())
    return batch
