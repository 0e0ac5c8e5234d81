"""Requests that may come again under the same key: one computes, the others get its answer, here or on any instance.

A request with a key is computed on a task of its own: its caller may hang up and come back, which is what the key is
for. Answers that say something about the moment and not about the request (429, 5xx, a deadline) are not kept; they
free the key. Kept ones lie in Redis (api/idempotency/store.py), their bodies in the object store where they are large.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from api import metrics
from api.errors import KeyInUse, KeyReused
from api.idempotency.store import IdempotencyStore
from shared.backoff import backoff
from shared.blob import INLINE_LIMIT_BYTES
from shared.errors import BadInput, PenstockError, Unavailable
from shared.stores.objects import ObjectStore, object_key

log = logging.getLogger(__name__)

KEPT_STATUSES = frozenset({*range(200, 300), 400, 422})
"""What the request alone decided; 401, 404 and 413 depend on keys, catalog and settings, which change."""
FIRST_LOOK_S, LONGEST_LOOK_S = 0.05, 0.25
"""Pauses between two looks at a key that another instance holds."""
MOST_WAITING = 1000
"""Requests that wait for another's answer at the same time."""
RENEWALS_PER_LEASE = 4
CLOSE_LIMIT_S = 1.0


class StoredResponse(msgspec.Struct, omit_defaults=True):
    """An answer as it is kept: `headers` with the content type, `body` or its key in the object store."""

    status: int
    headers: dict[str, str]
    body_bytes: int
    body: bytes = b""
    object_key: str = ""
    model: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the same request would be answered like this at any other time."""
        return self.status in KEPT_STATUSES


Compute = Callable[[], Coroutine[Any, Any, StoredResponse]]


class IdempotentRequest(NamedTuple):
    """A request with an Idempotency-Key.

    `name`: of its tenant and key. `tenant`: who asks, in whose share of the store the answer is kept. `fingerprint`: of
    route and body.
    """

    name: str
    tenant: str
    fingerprint: str


@dataclass(slots=True)
class _Running:
    """A key whose answer this instance computes."""

    fingerprint: str
    claim: str
    task: asyncio.Task[StoredResponse]


class IdempotencyService:
    """Answers requests with a key; an async context manager that owns what is computed for them.

    Args:
        store: where claims and answers are kept; open for longer than this.
        objects: takes large bodies.
    """

    def __init__(self, store: IdempotencyStore, objects: ObjectStore) -> None:
        self._store = store
        self._objects = objects
        self._running: dict[str, _Running] = {}
        self.waiting = 0
        """Requests that wait for another's answer now."""

    async def __aenter__(self) -> Self:
        self._renewing = asyncio.create_task(self._renew())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [self._renewing, *(running.task for running in self._running.values())]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=CLOSE_LIMIT_S)

    async def run(self, request: IdempotentRequest, compute: Compute, wait_s: float) -> tuple[StoredResponse, bool]:
        """The answer to a request with a key, and whether it is a repeated one.

        Canceling the call leaves what is computed going on.

        Args:
            request: what was asked under which key.
            compute: computes the answer; called at most once, and not at all where there is one.
            wait_s: how long to wait for another that computes it; what this call computes itself has its own deadline.

        Raises:
            KeyReused: the key stands for another request.
            KeyInUse: another still computes the answer when `wait_s` is over, or too many wait already.
            Unavailable: Redis is out of reach, or the kept answer can't be read.
        """
        ends_s, pauses = _now_s() + wait_s, backoff(FIRST_LOOK_S, LONGEST_LOOK_S)
        while True:
            running = self._running.get(request.name)
            if running is None:
                claim = secrets.token_hex(12)
                found = await self._store.claim(request.name, request.fingerprint, claim)
                if found.state == "ours":
                    return await self._lead(request, claim, compute)
                if found.state == "answered":
                    return await self._kept(found.answer), True
                if found.state == "differs":
                    raise KeyReused
                running = self._running.get(request.name)
            elif running.fingerprint != request.fingerprint:
                raise KeyReused
            if (left_s := ends_s - _now_s()) <= 0:
                raise KeyInUse
            if (answered := await self._wait(running, left_s, next(pauses))) is not None:
                return answered, True

    async def _lead(self, request: IdempotentRequest, claim: str, compute: Compute) -> tuple[StoredResponse, bool]:
        task = asyncio.create_task(self._compute(request, claim, compute))
        self._running[request.name] = _Running(request.fingerprint, claim, task)
        task.add_done_callback(lambda task: self._ended(request.name, task))
        metrics.KEYED.labels("computed").inc()
        await asyncio.wait([task])
        if task.cancelled():
            raise Unavailable("this instance is shutting down")
        return task.result(), False

    async def _wait(self, running: _Running | None, left_s: float, pause_s: float) -> StoredResponse | None:
        """Waits for an answer that is computed here, or a while for one that is computed elsewhere."""
        if self.waiting >= MOST_WAITING:
            raise KeyInUse
        self.waiting += 1
        try:
            if running is None:
                await asyncio.sleep(min(pause_s, left_s))
                return None
            await asyncio.wait([running.task], timeout=left_s)
        finally:
            self.waiting -= 1
        if not running.task.done() or running.task.cancelled() or running.task.exception() is not None:
            return None
        answered = running.task.result()
        if not answered.is_final:
            return None
        metrics.KEYED.labels("joined").inc()
        return answered

    async def _compute(self, request: IdempotentRequest, claim: str, compute: Compute) -> StoredResponse:
        """Computes, and keeps the answer or frees the key."""
        is_kept = False
        try:
            answered = await compute()
            if answered.is_final:
                answered = await self._keep(request, claim, answered)
                is_kept = True
            return answered
        finally:
            if not is_kept:
                await self._free(request.name, claim)

    async def _keep(self, request: IdempotentRequest, claim: str, answered: StoredResponse) -> StoredResponse:
        """The answer that counts; what can't be kept is answered all the same, since the work is done."""
        try:
            encoded = _encoder.encode(await self._light(answered))
            kept = await self._store.settle(request.name, request.tenant, request.fingerprint, claim, encoded)
            return answered if not kept else await self._whole(_decoder.decode(kept), answered)
        except Unavailable as error:
            metrics.KEYED.labels("not_kept").inc()
            log.warning("answer was not kept", extra={"reason": error.message})
            return answered

    async def _free(self, name: str, claim: str) -> None:
        try:
            await self._store.free(name, claim)
        except Unavailable as error:
            log.warning("key was not freed; its lease runs out", extra={"reason": error.message})

    def _ended(self, name: str, task: asyncio.Task[StoredResponse]) -> None:
        del self._running[name]
        # Looked at here because a caller who hung up no longer does.
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("request with a key failed unexpectedly", exc_info=error)

    async def _light(self, answered: StoredResponse) -> StoredResponse:
        """The answer as it goes into Redis: a large body lies in the object store."""
        if answered.body_bytes <= INLINE_LIMIT_BYTES:
            return answered
        media_type = answered.headers.get("content-type", "")
        key = object_key("answers", answered.body, media_type)
        await self._objects.put(key, answered.body, media_type)
        return msgspec.structs.replace(answered, body=b"", object_key=key)

    async def _kept(self, encoded: bytes) -> StoredResponse:
        metrics.KEYED.labels("repeated").inc()
        return await self._whole(_decoder.decode(encoded))

    async def _whole(self, kept: StoredResponse, ours: StoredResponse | None = None) -> StoredResponse:
        """With its body, which need not be fetched where it is ours."""
        if not kept.object_key:
            return kept
        if (
            ours is not None
            and object_key("answers", ours.body, ours.headers.get("content-type", "")) == kept.object_key
        ):
            return ours
        try:
            body = await self._objects.get(kept.object_key, kept.body_bytes)
        except BadInput as error:
            raise Unavailable("the answer kept for this Idempotency-Key is no longer there") from error
        return msgspec.structs.replace(kept, body=body)

    async def _renew(self) -> None:
        """Renews the leases of all that is computed here, with one call, until canceled."""
        while True:
            await asyncio.sleep(self._store.lease_s / RENEWALS_PER_LEASE)
            if claims := [running.claim for running in self._running.values()]:
                try:
                    await self._store.renew(claims)
                except PenstockError as error:
                    log.warning("leases of keys were not renewed", extra={"reason": error.message})


def _now_s() -> float:
    return asyncio.get_running_loop().time()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StoredResponse)
