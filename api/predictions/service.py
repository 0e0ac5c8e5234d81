"""Creates, waits for, reads, lists, and cancels predictions. The routes add the HTTP layer.

The record determines a prediction's state (shared/stores/records.py). The record is created before
the job is published, so every instance can find a prediction even if the instance that created it
is gone. A reply only wakes a waiting request. As a last resort in case a job is lost, any instance
that reads a record after its deadline ends the prediction. The same happens if the model was
withdrawn and no workers are left.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from typing import Any, NamedTuple, Self

import msgspec

from api import metrics
from api.dispatch.admission import Admission
from api.dispatch.canary_routing import CanaryRouter
from api.dispatch.job_sender import JobSender, build_failed_reply
from api.dispatch.pipeline import OpenParts
from api.dispatch.reply_inbox import PendingReply, ReplyInbox
from api.dispatch.request import InferenceRequest
from api.errors import KeyReused, NotFound
from api.limits.limited_request import Hold
from api.predictions.creation import Creation, PredictionSnapshot, version_of
from api.predictions.filter import PredictionFilter
from shared.errors import (
    BadInput,
    DeadlineExceeded,
    InputTooLarge,
    Overloaded,
    PenstockError,
    Unavailable,
    UnknownModel,
)
from shared.flows.engine import FlowEngine
from shared.messages import ItemOutcome, ReplyBody, encode_reply_body
from shared.predictions import (
    Prediction,
    decode_document,
    encode_document,
    encode_end,
    record_of,
)
from shared.process.concurrency import BackgroundTask
from shared.stores.prediction_store import LISTED, ListedRecord, PredictionStore
from shared.stores.record_state import Record
from shared.stores.records import Records
from shared.stores.webhook_log import WebhookLog
from shared.stores.withdrawals import withdrawn_error
from shared.webhooks.publisher import WebhookPublisher

GRACE_S = 5.0
"""How long after its deadline a worker may still finish a prediction, in seconds."""
CREATOR_PUBLISHES_S = 2.0
"""How long, in seconds, a record's creator has to publish the job before a repeated request
publishes it.
"""
CREATOR_POLL_S = 0.05
PAGE = 20
SCAN_WINDOW = 100
"""How many predictions to check against the filter at a time, after the first PAGE predictions."""
PAGE_READS = 10
"""Maximum number of reads per page: up to 920 predictions are checked against the filter."""
READ_BYTES = 4 * 1024 * 1024
"""Maximum number of bytes to read at once for a page with more than one prediction.

All stored predictions may total 64 MiB, and until they are sent they take up four times as much
memory.
"""
DOCUMENT_MAX_BYTES = 4 * 1024 * 1024
"""Maximum size of a prediction document: a sixteenth of the usual budget for all predictions, which
is the part reserved for a tenant no matter how much others store (shared/stores/record_create.lua).
"""
CALLER_ID = re.compile(r"(?!pred_)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_GENERATED_ID = re.compile(r"pred_[0-9a-f]{24}")


class PredictionIdTaken(BadInput):
    """This ID belongs to a prediction with a different input."""


class PredictionNotOver(PenstockError):
    """This operation requires a finished prediction."""

    code = "prediction_not_over"
    public_by_default = None


class PredictionsRead(NamedTuple):
    """Predictions read together, with their total size."""

    snapshots: list[PredictionSnapshot]
    remaining: list[str]
    """Record IDs of the predictions that did not fit."""
    size_bytes: int


class Predictions:
    """All tenants' predictions, in one Redis server. An async context manager.

    Args:
        inbox: receives replies to this instance.
        admission: limits the number of items in flight on this instance.
        canaries: choose the revisions that run predictions.
        flows: ends flow runs that no worker will finish.
        keep_s: how many seconds to store a prediction after it finishes.
    """

    def __init__(
        self,
        records: Records,
        store: PredictionStore,
        sender: JobSender,
        webhooks: WebhookPublisher,
        webhook_log: WebhookLog,
        inbox: ReplyInbox,
        admission: Admission,
        canaries: CanaryRouter,
        flows: FlowEngine,
        *,
        keep_s: int,
    ) -> None:
        self._records = records
        self._store = store
        self._sender = sender
        self._webhooks = webhooks
        self._webhook_log = webhook_log
        self._inbox = inbox
        self._admission = admission
        self._canaries = canaries
        self._flows = flows
        self._keep_s = keep_s
        self._waiters: dict[str, PendingReply] = {}
        """This instance's waiters for replies, keyed by record."""
        self._listening = BackgroundTask("listening for canceled predictions", self._listen)
        canaries.withdrawals.on_withdrawn(self._look_at_all)

    @classmethod
    def of_pipeline(
        cls, parts: OpenParts, webhooks: WebhookPublisher, webhook_log: WebhookLog, *, keep_s: int
    ) -> Self:
        """Returns the predictions run by an open pipeline."""
        return cls(
            parts.records,
            parts.prediction_store,
            parts.sender,
            webhooks,
            webhook_log,
            parts.inbox,
            parts.admission,
            parts.canaries,
            parts.flows,
            keep_s=keep_s,
        )

    async def __aenter__(self) -> Self:
        self._listening.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._listening.stop()

    async def _listen(self) -> None:
        """Makes waiters for canceled predictions check their records.

        A cancellation does not send a reply. Cancellations missed while Redis was unreachable are
        looked up once it is reachable again.
        """
        async for record in self._records.watch_cancellations():
            if record is None:
                self._look_at_all()
            elif (waiter := self._waiters.get(record)) is not None:
                waiter.look()

    def _look_at_all(self) -> None:
        for waiter in self._waiters.values():
            waiter.look()

    @asynccontextmanager
    async def creating(
        self, request: InferenceRequest, *, waits: bool, hold: Hold | None = None
    ) -> AsyncGenerator[Creation]:
        """Creates a prediction, or finds the one that an identical request created.

        The block may wait for it to finish.

        The items count as in flight while the block runs. After that, they are limited only by the
        broker.

        Args:
            request: a request with a record.
            waits: True if the block waits for the prediction to finish.
            hold: the request's reservations, to store with the record. None if there are none.

        Raises:
            BadInput: an input has no canonical form.
            InputTooLarge: the document is larger than DOCUMENT_MAX_BYTES.
            ModelWithdrawn: an operator has withdrawn this revision.
            Overloaded: this instance, the broker, or the prediction store is full.
            PredictionIdTaken: the ID belongs to a different prediction.
            KeyReused: the Idempotency-Key was used with a different request.
            Unavailable: Redis or the broker is unreachable, and nothing was created.
        """
        demand = request.demand(len(request.inputs))
        self._admission.admit(demand, remaining_s=request.deadline_s - time.time())
        creation: Creation | None = None
        try:
            # Registered before the job is published, so a reply can't arrive too early.
            with self._register_waiter(request, waits=waits) as waiter:
                creation = await self._create(request, waiter, hold)
                outcome = "created" if creation.is_new else "found"
                metrics.PREDICTIONS.labels(request.model.name, outcome).inc()
                yield creation
        finally:
            took_s = creation.snapshot.took_s if creation is not None and creation.is_new else None
            self._admission.release(demand, answered=took_s is not None, took_s=took_s)

    async def keep(
        self, prediction: Prediction, outcomes: Sequence[ItemOutcome], keep_s: int | None
    ) -> None:
        """Stores a result that was computed without a record as a successful prediction.

        Args:
            outcomes: the items' outcomes, all of which must have results.
            keep_s: how many seconds to keep the prediction, from the tenant's plan. None means the
                default.

        Raises:
            InputTooLarge: the document is larger than DOCUMENT_MAX_BYTES.
            KeyReused: the Idempotency-Key was used with a different request.
            Overloaded: the prediction store is full.
            PredictionIdTaken: its ID comes from an Idempotency-Key whose result was deleted
                recently.
        """
        is_kept = await self._store.keep(
            prediction.record,
            prediction.tenant,
            _encode_within_bounds(prediction),
            encode_reply_body(ReplyBody(list(outcomes), replied_at_s=time.time())),
            created_at_s=prediction.created_at_s,
            keep_s=self._keep_s if keep_s is None else keep_s,
        )
        if not is_kept:
            await self._find_equal(prediction)

    async def read(self, tenant: str, prediction_id: str) -> PredictionSnapshot:
        """Reads one of this tenant's predictions.

        Raises:
            NotFound: the tenant has no such prediction, or it has expired.
        """
        record_id = (
            prediction_id
            if _GENERATED_ID.fullmatch(prediction_id)
            else record_of(tenant, prediction_id)
        )
        snapshot = await self._find(record_id)
        if snapshot is None or snapshot.prediction.tenant != tenant:
            raise _not_found(prediction_id)
        return await self._end_if_late(snapshot)

    async def read_of_any_tenant(self, record_id: str) -> PredictionSnapshot:
        """Reads a prediction for an operator.

        Raises:
            NotFound: the prediction does not exist or has expired.
        """
        snapshot = await self._find(record_id)
        if snapshot is None:
            raise _not_found(record_id)
        return await self._end_if_late(snapshot)

    async def read_linked(self, record_id: str, prediction_id: str) -> PredictionSnapshot:
        """Reads a prediction, given a signed record ID.

        Raises:
            NotFound: the prediction does not exist or has expired.
        """
        snapshot = await self._find(record_id)
        if snapshot is None or snapshot.prediction.id != prediction_id:
            raise _not_found(prediction_id)
        return await self._end_if_late(snapshot)

    async def _find(self, record_id: str) -> PredictionSnapshot | None:
        record = await self._records.read(record_id)
        if record is None or not record.document:
            return None
        return PredictionSnapshot(decode_document(record.document), record)

    async def page(
        self, tenant: str, wanted: PredictionFilter, after: ListedRecord | None = None
    ) -> tuple[list[PredictionSnapshot], ListedRecord | None]:
        """Returns up to PAGE predictions, newest first, and `after` for the next page.

        Large predictions reduce this number: a page has at most READ_BYTES in total but always at
        least one prediction. If few predictions match, the page stops after PAGE_READS reads, so it
        may be short or even empty although there is a next page.

        Args:
            after: where the previous page ended. If None, starts with the newest prediction.
        """
        listed = await self._store.latest(
            tenant,
            PAGE + (PAGE_READS - 1) * SCAN_WINDOW + 1,
            before_s=wanted.before_s,
            since_s=wanted.after_s,
            after=after,
        )
        ids = [entry.record for entry in listed]
        checked = ids[: PAGE + (PAGE_READS - 1) * SCAN_WINDOW]
        page, end = await self._read_matching(checked, wanted)
        return page, listed[end - 1] if end < len(ids) else None

    async def _read_matching(
        self, ids: list[str], wanted: PredictionFilter
    ) -> tuple[list[PredictionSnapshot], int]:
        """Returns up to PAGE matching predictions, and how many of `ids` it checked."""
        selected = ids
        if wanted.model or wanted.status:
            selected = await self._store.select(ids, state=wanted.status or "", model=wanted.model)
        page: list[PredictionSnapshot] = []
        start, window, room_bytes = 0, PAGE, READ_BYTES
        for _ in range(PAGE_READS):
            if start == len(selected):
                break
            some = selected[start : start + window]
            read = await self._read_some(some, room_bytes, least=0 if page else 1)
            matching = [snapshot for snapshot in read.snapshots if wanted.matches(snapshot)]
            page += matching
            if len(page) >= PAGE:
                page = page[:PAGE]
                return page, ids.index(page[-1].prediction.record) + 1
            start += len(some) - len(read.remaining)
            if page and read.remaining:
                break
            if matching:
                room_bytes -= read.size_bytes
            window = SCAN_WINDOW
        return page, len(ids) if start == len(selected) else ids.index(selected[start])

    async def iterate_all(
        self, tenant: str, *, after: str, is_ascending: bool
    ) -> AsyncGenerator[PredictionSnapshot]:
        """Yields a tenant's listable predictions, newest first.

        They are read as needed, one page at a time.

        Args:
            after: yields only predictions after the one with this record. Empty means all
                predictions.
            is_ascending: True to list the oldest first.

        Raises:
            NotFound: the record `after` does not exist or can't be listed.
        """
        ids = [entry.record for entry in await self._store.latest(tenant, LISTED)]
        if is_ascending:
            ids.reverse()
        if after:
            if after not in ids:
                raise _not_found(after)
            ids = ids[ids.index(after) + 1 :]
        while ids:
            read = await self._read_some(ids[:PAGE])
            ids = [*read.remaining, *ids[PAGE:]]
            for snapshot in read.snapshots:
                yield snapshot

    async def _read_some(
        self, ids: list[str], max_bytes: int = READ_BYTES, *, least: int = 1
    ) -> PredictionsRead:
        """Reads the first few predictions.

        Args:
            least: minimum number of predictions to read, even if they exceed `max_bytes`.
        """
        sizes = list(itertools.accumulate(await self._store.sizes(ids)))
        count = max(least, sum(size <= max_bytes for size in sizes))
        records = await asyncio.gather(*map(self._records.read, ids[:count]))
        snapshots = [
            PredictionSnapshot(decode_document(record.document), record)
            for record in records
            if record is not None and record.document
        ]
        ended = [await self._end_if_late(snapshot) for snapshot in snapshots]
        return PredictionsRead(ended, ids[count:], sizes[count - 1] if count else 0)

    async def replace_input(
        self, snapshot: PredictionSnapshot, new_input: dict[str, Any]
    ) -> PredictionSnapshot:
        """Replaces the input of a finished prediction, as shown to callers.

        Raises:
            PredictionNotOver: it is not finished.
            NotFound: another request has deleted or changed the prediction.
            Overloaded: the prediction store is full.
        """
        if not snapshot.record.is_over:
            raise PredictionNotOver("the prediction has not finished, so it can't be changed yet")
        changed = msgspec.structs.replace(snapshot.prediction, input=new_input)
        document = _encode_within_bounds(changed)
        if not await self._store.put_document(
            changed.record,
            changed.tenant,
            document,
            keep_s=None,
            replaces=snapshot.record.document,
        ):
            raise _not_found(changed.id)
        record = msgspec.structs.replace(snapshot.record, document=document)
        return PredictionSnapshot(changed, record)

    async def cancel(self, tenant: str, prediction_id: str) -> PredictionSnapshot:
        """Cancels one of this tenant's predictions, unless it has finished.

        Raises:
            NotFound: the tenant has no such prediction, or it has expired.
        """
        snapshot = await self.read(tenant, prediction_id)
        if snapshot.record.is_over:
            return snapshot
        await self.end(snapshot)
        return await self.read(tenant, prediction_id)

    async def end(self, snapshot: PredictionSnapshot) -> PredictionSnapshot:
        """Cancels a prediction unless it has finished, and returns its final state.

        Unlike `cancel`, this also returns the final state of a prediction that has since been
        deleted.
        """
        prediction, record = snapshot
        if not record.is_over and await self._records.cancel(prediction.record) == "canceled":
            metrics.PREDICTIONS.labels(prediction.model, "canceled").inc()
        ended = await self._records.read_again(prediction.record, record.document)
        return await self._settle_canceled(PredictionSnapshot(prediction, ended or record))

    async def _settle_canceled(self, snapshot: PredictionSnapshot) -> PredictionSnapshot:
        """Records the cost of a canceled flow run, unless that has already been done."""
        prediction, record = snapshot
        if not (prediction.steps and record.awaits_receipts):
            return snapshot
        await self._flows.settle(prediction)
        settled = await self._records.read_again(prediction.record, record.document)
        return PredictionSnapshot(prediction, settled or record)

    async def delete(
        self,
        tenant: str,
        prediction_id: str,
        discard: Callable[[PredictionSnapshot], Awaitable[None]] | None = None,
    ) -> PredictionSnapshot:
        """Deletes one of this tenant's finished predictions. Returns its last snapshot.

        If its webhook has not yet been notified that it completed, the notification will have no
        input or output.

        Args:
            discard: deletes the prediction's objects, which are no longer referenced once the
                record is deleted.

        Raises:
            NotFound: the tenant has no such prediction, or it has expired.
            PredictionNotOver: the prediction is not finished.
            Unavailable: Redis or the object store is unreachable.
        """
        snapshot = await self._read_ended(tenant, prediction_id)
        # The record changes at most once more, when a canceled prediction gets its receipts.
        while not await self._try_to_delete(snapshot, discard):
            snapshot = await self._read_ended(tenant, prediction_id)
        metrics.PREDICTIONS.labels(snapshot.prediction.model, "deleted").inc()
        return snapshot

    async def _read_ended(self, tenant: str, prediction_id: str) -> PredictionSnapshot:
        """Returns a finished prediction after making sure that its cost is recorded."""
        snapshot = await self.read(tenant, prediction_id)
        if not snapshot.record.is_over:
            raise PredictionNotOver("the prediction has not finished; cancel it first")
        # Done before the steps are deleted, because a run's cost is recorded only in its steps.
        return await self._settle_canceled(snapshot)

    async def _try_to_delete(
        self,
        snapshot: PredictionSnapshot,
        discard: Callable[[PredictionSnapshot], Awaitable[None]] | None,
    ) -> bool:
        """Returns False if the record changed after it was read."""
        prediction, known = snapshot
        if await self._owes_webhook(prediction):
            # Stored before the deletion. If the deletion fails, the stored final state expires.
            await self._webhook_log.keep_end(prediction.record, encode_end(*snapshot))
        if discard is not None:
            await discard(snapshot)
        is_deleted = await self._store.delete(prediction.record, known, prediction.deadline_s)
        if is_deleted is None:
            raise _not_found(prediction.id)
        return is_deleted

    async def receipts_of_deleted(self, record_id: str) -> list[ItemOutcome]:
        """Returns the cost of a deleted prediction's items, without their results."""
        record = await self._records.read(record_id)
        return [] if record is None or record.reply is None else record.reply.outcomes

    async def _owes_webhook(self, prediction: Prediction) -> bool:
        if not prediction.webhook or "completed" not in prediction.webhook_events:
            return False
        attempts = await self._webhook_log.read(prediction.record)
        return not any(
            attempt.event == "completed" and _is_final(attempt.status) for attempt in attempts
        )

    async def refresh(self, snapshot: PredictionSnapshot) -> PredictionSnapshot:
        """Rereads a prediction. Returns `snapshot` unchanged while Redis is not responding.

        If the prediction has been deleted, its record has the result but not the document.
        """
        prediction, known = snapshot
        with suppress(Unavailable):
            record = await self._records.read_again(prediction.record, known.document)
            if record is not None:
                return await self._end_if_late(PredictionSnapshot(prediction, record))
        return snapshot

    @contextmanager
    def _register_waiter(
        self, request: InferenceRequest, *, waits: bool
    ) -> Iterator[PendingReply | None]:
        """Registers a waiter with the inbox. Without a waiter, the request polls the record."""
        record_id, replies = request.facts.request_id, request.model.replies
        # A repeated request polls while the first one waits, because the reply goes to only one of
        # the two.
        with ExitStack() as stack:
            waiter = None
            if waits and record_id not in self._waiters:
                with suppress(Unavailable):
                    waiter = stack.enter_context(self._inbox.waiter(record_id, 0, replies))
                    self._waiters[record_id] = waiter
                    stack.callback(self._waiters.pop, record_id)
            yield waiter

    async def _create_record(
        self, request: InferenceRequest, document: bytes, hold: Hold | None
    ) -> int:
        """Returns how many unfinished predictions the tenant has.

        0 if the record already existed.
        """
        new = request.new_record
        prediction = new.prediction
        if hold is not None:
            hold.is_stored = None
        try:
            unfinished = await self._store.create(
                prediction.record,
                prediction.tenant,
                document,
                deadline_s=prediction.deadline_s,
                keep_s=self._keep_s if new.keep_s is None else new.keep_s,
                reply_bytes=request.reply_bytes,
                model=prediction.model,
                hold=b"" if hold is None else hold.data,
                created_at_s=prediction.created_at_s,
            )
        except Overloaded:
            if hold is not None:
                hold.is_stored = False
            raise
        if hold is not None:
            hold.is_stored = bool(unfinished)
        return unfinished

    async def _create(
        self, request: InferenceRequest, waiter: PendingReply | None, hold: Hold | None
    ) -> Creation:
        prediction = request.new_record.prediction
        document = _encode_within_bounds(prediction)
        routed = self._canaries.route(request)
        items = routed.items()
        unfinished = await self._create_record(request, document, hold)
        if unfinished:
            await self._sender.send_recorded(routed, items, waiter, unfinished=unfinished)
            created = Record(
                state="starting", created_at_s=prediction.created_at_s, document=document
            )
            snapshot = PredictionSnapshot(prediction, created)
            return Creation(snapshot, self.refresh, waiter, is_new=True)
        snapshot = await self._wait_for_publish(await self._find_equal(prediction))
        if snapshot.is_unpublished:
            # Use the prediction as first created, because its rows have its record's times and IDs,
            # and its charge comes from the hold created with it.
            first = routed.as_first_asked(snapshot.prediction)
            await self._sender.send_recorded(first, items, waiter)
        return Creation(snapshot, self.refresh, waiter, is_new=False)

    async def _find_equal(self, prediction: Prediction) -> PredictionSnapshot:
        """Returns the prediction that an identical request created with this ID.

        Raises:
            PredictionIdTaken: the prediction was created by a different request, or was recently
                deleted.
            KeyReused: the same as PredictionIdTaken, but for an ID that comes from an
                Idempotency-Key.
        """
        try:
            existing = await self.read(prediction.tenant, prediction.id)
        except NotFound as error:
            if _GENERATED_ID.fullmatch(prediction.id):
                raise PredictionIdTaken(
                    "Idempotency-Key: the result stored for this key was deleted recently; use a "
                    "different key",
                    field="idempotency-key",
                ) from error
            raise PredictionIdTaken(
                f"{prediction.id} is the ID of a recently deleted prediction; use a different ID",
                field="id",
            ) from error
        if existing.prediction.digest == prediction.digest:
            return existing
        if _GENERATED_ID.fullmatch(prediction.id):
            raise KeyReused
        raise PredictionIdTaken(
            f"{prediction.id} is the ID of a prediction with a different input; use a different ID",
            field="id",
        )

    async def _wait_for_publish(self, snapshot: PredictionSnapshot) -> PredictionSnapshot:
        """Waits until the job is published, or its creator has had enough time to publish it."""
        while (
            snapshot.is_unpublished
            and time.time() < snapshot.record.created_at_s + CREATOR_PUBLISHES_S
        ):
            await asyncio.sleep(CREATOR_POLL_S)
            snapshot = await self.refresh(snapshot)
        return snapshot

    async def _end_if_late(self, snapshot: PredictionSnapshot) -> PredictionSnapshot:
        """Ends a prediction that no worker will end because it is late or its model was withdrawn.

        Also settles a canceled run if the process that canceled it died before doing so.
        """
        prediction, record = snapshot
        if record.awaits_receipts:
            with suppress(PenstockError):  # the next reader will retry
                return await self._settle_canceled(snapshot)
        error = None if record.is_over else self._why_over(prediction)
        if error is None:
            return snapshot
        outcome = "expired" if isinstance(error, DeadlineExceeded) else "withdrawn"
        if prediction.steps:
            with suppress(PenstockError):  # the next reader will retry
                if await self._flows.fail(prediction, error):
                    metrics.PREDICTIONS.labels(prediction.model, outcome).inc()
        else:
            reply = build_failed_reply(error.code, error.public_message)
            finish = await self._records.finish(prediction.record, "failed", reply)
            if finish is None:
                return snapshot
            if finish.is_ours:
                metrics.PREDICTIONS.labels(prediction.model, outcome).inc()
                events = prediction.webhook_events
                await self._webhooks.try_publish(prediction.record, events, "completed")
        return PredictionSnapshot(prediction, await self._records.read(prediction.record) or record)

    def _why_over(self, prediction: Prediction) -> PenstockError | None:
        if time.time() >= prediction.deadline_s + GRACE_S:
            limit_s = prediction.deadline_s - prediction.created_at_s
            return DeadlineExceeded(
                f"deadline exceeded: the prediction did not finish within {limit_s:.3g} s"
            )
        with suppress(UnknownModel):  # model removed from the catalog, so only the record remains
            model = self._canaries.find_given_up(prediction.model)
            if model is not None and version_of(model) == prediction.version:
                return withdrawn_error(model)
        return None


def _encode_within_bounds(prediction: Prediction) -> bytes:
    """Returns the document in its stored form.

    Raises:
        InputTooLarge: the document is larger than DOCUMENT_MAX_BYTES.
    """
    document = encode_document(prediction)
    if len(document) > DOCUMENT_MAX_BYTES:
        raise InputTooLarge(
            f"the request needs {len(document)} bytes of storage until its response is read, "
            f"which exceeds the maximum of {DOCUMENT_MAX_BYTES}; send less per request"
        )
    return document


def _not_found(prediction_id: str) -> NotFound:
    return NotFound(f"prediction {prediction_id[:80]!r} does not exist")


def _is_final(status: int | None) -> bool:
    """Returns whether a receiver that responds with this status gets no further attempts."""
    return status is not None and (200 <= status < 300 or status == HTTPStatus.GONE)
