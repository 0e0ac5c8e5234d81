"""Runs idempotent requests: one computes the response, and others with the same key get a replay.

This works across instances. A request with a key runs in a separate task, because its caller may
hang up and come back. Temporary responses (a 429 or 5xx, a missed deadline, an earlier response
that is still being generated, or a key that another request has used) are not stored, and the key
is released. Responses are stored in Redis (api/idempotency/store.py), and large bodies in the
object store. api/http/idempotency.py calls this service.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import msgspec

from api import metrics
from api.errors import KeyInUse, KeyReused
from api.fair_room import FairRoom, OneItem
from api.idempotency.store import IdempotencyStore
from shared.errors import BadInput, PenstockError, Unavailable
from shared.models.blob import INLINE_LIMIT_BYTES
from shared.process.concurrency import backoff
from shared.stores.objects import ObjectStore, object_key

log = logging.getLogger(__name__)

STORED_STATUSES = frozenset({*range(200, 300), 400, 422})
"""Statuses that depend only on the request. 401, 404, and 413 also depend on API keys, the catalog,
and settings.
"""
FIRST_POLL_S, MAX_POLL_S = 0.05, 0.25
"""Pauses between reads of a key that another instance has claimed."""
MAX_WAITING = 1000
"""Maximum number of requests that may be waiting for other requests at once, shared among tenants.
"""
RENEWALS_PER_LEASE = 4
CLOSE_LIMIT_S = 1.0

_encoder = msgspec.msgpack.Encoder()


class StoredResponse(msgspec.Struct, omit_defaults=True):
    """A stored response.

    `headers` includes the content type. Either `body` or its object key is set.
    """

    status: int
    headers: dict[str, str]
    body_bytes: int
    body: bytes = b""
    object_key: str = ""
    model: str = ""
    is_of_the_moment: bool = False
    """True if the response depends on more than the request, regardless of its status."""

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "")

    @property
    def is_final(self) -> bool:
        """Returns whether the same request would always get the same response."""
        return self.status in STORED_STATUSES and not self.is_of_the_moment


Compute = Callable[[], Coroutine[Any, Any, StoredResponse]]


class IdempotentRequest(NamedTuple):
    """A request with an Idempotency-Key.

    `name`: digest of the tenant and key. `tenant`: the tenant whose share of the store is used.
    `fingerprint`: digest of the route and body.
    """

    name: str
    tenant: str
    fingerprint: str


@dataclass(slots=True)
class _Running:
    """A request that this instance is computing."""

    fingerprint: str
    claim_id: str
    task: asyncio.Task[StoredResponse]


class IdempotencyService:
    """Runs requests with a key. An async context manager that owns their tasks.

    Args:
        store: claims and responses. It must outlive this service.
    """

    def __init__(self, store: IdempotencyStore, objects: ObjectStore) -> None:
        self._store = store
        self._objects = objects
        self._running: dict[str, _Running] = {}
        self._any_running = asyncio.Event()
        self._room = FairRoom(MAX_WAITING)

    @property
    def waiting(self) -> int:
        """Number of requests that are waiting for other requests."""
        return self._room.total

    async def __aenter__(self) -> Self:
        self._renewing = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = [self._renewing, *(running.task for running in self._running.values())]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=CLOSE_LIMIT_S)

    async def run(
        self, request: IdempotentRequest, compute: Compute, wait_s: float
    ) -> tuple[StoredResponse, bool]:
        """Returns the response to a request with a key, and whether it is a replay.

        Canceling the call does not cancel `compute`.

        Args:
            compute: computes the response. Called at most once, and only if no response is stored.
            wait_s: maximum seconds to wait for another request that is computing the response.

        Raises:
            KeyReused: the key was used with a different request.
            KeyInUse: the other request has not finished after `wait_s`, or too many of the tenant's
                requests are waiting.
            Unavailable: Redis is unreachable, or the stored response can't be read.
        """
        ends_s, pauses = _now_s() + wait_s, backoff(FIRST_POLL_S, MAX_POLL_S)
        while True:
            running = self._running.get(request.name)
            if running is None:
                claim_id = secrets.token_hex(12)
                claim = await self._store.claim(request.name, request.fingerprint, claim_id)
                if claim.state == "acquired":
                    return await self._start(request, claim_id, compute)
                if claim.state == "completed":
                    return await self._replay(claim.response), True
                if claim.state == "mismatch":
                    raise KeyReused
                running = self._running.get(request.name)
            elif running.fingerprint != request.fingerprint:
                raise KeyReused
            if (left_s := ends_s - _now_s()) <= 0:
                raise KeyInUse
            waiting = self._wait(request.tenant, running, left_s, next(pauses))
            if (response := await waiting) is not None:
                return response, True

    async def _start(
        self, request: IdempotentRequest, claim_id: str, compute: Compute
    ) -> tuple[StoredResponse, bool]:
        task = asyncio.create_task(self._compute(request, claim_id, compute))
        self._running[request.name] = _Running(request.fingerprint, claim_id, task)
        self._any_running.set()
        task.add_done_callback(lambda task: self._on_done(request.name, task))
        metrics.IDEMPOTENT_REQUESTS.labels("computed").inc()
        await asyncio.wait([task])
        if task.cancelled():
            raise Unavailable(public="this instance is shutting down")
        return task.result(), False

    async def _wait(
        self, tenant: str, running: _Running | None, left_s: float, pause_s: float
    ) -> StoredResponse | None:
        """Waits for a response computed here, or pauses if another instance is computing it."""
        place = OneItem(tenant)
        if self._room.turns_to_wait(place):
            raise KeyInUse
        self._room.take(place)
        try:
            if running is None:
                await asyncio.sleep(min(pause_s, left_s))
                return None
            await asyncio.wait([running.task], timeout=left_s)
        finally:
            self._room.release(place)
        if (
            not running.task.done()
            or running.task.cancelled()
            or running.task.exception() is not None
        ):
            return None
        response = running.task.result()
        if not response.is_final:
            return None
        metrics.IDEMPOTENT_REQUESTS.labels("joined").inc()
        return response

    async def _compute(
        self, request: IdempotentRequest, claim_id: str, compute: Compute
    ) -> StoredResponse:
        """Computes the response, then stores it or releases the key."""
        is_stored = False
        try:
            response = await compute()
            if response.is_final:
                response = await self._complete(request, claim_id, response)
                is_stored = True
            return response
        finally:
            if not is_stored:
                await self._release(request.name, claim_id)

    async def _complete(
        self, request: IdempotentRequest, claim_id: str, response: StoredResponse
    ) -> StoredResponse:
        """Stores the response, unless one is already stored, and returns the stored one.

        If Redis is unreachable, returns the response without storing it.
        """
        try:
            encoded = _encoder.encode(await self._without_large_body(response))
            stored = await self._store.complete(
                request.name, request.tenant, request.fingerprint, claim_id, encoded
            )
            return (
                response if not stored else await self._with_body(_decoder.decode(stored), response)
            )
        except Unavailable as error:
            metrics.IDEMPOTENT_REQUESTS.labels("not_kept").inc()
            log.warning("response was not stored", extra={"reason": error.message})
            return response

    async def _release(self, name: str, claim_id: str) -> None:
        try:
            await self._store.release(name, claim_id)
        except Unavailable as error:
            log.warning("claim was not released and will expire", extra={"reason": error.message})

    def _on_done(self, name: str, task: asyncio.Task[StoredResponse]) -> None:
        del self._running[name]
        # Checked here because the caller may have hung up.
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("request with an idempotency key failed unexpectedly", exc_info=error)

    async def _replay(self, encoded: bytes) -> StoredResponse:
        metrics.IDEMPOTENT_REQUESTS.labels("repeated").inc()
        return await self._with_body(_decoder.decode(encoded))

    async def _without_large_body(self, response: StoredResponse) -> StoredResponse:
        """Returns the response in the form stored in Redis.

        A large body goes to the object store.
        """
        if response.body_bytes <= INLINE_LIMIT_BYTES:
            return response
        key = _body_key(response)
        await self._objects.put(key, response.body, response.media_type)
        return msgspec.structs.replace(response, body=b"", object_key=key)

    async def _with_body(
        self, stored: StoredResponse, own: StoredResponse | None = None
    ) -> StoredResponse:
        """Returns the stored response with its body, which is not fetched if `own` has it."""
        if not stored.object_key:
            return stored
        if own is not None and _body_key(own) == stored.object_key:
            return own
        try:
            body = await self._objects.get(stored.object_key, stored.body_bytes)
        except BadInput as error:
            raise Unavailable(
                public="the response stored for this Idempotency-Key no longer exists"
            ) from error
        return msgspec.structs.replace(stored, body=body)

    async def _renew(self) -> None:
        """Renews the leases on all of this instance's claims, one call at a time, until canceled.

        No timer runs while there are no claims.
        """
        while True:
            if not self._running:
                self._any_running.clear()
                await self._any_running.wait()
            await asyncio.sleep(self._store.lease_s / RENEWALS_PER_LEASE)
            if claims := [running.claim_id for running in self._running.values()]:
                try:
                    await self._store.renew(claims)
                except PenstockError as error:
                    log.warning("claim leases were not renewed", extra={"reason": error.message})


def _body_key(response: StoredResponse) -> str:
    return object_key("answers", response.body, response.media_type)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


_decoder = msgspec.msgpack.Decoder(StoredResponse)
