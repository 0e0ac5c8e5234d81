"""Chooses the model revision for each request, and rolls back canaries.

A revision withdrawn by an operator receives no requests (shared/stores/withdrawals.py).

Every instance reads the canary state from Redis (shared/canary/store.py) once a second. Each
second, one instance evaluates the canaries, and the others follow its decision. While Redis is
unreachable, canaries receive no requests, because they can't be evaluated.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from typing import Protocol, Self

import msgspec

from api import metrics
from api.dispatch.request import InferenceRequest
from shared.canary.store import CanaryState
from shared.canary.verdict import CanaryCounts, judge
from shared.errors import Unavailable
from shared.models.catalog import Catalog, Model, Revision
from shared.process.concurrency import BackgroundTask, sleep_until_turn
from shared.stores.withdrawals import LiveWithdrawals, no_withdrawals

REFRESH_S = 1.0
READ_LIMIT_S = 2.0
STALE_LIMIT_S = 4.0
"""State older than STALE_LIMIT_S is treated as unknown."""
_WHOLE = 1 << 64

log = logging.getLogger(__name__)


class Counters(Protocol):
    """Canary state. Implemented by shared/canary/store.py."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def state(self, canary: Revision) -> CanaryState:
        """Returns whether the canary receives requests."""

    async def may_judge(self, canary: Revision) -> bool:
        """Returns whether this process should evaluate the canary now."""

    async def counts(self, canary: Revision) -> CanaryCounts:
        """Returns the recent counts for both revisions."""

    async def count(self, canary: Revision, counts: CanaryCounts) -> None:
        """Adds to the recent counts for both revisions."""

    async def take_back(self, canary: Revision, reason: str) -> bool:
        """Rolls the canary back. Returns whether the canary was still active."""


class CanaryRouter:
    """Sends a share of requests to canaries. An async context manager that runs the refresh task.

    Args:
        canary_store: state in Redis. Opened and closed by this object.
        clock: monotonic seconds.
        withdrawals: already open. None means nothing is ever withdrawn.
    """

    def __init__(
        self,
        catalog: Catalog,
        canary_store: Counters,
        *,
        clock: Callable[[], float] = time.monotonic,
        withdrawals: LiveWithdrawals | None = None,
    ) -> None:
        self._clock = clock
        self._catalog = catalog
        self._canaries = catalog.canaries
        self.withdrawals = withdrawals or no_withdrawals()
        self.canary_store = canary_store
        self._serving_until_s: dict[str, float] = {}
        self._refreshing = BackgroundTask("looking at canaries", self._run)

    async def __aenter__(self) -> Self:
        if self._canaries:
            await self.canary_store.__aenter__()
            await self.refresh()
            self._refreshing.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._canaries:
            await self._refreshing.stop()
            await self.canary_store.__aexit__(*exc)

    def route(self, request: InferenceRequest) -> InferenceRequest:
        """Returns the request routed to its model's canary or to the model itself.

        Raises:
            ModelWithdrawn: the revision that would serve the request is withdrawn.
        """
        return self.to_revision(request, self._choose(request))

    def to_revision(self, request: InferenceRequest, model: Model) -> InferenceRequest:
        """Returns the request, directed to a specific revision of its model."""
        self.withdrawals.check(model.requested)
        purges = self.withdrawals.purges(model)
        if model is request.model and purges == request.purges:
            return request
        return msgspec.structs.replace(request, model=model, purges=purges)

    def find_given_up(self, name: str) -> Model | None:
        """Returns the model with this name if no worker serves it anymore, or None if one might."""
        model, canary = self._catalog.find_deployed(name), self._canaries.get(name)
        if not self.withdrawals.is_withdrawn(model):
            return None
        return model if canary is None or not self.is_serving(canary) else None

    def _choose(self, request: InferenceRequest) -> Model:
        """Returns the revision that serves a request: its model or the model's canary."""
        model, facts = request.model, request.facts
        # Flows do not have canaries, and their steps go directly to the models.
        canary = None if model.canary is None else self._canaries.get(model.name)
        if canary is None or not self.is_serving(canary):
            return model
        key: tuple[object, ...] = (facts.tenant,)
        if canary.canary.by == "input":
            key = (facts.request_id,)
            # results must be the same every time, so all of them come from a single revision
            if request.is_repeatable:
                key = (facts.tenant, *(task_input.cache_form() for task_input in request.inputs))
        return canary if _part_of(canary, key) < canary.canary.share else model

    def is_serving(self, canary: Revision) -> bool:
        """Returns whether this instance sends the canary its share of requests."""
        if self.withdrawals.is_withdrawn(canary):
            return False
        return self._clock() < self._serving_until_s.get(canary.name, 0.0)

    async def refresh(self) -> None:
        """Reads the state once, and evaluates the canaries if it is this instance's turn."""
        async with asyncio.TaskGroup() as tasks:
            for canary in self._canaries.values():
                tasks.create_task(self._refresh(canary))

    async def _run(self) -> None:
        while True:
            await sleep_until_turn(REFRESH_S)
            await self.refresh()

    async def _refresh(self, canary: Revision) -> None:
        began_s = self._clock()
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                state = await self.canary_store.state(canary)
                if state.is_serving and not await self._is_good(canary):
                    state = state._replace(taken_back="judged")
        except (TimeoutError, Unavailable) as error:
            log.warning("canary not checked", extra={"model": canary.name, "reason": str(error)})
        else:
            until_s = began_s + STALE_LIMIT_S if state.is_serving else 0.0
            self._serving_until_s[canary.name] = until_s
            metrics.CANARY_TAKEN_BACK.labels(canary.public_name).set(bool(state.taken_back))
        share = canary.canary.share if self.is_serving(canary) else 0.0
        metrics.CANARY_SHARE.labels(canary.public_name).set(share)

    async def _is_good(self, canary: Revision) -> bool:
        """Evaluates the canary if it is this instance's turn, and rolls it back if it fails."""
        if not await self.canary_store.may_judge(canary):
            return True
        verdict = judge(await self.canary_store.counts(canary), canary.canary)
        if verdict.is_good:
            return True
        if await self.canary_store.take_back(canary, verdict.reason):
            facts = {"model": canary.name, "revision": canary.revision, "reason": verdict.reason}
            log.error("canary taken back", extra=facts)
        return False


def _part_of(canary: Revision, key: tuple[object, ...]) -> float:
    """Returns a number from 0 to 1 that is the same for equal keys and differs between canaries.

    The number does not depend on the share, so requests that already go to the canary continue to
    do so when the share is raised.
    """
    try:
        text = msgspec.msgpack.encode((canary.name, canary.revision, key))
    except UnicodeEncodeError:  # the request is about to be rejected
        return 1.0
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / _WHOLE
