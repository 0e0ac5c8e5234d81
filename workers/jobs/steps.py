"""Ends the jobs of flows' steps: marks their items, carries the run on, writes rows, acks.

As for any job the ack is last, after what follows is with the broker. So if this worker dies, the
message comes again, its items are found done, and the run is carried on from there
(shared/flows/engine.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from shared.errors import PenstockError, Unavailable
from shared.flows.engine import FlowEngine, JobEnd, may_retry
from shared.messages import ItemOutcome
from shared.stores.record_state import ReleasedClaim
from shared.stores.records import Records
from workers.jobs.completion import KEEP_LIMIT_S, Completion, in_time
from workers.jobs.spans import record_spans
from workers.scheduling.job import PulledJob

AGAIN_S = 0.25


class StepJobs:
    """The jobs of steps that a worker has for one model."""

    def __init__(self, engine: FlowEngine, completion: Completion, records: Records) -> None:
        self._engine = engine
        self._completion = completion
        self._records = records
        completion.finish_step = self.finish

    async def still_open(self, pulled_jobs: Sequence[PulledJob]) -> list[PulledJob]:
        """Ends the jobs whose items are done, or whose run is over. Returns the others."""
        of_flows = [pulled for pulled in pulled_jobs if pulled.envelope.flow]
        try:
            looks = await self._engine.look([pulled.job for pulled in of_flows])
        except Unavailable:  # they are marked later
            return list(pulled_jobs)
        over = set[PulledJob]()
        for pulled, look in zip(of_flows, looks, strict=True):
            if look.begins:
                self._completion.notify_webhook(pulled, "start")
            if not look.is_open or look.done == len(pulled.items):
                over.add(pulled)
                for item in pulled.items:  # what counts is what was marked before
                    self._completion.settle(pulled, pulled.canceled(item.index))
        return [pulled for pulled in pulled_jobs if pulled not in over]

    async def finish(self, pulled: PulledJob) -> None:
        completion = self._completion
        outcomes = [pulled.outcomes[item.index] for item in pulled.items]
        record_spans(pulled, completion.model, completion.worker.device)
        planned = []
        try:
            outcomes = await asyncio.gather(
                *(completion.large_results.stored(pulled.envelope, one) for one in outcomes)
            )
            body = completion.body_of(outcomes)
            outcomes = in_time(pulled, body, time.time()).outcomes
            if left := await self._without_retried(pulled, outcomes):
                end = await self._mark(pulled, left)
                body = msgspec.structs.replace(body, outcomes=end.outcomes)
                await completion.fill_cache([(pulled, body)])
                planned = await self._engine.advance(pulled.job, end)
            if pulled.dead_letter_reason:
                reason = pulled.dead_letter_reason
                await completion.replies.publish_dead_letter(pulled.message, reason)
        except PenstockError as error:
            completion.give_up(pulled, error)
            return
        if left:
            completion.write_rows([(pulled, body)], planned)
        else:
            completion.registry.ack(pulled)

    async def _without_retried(
        self, pulled: PulledJob, outcomes: Sequence[ItemOutcome]
    ) -> list[ItemOutcome]:
        """Publishes items again that failed and have retries left. Returns the other outcomes."""
        if pulled.dead_letter_reason:
            return list(outcomes)
        again = [one.index for one in outcomes if may_retry(pulled.job, one)]
        if again:
            # Otherwise the claim would say that a worker died with them.
            await self._records.release([ReleasedClaim(pulled.record)])
            pulled.is_released = True
            await self._engine.retry(pulled.job, again)
        return [one for one in outcomes if one.index not in again]

    async def _mark(self, pulled: PulledJob, outcomes: Sequence[ItemOutcome]) -> JobEnd:
        """Notes the outcomes, as soon as Redis takes them.

        Raises:
            Unavailable: it did not in time.
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
