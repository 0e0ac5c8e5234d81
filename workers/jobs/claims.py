"""What a worker learns of a job when it takes it in hand: whether it is over, and in whose hands it was before."""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import ModelFailed
from shared.messages import failure
from shared.stores.records import Claim, Records
from workers.job import JobInHand
from workers.jobs.completion import Finisher

UNFINISHED_MAX = 3
"""Workers that may die with a job in hand before it is given up."""


class Claims:
    """Claims the records of one model's jobs."""

    def __init__(self, records: Records, finisher: Finisher) -> None:
        self._records = records
        self._finisher = finisher

    async def claim(self, hands: Sequence[JobInHand]) -> None:
        """Claims the records of all that come again, and has those claimed in the background that come first.

        Nobody waits for the claim of a job that comes for the first time, as nearly all do; should it be over all the
        same, it is dropped wherever it is by then.
        """
        first, again = list[JobInHand](), list[JobInHand]()
        for hand in hands:
            (first if hand.is_fresh and not hand.envelope.prediction else again).append(hand)
        if first:
            self._finisher.spawn(self._claim(first))
        if again:
            await self._claim(again)

    async def _claim(self, hands: Sequence[JobInHand]) -> None:
        claims = await self._records.claim([hand.record for hand in hands])
        for hand, claim in zip(hands, claims, strict=True):
            if claim is None:  # the broker knows less: it counts what was handed back, too
                hand.unfinished = max(0, hand.message.delivery_attempt - 1)
            elif not hand.is_over:
                self._learn(hand, claim)

    def _learn(self, hand: JobInHand, claim: Claim) -> None:
        hand.envelope.attempt = max(hand.envelope.attempt, claim.attempt)
        if claim.state != "processing":
            self._finisher.conclude(hand, claim)
        elif claim.unfinished >= UNFINISHED_MAX:
            hand.dead_reason = f"{claim.unfinished} workers died with this job in hand"
            for item in hand.items:
                self._finisher.settle(hand, failure(item.index, ModelFailed(hand.dead_reason), hand.receipt()))
        else:
            hand.unfinished = claim.unfinished
            self._finisher.tell_webhook(hand, "start")
