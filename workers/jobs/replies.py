"""Publishes what a job leads to: its reply, or a refusal and a dead letter."""

from __future__ import annotations

import logging
import time

from shared.errors import BadInput, PenstockError, UndecodableMessage
from shared.message_encoding import encode_reply_body, reply_attributes
from shared.messages import Envelope, ReplyBody, error_item
from shared.salvage import salvage_envelope
from shared.topics import dead_letter_topic_id
from shared.tracing.context import read_attributes, set_current
from shared.transport import Message, Publisher, Subscription
from workers import metrics
from workers.jobs.spans import reply_span

log = logging.getLogger(__name__)

REASON_LIMIT_BYTES = 1000
"""An attribute has at most 1,024."""


class ReplyPublisher:
    """Publishes replies, refusals and dead letters of one model.

    Args:
        model: the name of the model.
        worker: the name of this worker.
        publisher: sends the messages.
    """

    def __init__(self, model: str, worker: str, publisher: Publisher) -> None:
        self._model = model
        self._worker = worker
        self._publisher = publisher

    async def publish(self, envelope: Envelope, body: bytes) -> bool:
        """Publishes a reply, as `encode_reply_body` wrote it, and waits until the broker has it.

        Returns False if the inbox no longer exists. A job without an inbox needs no reply.

        Raises:
            PenstockError: the broker did not take it.
        """
        if not envelope.inbox:
            return True
        try:
            with reply_span(envelope.inbox):
                attributes = reply_attributes(envelope.request_id, envelope.part, envelope.slot)
                await self._publisher.publish(envelope.inbox, body, attributes)
        except BadInput as error:
            # The API instance and its inbox are gone. Handing the job back would repeat it forever.
            facts = {"inbox": envelope.inbox, "reason": error.message}
            log.warning("inbox refused a reply", extra=facts)
            metrics.REPLIES_REFUSED.inc()
            return False
        return True

    async def publish_dead_letter(self, message: Message, reason: str) -> None:
        """Copies `message` to the dead letters, with the reason it failed.

        Raises:
            PenstockError: the broker did not take it.
        """
        attributes = {**message.attributes, "penstock_reason": _shortened(reason)}
        await self._publisher.publish(dead_letter_topic_id(self._model), message.data, attributes)

    async def refuse(
        self, message: Message, error: UndecodableMessage, subscription: Subscription
    ) -> None:
        """Ends a message that is not a job of this model. Replies if the attributes name an inbox.

        The dead-letter function ends its record and writes its row. Runs as a task of its own.
        """
        set_current(read_attributes(message.attributes))
        facts = {"message_id": message.message_id, "reason": error.message}
        log.warning("message is no job", extra=facts)
        metrics.UNDECODABLE.inc()
        envelope = salvage_envelope(message.attributes)
        try:
            if envelope is not None:
                reason = error_item(error)
                body = ReplyBody([], reason, self._worker, replied_at_s=time.time())
                await self.publish(envelope, encode_reply_body(body))
            await self.publish_dead_letter(message, error.message)
        except PenstockError as failed:
            facts = {"message_id": message.message_id, "reason": failed.message}
            log.warning("refusal not sent", extra=facts)
            subscription.nack(message)
            return
        subscription.ack(message)


def _shortened(reason: str) -> str:
    return reason.encode(errors="replace")[:REASON_LIMIT_BYTES].decode(errors="ignore")
