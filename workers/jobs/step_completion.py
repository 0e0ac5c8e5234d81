"""Completes flow step jobs: marks their items as done, continues the run, writes rows, acks.

As with any job, the ack comes last, once the broker has the next steps' messages. If this worker
dies before that, the message is delivered again, its items are found to be done, and the run
continues from there (shared/flows/engine.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from shared.broker.transport import Publisher
from shared.errors import PenstockError, Unavailable
from shared.flows.engine import FlowEngine, JobEnd, may_retry
from shared.messages import ItemOutcome
from shared.models.catalog import Model
from shared.stores.cache import ResultCache
from shared.stores.objects import ObjectStore
from shared.stores.record_state import ReleasedClaim
from shared.stores.records import Records
from shared.stores.token_streams import TokenStreams
from shared.usage.row import RowSink
from workers.identity import WorkerInfo
from workers.jobs.answers import in_time
from workers.jobs.canary_share import CanaryShare
from workers.jobs.completion import Completion
from workers.jobs.large_results import KEEP_LIMIT_S
from workers.jobs.spans import record_spans
from workers.scheduling.job import PulledJob

AGAIN_S = 0.25


class StepCompletion(Completion):
    """Completes one model's jobs, including flow step jobs."""

    has_flows = True

    def __init__(
        self,
        model: Model,
        publisher: Publisher,
        cache: ResultCache,
        records: Records,
        tokens: TokenStreams,
        objects: ObjectStore,
        rows: RowSink,
        worker: WorkerInfo,
        flows: FlowEngine,
        canary: CanaryShare | None = None,
    ) -> None:
        super().__init__(model, publisher, cache, records, tokens, objects, rows, worker, canary)
        self._engine = flows

    async def without_ended_steps(self, pulled_jobs: Sequence[PulledJob]) -> Sequence[PulledJob]:
        """Closes jobs whose items are done or whose run has ended. Returns the other jobs."""
        of_flows = [pulled for pulled in pulled_jobs if pulled.envelope.flow]
        try:
            looks = await self._engine.look([pulled.job for pulled in of_flows])
        except Unavailable:  # they are marked later
            return pulled_jobs
        over = set[PulledJob]()
        for pulled, look in zip(of_flows, looks, strict=True):
            if look.begins:
                self.notify_webhook(pulled, "start")
            if not look.is_open or look.done == len(pulled.items):
                over.add(pulled)
                for item in pulled.items:  # earlier marks count
                    self.settle(pulled, pulled.canceled(item.index))
        return [pulled for pulled in pulled_jobs if pulled not in over]

    async def finish(self, pulled: PulledJob) -> None:
        """Completes a job whose items all have outcomes."""
        if not pulled.envelope.flow:
            await super().finish(pulled)
            return
        outcomes = [pulled.outcomes[item.index] for item in pulled.items]
        record_spans(pulled, self.model.find_adapted(pulled.envelope.model), self.worker.device)
        planned = []
        try:
            outcomes = await asyncio.gather(
                *(self.large_results.store(pulled.envelope, outcome) for outcome in outcomes)
            )
            body = self.body_of(outcomes)
            outcomes = in_time(pulled, body, time.time()).outcomes
            if remaining := await self._without_retried(pulled, outcomes):
                end = await self._mark(pulled, remaining)
                body = msgspec.structs.replace(body, outcomes=end.outcomes)
                await self.fill_cache([(pulled, body)])
                planned = await self._engine.advance(pulled.job, end)
            if pulled.dead_letter_reason:
                reason = pulled.dead_letter_reason
                await self.replies.publish_dead_letter(pulled.message, reason)
        except PenstockError as error:
            self.give_up(pulled, error)
            return
        if remaining:
            self.write_rows([(pulled, body)], planned)
        else:
            self.registry.ack(pulled)

    async def _without_retried(
        self, pulled: PulledJob, outcomes: Sequence[ItemOutcome]
    ) -> list[ItemOutcome]:
        """Republishes failed items that have retries left. Returns the other outcomes."""
        if pulled.dead_letter_reason:
            return list(outcomes)
        retried = [outcome.index for outcome in outcomes if may_retry(pulled.job, outcome)]
        if retried:
            # Otherwise, the claim would count as though a worker had died while holding these
            # items.
            await self._records.release([ReleasedClaim(pulled.record)])
            pulled.is_released = True
            await self._engine.retry(pulled.job, retried)
        return [outcome for outcome in outcomes if outcome.index not in retried]

    async def _mark(self, pulled: PulledJob, outcomes: Sequence[ItemOutcome]) -> JobEnd:
        """Records the outcomes, retrying until Redis accepts them.

        Raises:
            Unavailable: Redis did not accept them in time.
        """
        until_s = time.monotonic() + KEEP_LIMIT_S
        while True:
            try:
                return await self._engine.mark(pulled.job, outcomes)
            except Unavailable:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not await self._records.wait_up(left_s):
                    raise
            await asyncio.sleep(AGAIN_S)
