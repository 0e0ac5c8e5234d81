"""Extra tasks for workers whose model has a canary: counting for the comparison, and draining.

Workers for both revisions count their items' results. The canary's workers report that they are
alive. If none are alive, or the canary was rolled back, the other revision's workers also pull from
the canary's subscriptions and forward the jobs, so no jobs are stranded.

Canary jobs that fail or take too long are handed over to the other revision. The caller therefore
gets the other revision's response instead of the canary's error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from shared.broker.transport import (
    Publisher,
    Subscriber,
    Subscription,
    batch_subscription_id,
    workers_subscription_id,
)
from shared.canary.forwarding import forward
from shared.canary.store import CanaryState, CanaryStore
from shared.canary.verdict import CanaryCounts
from shared.errors import BadInput, Canceled, PenstockError, Unavailable, error_for_code
from shared.messages import ItemOutcome
from shared.models.catalog import Model, Revision
from shared.stores.records import Records
from workers import metrics
from workers.jobs.canary_comparison import COMPUTED, RevisionComparison
from workers.jobs.registry import JobRegistry
from workers.scheduling.job import PulledJob

log = logging.getLogger(__name__)

REFRESH_S = 1.0
DRAIN_MESSAGES = 64
DRAIN_RETRY_S = 5.0
LAST_COUNT_LIMIT_S = 1.0
ROUNDING_S = 0.01
"""Tolerance for the remaining time, because it is the difference between two Unix times."""


class Forwarding:
    """Forwards one canary's jobs."""

    def __init__(
        self, canary: Revision, publisher: Publisher, records: Records, registry: JobRegistry
    ) -> None:
        self._canary = canary
        self._publisher = publisher
        self._records = records
        self._registry = registry

    @staticmethod
    def wants(outcomes: Sequence[ItemOutcome]) -> bool:
        """Returns whether the other revision must try it because an item failed for any reason.

        An invalid input fails there too, but with the error messages that callers are used to.
        """
        return any(outcome.status == "failed" for outcome in outcomes)

    def begin(self, pulled: PulledJob, reason: str) -> None:
        """Closes a job here, unless it has already ended, and forwards it in the background."""
        if not pulled.is_over:
            pulled.end()
            self._registry.spawn(self.forward(pulled, reason))

    async def forward(self, pulled: PulledJob, reason: str) -> None:
        """Forwards a job that `begin` closed, and acks it. If that fails, hands the job back."""
        metrics.CANARY_FORWARDED.labels(reason).inc()
        try:
            # Done first, so that a crash caused by the job isn't counted against the next worker.
            await self._records.hand_over(pulled.record)
            await forward(self._publisher, self._canary.public_name, pulled.message)
        except PenstockError as error:
            facts = {"request_id": pulled.envelope.request_id, "reason": error.message}
            log.warning("canary job not forwarded", extra=facts)
            self._registry.hand_back(pulled)
            return
        self._registry.ack(pulled)


class CanaryShare:
    """One worker's part in the comparison of two revisions.

    Args:
        comparison: compares outputs that the API can't compare. None if there is nothing to
            compare.
        refresh_s: interval between reads of the canary_store.
    """

    def __init__(
        self,
        model: Model,
        canary: Revision,
        canary_store: CanaryStore,
        publisher: Publisher,
        comparison: RevisionComparison | None = None,
        *,
        refresh_s: float = REFRESH_S,
    ) -> None:
        self._comparison = comparison
        self._is_canary = isinstance(model, Revision)
        self._canary = canary
        self._canary_store = canary_store
        self._publisher = publisher
        self._refresh_s = refresh_s
        self._counts = CanaryCounts()
        self._is_serving = asyncio.Event()
        self._is_serving.set()
        self._is_idle = asyncio.Event()
        self.is_taken_back = False

    def count(self, pulled: PulledJob, outcomes: Sequence[ItemOutcome]) -> None:
        """Counts the results for a job's items, but only items that this revision computed."""
        counts = self._counts.canary if self._is_canary else self._counts.stable
        # The waiting time of `batch` jobs is meaningless.
        took_s = time.time() - pulled.envelope.published_at_s
        timed_s = None if pulled.envelope.priority == "batch" else max(0.0, took_s)
        for outcome in outcomes:
            if outcome.status == "succeeded" and outcome.receipt.cache in COMPUTED:
                counts.add(timed_s)
            elif outcome.status == "expired" and self._was_in_a_hurry(pulled):
                continue
            elif outcome.status != "succeeded" and _is_of_model(outcome):
                counts.add_failed()

    def count_late(self, pulled: PulledJob) -> None:
        """Counts the items in a job that took too long here.

        If its caller allowed less time than usual, counts only how long the job took.
        """
        if pulled.envelope.priority != "interactive":
            return
        if not self._was_in_a_hurry(pulled):
            self._counts.canary.add_failed(len(pulled.items))
            return
        took_s = max(0.0, time.time() - pulled.envelope.published_at_s)
        for _ in pulled.items:
            self._counts.canary.add(took_s)

    def _was_in_a_hurry(self, pulled: PulledJob) -> bool:
        """Returns True if a caller set a deadline shorter than the default.

        In that case, being late is not meaningful, because a caller may set a deadline that no
        revision can meet.
        """
        left_s = pulled.start_by_s - pulled.envelope.received_at_s
        return left_s < self._canary.deadline.default_s - ROUNDING_S

    async def compare(self, pulled: PulledJob, outcomes: Sequence[ItemOutcome]) -> None:
        """Compares a finished job's outputs with the other revision's, or requests the comparison.

        Never fails.
        """
        if self._comparison is None:
            return
        for is_close in await self._comparison.after(pulled, outcomes):
            self._counts.compared += 1
            self._counts.outside += not is_close
            metrics.CANARY_COMPARED.labels("yes" if is_close else "no").inc()

    async def run(self, subscriber: Subscriber, is_ready: Callable[[], bool]) -> None:
        """Keeps the canary_store up to date, and drains the canary's subscriptions.

        Runs until canceled.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._refresh_all(is_ready))
                if not self._is_canary:
                    tasks.create_task(self._drain_when_needed(subscriber))
        finally:
            # A worker whose batches all fail exits, and its counts reveal the failures.
            with contextlib.suppress(Unavailable, TimeoutError):
                async with asyncio.timeout(LAST_COUNT_LIMIT_S):
                    await self._send_counts()

    async def _refresh_all(self, is_ready: Callable[[], bool]) -> None:
        while True:
            try:
                await self._refresh(is_alive=self._is_canary and is_ready())
            except Unavailable as error:
                # Nothing is known yet, so nothing changes. The API sends no requests to canaries
                # for now.
                log.debug("canary state could not be read", extra={"reason": error.message})
            await asyncio.sleep(self._refresh_s)

    async def _refresh(self, *, is_alive: bool) -> None:
        if is_alive:
            await self._canary_store.say_alive(self._canary)
        await self._send_counts()
        self._apply(await self._canary_store.state(self._canary))

    async def _send_counts(self) -> None:
        counts, self._counts = self._counts, CanaryCounts()
        await self._canary_store.count(self._canary, counts)

    def _apply(self, state: CanaryState) -> None:
        self.is_taken_back = bool(state.taken_back)
        if state.is_serving:
            self._is_serving.set()
            self._is_idle.clear()
        else:
            self._is_serving.clear()
            self._is_idle.set()

    async def _drain_when_needed(self, subscriber: Subscriber) -> None:
        while True:
            await self._is_idle.wait()
            try:
                await self._drain(subscriber)
            except PenstockError as error:
                log.warning("canary not drained", extra={"reason": error.message})
                await asyncio.sleep(DRAIN_RETRY_S)

    async def _drain(self, subscriber: Subscriber) -> None:
        """Forwards the canary's jobs until the canary is serving again."""
        async with AsyncExitStack() as stack:
            pulling = []
            for name in (workers_subscription_id, batch_subscription_id):
                subscription = await stack.enter_async_context(
                    subscriber.subscribe(name(self._canary.name), max_messages=DRAIN_MESSAGES)
                )
                pulling.append(asyncio.create_task(self._forward_all(subscription)))
            serving = asyncio.create_task(self._is_serving.wait())
            try:
                await asyncio.wait([*pulling, serving], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (*pulling, serving):
                    task.cancel()
                ended = await asyncio.gather(*pulling, return_exceptions=True)
            for error in ended:
                if isinstance(error, Exception):
                    raise error

    async def _forward_all(self, subscription: Subscription) -> None:
        async for message in subscription:
            try:
                await forward(self._publisher, self._canary.public_name, message)
            except PenstockError as error:
                log.warning("canary job not drained", extra={"reason": error.message})
                subscription.nack(message)
            else:
                metrics.CANARY_FORWARDED.labels("drained").inc()
                subscription.ack(message)


def _is_of_model(outcome: ItemOutcome) -> bool:
    """Returns whether the revision, rather than the caller, may be at fault."""
    error = outcome.error
    if error is None:
        return True
    return not isinstance(error_for_code(error.code, error.message), BadInput | Canceled)
