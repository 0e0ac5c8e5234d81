"""The Predictions API without its HTTP: creates predictions, waits for them, reads, lists and cancels them.

The record is the truth (shared/stores/records.py). One is made before the job is published, so what a caller was
promised can be found by any instance, whichever made the promise and whether it still runs; a reply only wakes who
waits. A record whose deadline passed is ended by whoever reads it: the last resort against jobs that got lost.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

from api import metrics
from api.dispatch.admission import Admission
from api.dispatch.job_sender import Inbox, ReplyWaiter
from api.errors import NotFound
from api.predictions.sender import NewPrediction, PredictionSender, failed_reply
from shared.errors import BadInput, DeadlineExceeded, PenstockError, Unavailable
from shared.predictions import Prediction, decode_document, encode_document, record_of
from shared.stores.records import Record, Records

log = logging.getLogger(__name__)

POLL_S = 0.5
"""How often who waits for an end reads the record: no reply tells of a cancel, and replies get lost."""
GRACE_S = 5.0
"""After its deadline, in which a worker may still end a prediction."""
TWIN_PUBLISHES_S = 2.0
"""After its creation, in which whoever created a record publishes its job, before a repeated request does."""
TWIN_POLL_S = 0.05
PAGE = 20
OWN_ID = re.compile(r"(?!pred_)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OUR_ID = re.compile(r"pred_[0-9a-f]{24}")


class PredictionIdTaken(BadInput):
    """This id, or this Idempotency-Key, belongs to a prediction of another input."""


class PredictionSnapshot(NamedTuple):
    """A prediction as it was when its record was last read."""

    prediction: Prediction
    record: Record


class Predictions:
    """The predictions of all tenants, in one Redis.

    Args:
        records: where they are kept.
        sender: publishes their jobs.
        inbox: where replies to this instance come in.
        admission: bounds what this instance waits for.
        keep_s: seconds for which a prediction is kept after its end.
    """

    def __init__(
        self, records: Records, sender: PredictionSender, inbox: Inbox, admission: Admission, *, keep_s: int
    ) -> None:
        self._records = records
        self._sender = sender
        self._inbox = inbox
        self._admission = admission
        self._keep_s = keep_s
        self._listened: set[str] = set()

    @asynccontextmanager
    async def creating(self, new: NewPrediction, *, waits: bool) -> AsyncGenerator[Creation]:
        """Creates a prediction, or finds the one that the same request created; then the block may wait for it.

        Its items count as in flight while the block runs: what nobody waits for is bounded by the broker alone.

        Raises:
            Overloaded: this instance, the broker or the store of predictions is full.
            PredictionIdTaken: its id is that of another prediction.
            Unavailable: Redis or the broker is out of reach; nothing was promised.
        """
        model, items, lane = new.prediction.model, len(new.items), new.options.lane
        self._admission.admit(model, items, remaining_s=new.prediction.deadline_s - time.time(), lane=lane)
        creation: Creation | None = None
        try:
            # Registered before anything is published, so no reply can be too early.
            with self._listening(new.prediction.record, waits=waits) as waiter:
                is_new, seen = await self._create(new, waiter)
                metrics.PREDICTIONS.labels(model, "created" if is_new else "found").inc()
                creation = Creation(self, seen, waiter, is_new=is_new)
                yield creation
        finally:
            took_s = _took_s(creation.seen.record) if creation is not None and creation.is_new else None
            self._admission.release(model, items, answered=took_s is not None, took_s=took_s, lane=lane)

    async def read(self, tenant: str, prediction_id: str) -> PredictionSnapshot:
        """A prediction of this tenant as it is now.

        Raises:
            NotFound: it has none of this id, any more.
            Unavailable: Redis is out of reach.
        """
        record_id = prediction_id if _OUR_ID.fullmatch(prediction_id) else record_of(tenant, prediction_id)
        record = await self._records.read(record_id)
        if record is not None and record.document:
            prediction = decode_document(record.document)
            if prediction.tenant == tenant:
                return await self._ended_if_late(PredictionSnapshot(prediction, record))
        raise NotFound(f"there is no prediction {prediction_id[:80]!r}")

    async def page(self, tenant: str, before_s: float | None) -> tuple[list[PredictionSnapshot], float | None]:
        """Up to PAGE predictions, newest first, and the `before_s` of the next page.

        Raises:
            Unavailable: Redis is out of reach.
        """
        ids = await self._records.latest(tenant, PAGE, before_s)
        records = [record for record in await asyncio.gather(*map(self._records.read, ids)) if record is not None]
        found = [PredictionSnapshot(decode_document(record.document), record) for record in records if record.document]
        next_s = found[-1].record.created_at_s if found and len(ids) == PAGE else None
        return [await self._ended_if_late(one) for one in found], next_s

    async def cancel(self, tenant: str, prediction_id: str) -> PredictionSnapshot:
        """Ends a prediction of this tenant as canceled, unless it is over.

        Raises:
            NotFound: it has none of this id, any more.
            Unavailable: Redis is out of reach.
        """
        seen = await self.read(tenant, prediction_id)
        if not seen.record.is_over and await self._records.cancel(seen.prediction.record) == "canceled":
            metrics.PREDICTIONS.labels(seen.prediction.model, "canceled").inc()
        return await self.read(tenant, prediction_id)

    async def inline_image(self, record_id: str, index: int) -> bytes:
        """An image that lies in a record itself.

        Raises:
            NotFound: it does not, any more.
            Unavailable: Redis is out of reach.
        """
        record = await self._records.read(record_id)
        outcomes = record.reply.outcomes if record is not None and record.reply is not None else []
        result = outcomes[index].result if index < len(outcomes) else None
        if result is not None and result.blob is not None and result.blob.data is not None:
            return result.blob.data
        raise NotFound("the image is no longer there")

    async def look(self, seen: PredictionSnapshot) -> PredictionSnapshot:
        """The same prediction as it is now, or as it was where Redis does not answer."""
        with suppress(Unavailable, NotFound):
            return await self.read(seen.prediction.tenant, seen.prediction.id)
        return seen

    @contextmanager
    def _listening(self, record_id: str, *, waits: bool) -> Iterator[ReplyWaiter | None]:
        """A waiter at the inbox, where there is one: without, who waits reads the record until it is over."""
        # Who repeats a request while the first still waits reads too: its reply goes to one of them.
        with ExitStack() as stack:
            waiter = None
            if waits and record_id not in self._listened:
                with suppress(Unavailable):
                    waiter = stack.enter_context(self._inbox.waiter(record_id, 0))
                    self._listened.add(record_id)
                    stack.callback(self._listened.discard, record_id)
            yield waiter

    async def _create(self, new: NewPrediction, waiter: ReplyWaiter | None) -> tuple[bool, PredictionSnapshot]:
        prediction, document = new.prediction, encode_document(new.prediction)
        record_id, deadline_s = prediction.record, prediction.deadline_s
        is_new = await self._records.create(
            record_id,
            prediction.tenant,
            document,
            deadline_s=deadline_s,
            keep_s=self._keep_s,
            reply_bytes=new.reply_bytes,
        )
        if is_new:
            await self._sender.send(new, waiter)
            return True, PredictionSnapshot(prediction, Record(state="starting", created_at_s=prediction.created_at_s))
        seen = await self.read(prediction.tenant, prediction.id)
        if seen.prediction.digest != prediction.digest:
            raise PredictionIdTaken(f"{prediction.id} is the id of another prediction, with another input", field="id")
        seen = await self._published_by_twin(seen)
        if _waits_for_publish(seen):
            # As it was created, not as it was repeated: times and ids in its rows are those of its record.
            await self._sender.send(replace(new, prediction=seen.prediction), waiter)
        return False, seen

    async def _published_by_twin(self, seen: PredictionSnapshot) -> PredictionSnapshot:
        """The prediction once its job is surely published, or its creator has had the time for it."""
        while _waits_for_publish(seen) and time.time() < seen.record.created_at_s + TWIN_PUBLISHES_S:
            await asyncio.sleep(TWIN_POLL_S)
            seen = await self.read(seen.prediction.tenant, seen.prediction.id)
        return seen

    async def _ended_if_late(self, seen: PredictionSnapshot) -> PredictionSnapshot:
        prediction, record = seen
        if record.is_over or time.time() < prediction.deadline_s + GRACE_S:
            return seen
        limit_s = prediction.deadline_s - prediction.created_at_s
        reply = failed_reply(DeadlineExceeded.code, f"deadline exceeded: it was not done within {limit_s:.3g} s")
        finish = await self._records.finish(prediction.record, "failed", reply)
        if finish is None:
            return seen
        if finish.is_ours:
            metrics.PREDICTIONS.labels(prediction.model, "expired").inc()
            events = prediction.webhook_events
            await self._sender.webhooks.try_publish(prediction.record, events, "completed")
        return PredictionSnapshot(prediction, await self._records.read(prediction.record) or record)


class Creation:
    """A prediction just created or found, `seen` as it was last; `is_new`: just created."""

    def __init__(
        self, predictions: Predictions, seen: PredictionSnapshot, waiter: ReplyWaiter | None, *, is_new: bool
    ) -> None:
        self._predictions = predictions
        self._waiter = waiter
        self.seen = seen
        self.is_new = is_new

    async def wait(self, limit_s: float) -> None:
        """Waits until the prediction is over, at most `limit_s`; `seen` says what came of it."""
        # The reading counts too: a Redis that hangs must not hold the answer back for longer than clients wait.
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, limit_s)):
                while not self.seen.record.is_over:
                    await self._pause()
                    self.seen = await self._predictions.look(self.seen)

    async def _pause(self) -> None:
        """Until the reply comes, at most POLL_S; after it there is none to wait for."""
        try:
            if self._waiter is not None:
                await self._waiter.reply(POLL_S)
                self._waiter = None
                return
        except DeadlineExceeded:
            return
        except PenstockError as error:
            log.debug("no reply will come", extra={"reason": error.message})
            self._waiter = None
        await asyncio.sleep(POLL_S)


def _waits_for_publish(seen: PredictionSnapshot) -> bool:
    return seen.record.state == "starting" and not seen.record.published


def _took_s(record: Record) -> float | None:
    """The time that the model took for it; None where no model did anything."""
    outcomes = record.reply.outcomes if record.reply is not None else []
    times_ms = [outcome.receipt.inference_ms for outcome in outcomes if outcome.receipt.inference_ms is not None]
    return max(times_ms) / 1000 if times_ms else None
