"""Claims jobs' records, and gives up on jobs that keep killing workers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence

from shared.errors import ModelFailed
from shared.messages import failure
from shared.stores.record_state import Claim
from shared.stores.records import Records
from workers.jobs.cancellation import Cancellation
from workers.jobs.completion import Completion
from workers.scheduling.job import PulledJob

UNFINISHED_MAX, ALONE_MAX = 3, 2
"""Number of worker deaths after which a job is given up on. Deaths are counted separately for all
workers that held the job and for workers that ran it by itself. As with model processes, deaths
from other causes are not counted against any job.
"""


class Claims:
    """Claims the records of one model's jobs."""

    def __init__(
        self,
        records: Records,
        completion: Completion,
        cancellation: Cancellation,
    ) -> None:
        self._records = records
        self._completion = completion
        self._cancellation = cancellation

    async def claim(self, pulled_jobs: Sequence[PulledJob]) -> None:
        """Claims jobs' records. Waits only for jobs that may have been delivered before.

        Nearly all jobs are being delivered for the first time, and are claimed in the background.
        If such a job turns out to be finished already, it is dropped, no matter how far along it is
        by then.
        """
        first, repeated = list[PulledJob](), list[PulledJob]()
        for pulled in pulled_jobs:
            # A batch line may be requested again, under a finished job's ID.
            envelope = pulled.envelope
            is_known = envelope.has_record or envelope.batch_id or envelope.flow
            is_first = pulled.is_fresh and not is_known
            (first if is_first else repeated).append(pulled)
        if first:
            self._completion.registry.spawn(self._claim(first))
        if repeated:
            await self._claim(repeated)

    @contextlib.asynccontextmanager
    async def mark_alone(self, pulled_jobs: Iterable[PulledJob]) -> AsyncIterator[None]:
        """Marks jobs that have killed workers as this worker's only work, inside the context.

        If this worker also dies, its death then counts against those jobs.
        """
        marked = []
        for pulled in pulled_jobs:
            if pulled.unfinished_claims and not self._completion.registry.is_leaving:
                pulled.is_alone = await self._records.note_alone(pulled.record, begins=True)
                marked.append(pulled)
        try:
            yield
        finally:
            for pulled in marked:
                if pulled.is_alone and len(pulled.outcomes) < len(pulled.items):
                    pulled.is_alone = False
                    self._completion.registry.spawn(self._unmark_alone(pulled))

    async def _unmark_alone(self, pulled: PulledJob) -> None:
        await self._records.note_alone(pulled.record, begins=False)

    async def _claim(self, pulled_jobs: Sequence[PulledJob]) -> None:
        if any(pulled.envelope.flow for pulled in pulled_jobs):
            pulled_jobs = await self._completion.without_ended_steps(pulled_jobs)
        claims = await self._records.claim([pulled.record for pulled in pulled_jobs])
        for pulled, claim in zip(pulled_jobs, claims, strict=True):
            if claim is None:  # no Redis; the broker's count includes jobs that were handed back
                pulled.unfinished_claims = max(0, pulled.message.delivery_attempt - 1)
            elif not pulled.is_over:
                pulled.is_claimed = claim.state == "processing"
                self._apply(pulled, claim)
        if self._completion.registry.is_leaving:
            await self._completion.registry.release_claims(pulled_jobs)

    def _apply(self, pulled: PulledJob, claim: Claim) -> None:
        pulled.envelope.attempt = max(pulled.envelope.attempt, claim.attempt)
        if claim.state != "processing":
            if claim.reply is None:
                self._cancellation.cancel(pulled.record)
            else:
                self._completion.repeat(pulled, claim.reply)
            self._cancellation.on_unwanted()  # the model may have started before the claim returned
        elif claim.unfinished >= UNFINISHED_MAX and claim.alone >= ALONE_MAX:
            error = ModelFailed(
                f"{claim.unfinished} workers died while holding this job, {claim.alone} of them "
                "while it was their only job"
            )
            pulled.dead_letter_reason = error.message
            for item in pulled.items:
                self._completion.settle(pulled, failure(item.index, error, pulled.receipt()))
        else:
            pulled.unfinished_claims = claim.unfinished
            self._completion.notify_webhook(pulled, "start")
