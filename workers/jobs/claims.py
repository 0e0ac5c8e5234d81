"""Claims the record of a pulled job, which says whether the job is over and how many workers died with it."""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import ModelFailed
from shared.messages import failure
from shared.stores.records import Claim, Records
from workers.job import PulledJob
from workers.jobs.completion import Completion

UNFINISHED_MAX = 3
"""Workers that may die with a job in hand before it is given up."""


class Claims:
    """Claims the records of one model's jobs."""

    def __init__(self, records: Records, completion: Completion) -> None:
        self._records = records
        self._completion = completion

    async def claim(self, pulled_jobs: Sequence[PulledJob]) -> None:
        """Claims the records of all that come again, and has those claimed in the background that come first.

        Nobody waits for the claim of a job that comes for the first time, as nearly all do; should it be over all the
        same, it is dropped wherever it is by then.
        """
        first, again = list[PulledJob](), list[PulledJob]()
        for pulled in pulled_jobs:
            (first if pulled.is_fresh and not pulled.envelope.prediction else again).append(pulled)
        if first:
            self._completion.registry.spawn(self._claim(first))
        if again:
            await self._claim(again)

    async def _claim(self, pulled_jobs: Sequence[PulledJob]) -> None:
        claims = await self._records.claim([pulled.record for pulled in pulled_jobs])
        for pulled, claim in zip(pulled_jobs, claims, strict=True):
            if claim is None:  # the broker knows less: it counts what was handed back, too
                pulled.unfinished = max(0, pulled.message.delivery_attempt - 1)
            elif not pulled.is_over:
                self._apply(pulled, claim)

    def _apply(self, pulled: PulledJob, claim: Claim) -> None:
        pulled.envelope.attempt = max(pulled.envelope.attempt, claim.attempt)
        if claim.state != "processing":
            self._completion.repeat(pulled, claim)
        elif claim.unfinished >= UNFINISHED_MAX:
            pulled.dead_reason = f"{claim.unfinished} workers died with this job in hand"
            for item in pulled.items:
                self._completion.settle(pulled, failure(item.index, ModelFailed(pulled.dead_reason), pulled.receipt()))
        else:
            pulled.unfinished = claim.unfinished
            self._completion.notify_webhook(pulled, "start")
