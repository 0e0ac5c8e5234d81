"""Chooses the revision of a model for each request, and rolls canaries back.

A revision that an operator has withdrawn gets no request (shared/stores/withdrawals.py).

Each instance looks at the canary_store in Redis (shared/canary/store.py) once a second. One of them
judges in each second, and all follow. While Redis is unreachable a canary gets nothing: it could
not be judged.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, Self

import msgspec

from api import metrics
from api.dispatch.request import InferenceRequest
from shared.canary.store import CanaryState
from shared.canary.verdict import CanaryCounts, judge
from shared.catalog import Catalog, Model
from shared.concurrency import BackgroundTask
from shared.errors import Unavailable
from shared.stores.withdrawals import LiveWithdrawals, no_withdrawals

REFRESH_S = 1.0
READ_LIMIT_S = 2.0
STALE_LIMIT_S = 4.0
"""State older than STALE_LIMIT_S counts as unknown."""
_WHOLE = 1 << 64

log = logging.getLogger(__name__)


class Counters(Protocol):
    """The state of canaries. The implementation is shared/canary/store.py."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def state(self, canary: Model) -> CanaryState:
        """Returns whether the canary gets requests."""

    async def may_judge(self, canary: Model) -> bool:
        """Returns whether this process should judge now."""

    async def counts(self, canary: Model) -> CanaryCounts:
        """Returns the recent counts of both revisions."""

    async def count(self, canary: Model, counts: CanaryCounts) -> None:
        """Adds to that."""

    async def take_back(self, canary: Model, reason: str) -> bool:
        """Takes the canary back. Returns whether it was not taken back before."""


class CanaryRouter:
    """Sends a share of the requests to canaries. An async context manager that runs the refresh.

    Args:
        canary_store: in Redis. It is opened and closed with this object.
        clock: monotonic seconds.
        withdrawals: already open. None: nothing is ever withdrawn.
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

    def routed(self, request: InferenceRequest) -> InferenceRequest:
        """Returns the request as the canary of its model gets it, or as its model does.

        Raises:
            ModelWithdrawn: the revision that would get it is withdrawn.
        """
        # Steps of flows go to the model itself.
        has_canary = request.model.name in self._canaries and request.model.flow is None
        return self.to_revision(request, self._choose(request) if has_canary else request.model)

    def to_revision(self, request: InferenceRequest, model: Model) -> InferenceRequest:
        """Returns the request as one revision of its model gets it.

        Raises:
            ModelWithdrawn: the revision is withdrawn.
        """
        self.withdrawals.check(model.drawn_by or model)
        purges = self.withdrawals.purges(model)
        if model is request.model and purges == request.purges:
            return request
        return replace(request, model=model, purges=purges)

    def given_up(self, name: str) -> Model | None:
        """Returns the model of this name if nothing computes it any more. None: something may."""
        model, canary = self._catalog.find_deployed(name), self._canaries.get(name)
        if not self.withdrawals.is_withdrawn(model):
            return None
        return model if canary is None or not self.is_serving(canary) else None

    def _choose(self, request: InferenceRequest) -> Model:
        """Returns the revision that serves a request: its model or the canary of it."""
        model, facts = request.model, request.facts
        canary = self._canaries[model.name]
        if canary.canary is None or not self.is_serving(canary):
            return model
        key: tuple[object, ...] = (facts.tenant,)
        if canary.canary.by == "input":
            key = (facts.request_id,)
            if request.is_repeatable:  # with equal results each time, so from one revision
                key = (facts.tenant, *(one.cache_form() for one in request.inputs))
        return canary if _part_of(canary, key) < canary.canary.share else model

    def is_serving(self, canary: Model) -> bool:
        """Returns whether this instance sends a canary its share."""
        if self.withdrawals.is_withdrawn(canary):
            return False
        return self._clock() < self._serving_until_s.get(canary.name, 0.0)

    async def refresh(self) -> None:
        """Reads the canary_store once, and judges if it is this instance's turn."""
        async with asyncio.TaskGroup() as tasks:
            for canary in self._canaries.values():
                tasks.create_task(self._refresh(canary))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            await self.refresh()

    async def _refresh(self, canary: Model) -> None:
        began_s = self._clock()
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                state = await self.canary_store.state(canary)
                if state.is_serving and not await self._is_good(canary):
                    state = state._replace(taken_back="judged")
        except (TimeoutError, Unavailable) as error:
            log.warning("canary not looked at", extra={"model": canary.name, "reason": str(error)})
        else:
            until_s = began_s + STALE_LIMIT_S if state.is_serving else 0.0
            self._serving_until_s[canary.name] = until_s
            metrics.CANARY_TAKEN_BACK.labels(canary.public_name).set(bool(state.taken_back))
        share = canary.canary.share if canary.canary and self.is_serving(canary) else 0.0
        metrics.CANARY_SHARE.labels(canary.public_name).set(share)

    async def _is_good(self, canary: Model) -> bool:
        """Judges, if it is this instance's turn. Takes the canary back if it is bad."""
        assert canary.canary is not None, "a canary has the rules of its entry; this is a bug"
        if not await self.canary_store.may_judge(canary):
            return True
        verdict = judge(await self.canary_store.counts(canary), canary.canary)
        if verdict.is_good:
            return True
        if await self.canary_store.take_back(canary, verdict.reason):
            facts = {"model": canary.name, "revision": canary.revision, "reason": verdict.reason}
            log.error("canary taken back", extra=facts)
        return False


def _part_of(canary: Model, key: tuple[object, ...]) -> float:
    """Returns a number from 0 to 1 that is the same for equal keys, and another for each canary.

    It does not depend on the share. So a larger share keeps those that have the canary already.
    """
    try:
        text = msgspec.msgpack.encode((canary.name, canary.revision, key))
    except UnicodeEncodeError:  # the request is about to be refused
        return 1.0
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / _WHOLE
