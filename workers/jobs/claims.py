"""Claims the records of pulled jobs, and learns whether they are over."""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import ModelFailed
from shared.messages import failure
from shared.stores.record_state import Claim
from shared.stores.records import Records
from workers.job import PulledJob
from workers.jobs.completion import Completion

UNFINISHED_MAX = 3
"""How many workers may die while they hold a job before it is given up. A text is suspected later,
and has at least one worker in which it runs alone.
"""


class Claims:
    """Claims the records of one model's jobs."""

    def __init__(self, records: Records, completion: Completion) -> None:
        self._records = records
        self._completion = completion

    async def claim(self, pulled_jobs: Sequence[PulledJob]) -> None:
        """Claims the records of jobs. Waits only for those that may have been delivered before.

        Nearly all jobs arrive for the first time, and are claimed in the background. If such a job
        turns out to be over, it is dropped wherever it is by then.
        """
        first, repeated = list[PulledJob](), list[PulledJob]()
        for pulled in pulled_jobs:
            # A line of a batch may be asked for again, under the id of a job that is over.
            is_known = pulled.envelope.prediction or pulled.envelope.batch_id
            is_first = pulled.is_fresh and not is_known
            (first if is_first else repeated).append(pulled)
        if first:
            self._completion.registry.spawn(self._claim(first))
        if repeated:
            await self._claim(repeated)

    async def _claim(self, pulled_jobs: Sequence[PulledJob]) -> None:
        claims = await self._records.claim([pulled.record for pulled in pulled_jobs])
        for pulled, claim in zip(pulled_jobs, claims, strict=True):
            if claim is None:  # no Redis; the broker's count includes jobs that were handed back
                pulled.unfinished_claims = max(0, pulled.message.delivery_attempt - 1)
            elif not pulled.is_over:
                self._apply(pulled, claim)

    def _apply(self, pulled: PulledJob, claim: Claim) -> None:
        pulled.envelope.attempt = max(pulled.envelope.attempt, claim.attempt)
        if claim.state != "processing":
            self._completion.repeat(pulled, claim)
        elif claim.unfinished >= max(UNFINISHED_MAX, pulled.innocent_deaths + 2):
            error = ModelFailed(f"{claim.unfinished} workers died with this job in hand")
            pulled.dead_letter_reason = error.message
            for item in pulled.items:
                self._completion.settle(pulled, failure(item.index, error, pulled.receipt()))
        else:
            pulled.unfinished_claims = claim.unfinished
            self._completion.notify_webhook(pulled, "start")
