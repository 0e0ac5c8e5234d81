"""Finishes a job that no worker could: its record, the caller's reply, the webhook event, and rows.

A process may die after any step, so if the message is redelivered, every step is repeated. This is
safe, because the caller accepts only one reply, and events and rows have IDs. A job that a worker
has already replied to is left unchanged; workers send such jobs here for inspection.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec
from prometheus_client import Counter

from shared.broker.transport import (
    WEBHOOKS_TOPIC_ID,
    Publisher,
    ReceivedMessage,
    dead_letter_topic_id,
)
from shared.canary.forwarding import forward
from shared.errors import (
    BadInput,
    Canceled,
    ModelFailed,
    PenstockError,
    Unavailable,
    UndecodableMessage,
    UnknownModel,
)
from shared.flows.engine import FlowEngine
from shared.messages import (
    Envelope,
    ItemOutcome,
    Reply,
    ReplyBody,
    decode_job,
    decode_leniently,
    decode_reply_body,
    encode_reply,
    encode_reply_body,
    error_item,
    failure,
    record_id,
)
from shared.models.catalog import Catalog, model_of_canary
from shared.stores.flow_runs import FlowRuns
from shared.stores.record_state import Finish
from shared.stores.records import Records
from shared.tracing.spans import STAGE, Attributes, span
from shared.usage.row import Row, row_of
from shared.webhooks.publisher import WebhookPublisher

ANSWERED_BY = "dead-letter"
"""Worker name used in the replies and rows written here."""
_ATTEMPTS = "cloudpubsubdeadlettersourcedeliverycount"

DEAD_LETTERS = Counter(
    "penstock_functions_dead_letters_total",
    "Dead letters, by action taken: answered, repeated, forwarded (of a canary, to the other "
    "revision), none",
    ["end"],
)

log = logging.getLogger(__name__)


class UsageTable(Protocol):
    """The destination of rows."""

    async def write(self, rows: list[Row]) -> None:
        """Returns once `rows` are in the table.

        Raises:
            Unavailable: it is unknown whether the rows were written.
        """


class DeadLetters:
    """Finishes dead-lettered jobs."""

    def __init__(
        self,
        records: Records,
        runs: FlowRuns,
        publisher: Publisher,
        table: UsageTable,
        catalog: Catalog,
        region: str,
    ) -> None:
        self._records = records
        self._publisher = publisher
        self._webhooks = WebhookPublisher(publisher)
        self._table = table
        self._catalog = catalog
        self._region = region
        self._flows = FlowEngine(catalog, records, runs, publisher)

    async def answer(self, message: ReceivedMessage) -> None:
        """Performs the dead-lettering steps that a job's worker couldn't.

        Raises:
            UndecodableMessage: the message does not identify its job.
            PenstockError: a step failed and should be retried.
        """
        envelope = decode_leniently(message.attributes)
        if envelope is None:
            raise UndecodableMessage(
                "its attributes do not include the job's owner", field="attributes"
            )
        facts: Attributes = {
            STAGE: "dead_letter",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.message.id": message.message_id,
            "penstock.request_id": envelope.request_id,
        }
        topic_id = dead_letter_topic_id(self._catalog.find_deployed_name(envelope.model))
        with span(f"process {topic_id}", "consumer", facts, parent=envelope.trace):
            if envelope.flow:
                await self._end_step(envelope, message)
            elif not await self._forward(envelope, message):
                await self._answer(envelope, message)

    async def _end_step(self, envelope: Envelope, message: ReceivedMessage) -> None:
        """Fails a flow step's items, which also fails the run unless the step has a default."""
        items, error = _reading(message)
        facts = {
            "request_id": envelope.request_id,
            "model": envelope.model,
            "flow": envelope.flow,
            "step": envelope.step,
            "reason": error.message,
        }
        log.warning("dead letter", extra=facts)
        if isinstance(error, UndecodableMessage):  # its items are unknown
            await self._flows.abandon(envelope.request_id, error)
            DEAD_LETTERS.labels("answered").inc()
            return
        job = decode_job(message.data, message.attributes)
        end = await self._flows.mark(job, [failure(item, error) for item in items])
        planned = await self._flows.advance(job, end)
        # Workers know when they pulled an item, so they write the rows for the items they finish.
        ours = [outcome for outcome in end.outcomes if outcome.receipt.pulled_at_s is None]
        rows = [self._row_of(envelope, outcome, time.time()) for outcome in ours]
        rows += [self._row_of(other, outcome, time.time()) for _, other, outcome in planned]
        if rows:
            await self._table.write(rows)
        DEAD_LETTERS.labels("answered" if ours else "none").inc()

    async def _forward(self, envelope: Envelope, message: ReceivedMessage) -> bool:
        """Forwards a job that no canary worker could finish to the other revision.

        Returns whether the job belonged to a canary.
        """
        if (model := model_of_canary(envelope.model)) is None:
            return False
        await self._records.hand_over(record_id(envelope.request_id, envelope.part))
        try:
            await forward(self._publisher, model, message)
        except UndecodableMessage:
            return False
        DEAD_LETTERS.labels("forwarded").inc()
        return True

    async def _answer(self, envelope: Envelope, message: ReceivedMessage) -> None:
        items, error = _reading(message)
        body = ReplyBody(
            [failure(item, error) for item in items], worker=ANSWERED_BY, replied_at_s=time.time()
        )
        if isinstance(error, UndecodableMessage):  # its items are unknown
            body.error = error_item(error)
        ended = await self._end(envelope, body)
        if ended is None:
            DEAD_LETTERS.labels("none").inc()
            return
        answered, end = ended
        facts = {
            "request_id": envelope.request_id,
            "model": envelope.model,
            "reason": error.message,
            "end": end,
        }
        log.warning("dead letter", extra=facts)
        await self._reply(envelope, answered)
        await self._notify_webhook(envelope)
        await self._table.write([self._row(envelope, answered, item) for item in range(len(items))])
        DEAD_LETTERS.labels(end).inc()

    async def _end(self, envelope: Envelope, ours: ReplyBody) -> tuple[ReplyBody, str] | None:
        """Finishes the record. Returns the reply from this attempt or an earlier one.

        Returns None if the job was already finished elsewhere.
        """
        record = record_id(envelope.request_id, envelope.part)
        finish = await self._records.finish(record, "failed", encode_reply_body(ours))
        if finish is not None and finish.is_lost_to_cancel:
            body = encode_reply_body(_mark_canceled(ours))
            finish = await self._records.finish(record, "canceled", body)
        if finish is None and envelope.has_record:
            raise Unavailable("the record could not be completed")
        if finish is None or finish.is_ours:
            return _mark_canceled(
                ours
            ) if finish and finish.state == "canceled" else ours, "answered"
        earlier = _answer_of(finish)
        if earlier is None or earlier.worker != ANSWERED_BY:
            return None
        return _mark_canceled(earlier) if finish.state == "canceled" else earlier, "repeated"

    async def _reply(self, envelope: Envelope, body: ReplyBody) -> None:
        if envelope.inbox:
            data, attributes = encode_reply(_reply_of(envelope, body))
            with _refusal_logged(envelope.inbox):
                await self._publisher.publish(envelope.inbox, data, attributes)

    async def _notify_webhook(self, envelope: Envelope) -> None:
        record = record_id(envelope.request_id, envelope.part)
        with _refusal_logged(WEBHOOKS_TOPIC_ID):
            await self._webhooks.publish(record, envelope.webhook_events, "completed")

    def _row(self, envelope: Envelope, answered: ReplyBody, item: int) -> Row:
        return self._row_of(envelope, answered.outcomes[item], answered.replied_at_s)

    def _row_of(self, envelope: Envelope, outcome: ItemOutcome, replied_at_s: float) -> Row:
        try:
            model = self._catalog.find_deployed(envelope.model)
        except UnknownModel:
            model = None
        return row_of(
            envelope,
            outcome,
            model,
            replied_at_s=replied_at_s,
            region=self._region,
            worker=ANSWERED_BY,
        )


@contextmanager
def _refusal_logged(topic_id: str) -> Iterator[None]:
    """Ignores a missing topic, because its subscribers are gone and retrying is pointless."""
    try:
        yield
    except BadInput as error:
        log.warning("topic rejected a message", extra={"topic": topic_id, "reason": error.message})


def _reading(message: ReceivedMessage) -> tuple[list[int], PenstockError]:
    """Returns a dead letter's items (only the first if the body can't be read) and their error."""
    attributes = {name.lower(): value for name, value in message.attributes.items()}
    attempts = attributes.get(_ATTEMPTS, "its")
    reason = attributes.get("penstock_reason") or (
        f"no worker was able to finish it in {attempts} attempts"
    )
    try:
        return [
            item.index for item in decode_job(message.data, message.attributes).body.items
        ], ModelFailed(reason)
    except UndecodableMessage as error:
        return [0], error


def _reply_of(envelope: Envelope, body: ReplyBody) -> Reply:
    return Reply(envelope.request_id, envelope.part, envelope.slot, body)


def _mark_canceled(body: ReplyBody) -> ReplyBody:
    """Returns the same body, but addressed to a caller that no longer wants a reply."""
    outcomes = [failure(outcome.index, Canceled(), outcome.receipt) for outcome in body.outcomes]
    return msgspec.structs.replace(body, outcomes=outcomes)


def _answer_of(finish: Finish) -> ReplyBody | None:
    return None if finish.reply is None else decode_reply_body(finish.reply)
