"""A worker's jobs for one model, and the messages it sends to the broker about them.

Each job is acked, handed back, or still in progress. Replies that are ready at the same time and go
to the same inbox share a message if the API instance supports it, so the broker carries, bills for,
and delivers one message instead of many.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, Literal

from shared.broker.transport import (
    Publisher,
    ReceivedMessage,
    SmoothedDuration,
    Subscription,
    dead_letter_topic_id,
)
from shared.errors import BadInput, PenstockError, UndecodableMessage
from shared.messages import (
    MAX_REPLY_BATCH_BYTES,
    Envelope,
    ReplyBody,
    decode_leniently,
    encode_reply_batch,
    encode_reply_body,
    error_item,
    reply_attributes,
)
from shared.stores.record_state import ReleasedClaim
from shared.stores.records import Records
from shared.tracing.spans import read_attributes, set_current
from workers import metrics
from workers.jobs.spans import reply_span
from workers.scheduling.job import PulledJob

log = logging.getLogger(__name__)

FINISH_LIMIT_S = 1.0

EncodedReply = tuple[Envelope, bytes]
"""A job and its reply body, encoded by `encode_reply_body`."""

REASON_LIMIT_BYTES = 1000
"""Maximum length of a reason. Attributes are limited to 1,024 bytes."""


class JobRegistry:
    """Holds pulled jobs, and the background tasks that work on them, until both are finished.

    Flow control limits the number of jobs and tasks. Only this class acks or nacks a job.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._jobs: set[PulledJob] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.completion = SmoothedDuration()
        """Measures the time between the outcome of a job's last item and the job's ack."""
        self.is_leaving = False
        """True if the worker is shutting down. If the worker dies after that, no job is at fault.
        """

    def add(self, pulled: PulledJob) -> None:
        """Holds `pulled` until it is acked or handed back."""
        self._jobs.add(pulled)
        self._idle.clear()

    def find(self, record: str | None = None) -> list[PulledJob]:
        """Returns all jobs, or the jobs of one record.

        After a redelivery, one record can have two jobs. A flow run's record matches the jobs of
        its steps.
        """
        return [pulled for pulled in self._jobs if record in (None, pulled.record, pulled.run)]

    def ack(self, pulled: PulledJob) -> None:
        """Acks a finished job, unless it has been handed back."""
        if pulled in self._jobs:
            self.completion.record(time.monotonic() - pulled.over_since_s)
            pulled.subscription.ack(pulled.message)
            self._remove(pulled)

    def hand_back(self, pulled: PulledJob) -> None:
        """Nacks an unfinished job, so that the broker delivers it again."""
        metrics.HANDED_BACK.inc()
        claims = 0 if pulled.is_released else 1
        self.spawn(
            self._records.release([ReleasedClaim(pulled.record, claims, int(pulled.is_alone))])
        )
        pulled.subscription.nack(pulled.message)
        self._remove(pulled)

    async def leave(self) -> None:
        """Releases all claims, because the worker is shutting down and may be killed early."""
        self.is_leaving = True
        await self.release_claims(self._jobs)

    async def release_claims(self, pulled_jobs: Iterable[PulledJob]) -> None:
        """Releases the claims on jobs that stay here, so they don't count if the worker dies."""
        released = []
        for pulled in pulled_jobs:
            if pulled.is_claimed and not pulled.is_released:
                released.append(
                    ReleasedClaim(pulled.record, 1, int(pulled.is_alone), is_back=False)
                )
                pulled.is_released, pulled.is_alone = True, False
        if released:
            await self._records.release(released)

    async def hand_back_all(self) -> None:
        """Cancels all tasks and hands back all jobs, at shutdown.

        Tasks that publish replies get a moment to finish first.
        """
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=FINISH_LIMIT_S)
        for task in list(self._tasks):
            task.cancel()
        for pulled in list(self._jobs):
            pulled.end()
            self.hand_back(pulled)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=FINISH_LIMIT_S)

    async def wait_idle(self) -> None:
        """Returns once no jobs or tasks are left."""
        await self._idle.wait()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, which belongs to a held job, as a background task."""
        task = asyncio.create_task(work)
        self._idle.clear()
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._check_idle()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("finishing a job failed; this is a bug", exc_info=error)

    def _remove(self, pulled: PulledJob) -> None:
        self._jobs.discard(pulled)
        self._check_idle()

    def _check_idle(self) -> None:
        if not self._jobs and not self._tasks:
            self._idle.set()


class ReplyPublisher:
    """Publishes one model's replies, rejections, and dead letters."""

    def __init__(self, model: str, worker: str, publisher: Publisher) -> None:
        self._model = model
        self._worker = worker
        self._publisher = publisher

    async def publish(self, envelope: Envelope, body: bytes) -> bool:
        """Publishes a reply encoded by `encode_reply_body`, and waits until the broker has it.

        Returns False if the inbox no longer exists. A job without an inbox needs no reply.

        Raises:
            PenstockError: the broker did not accept the message.
        """
        if not envelope.inbox:
            return True
        try:
            with reply_span(envelope.inbox):
                attributes = reply_attributes(envelope.request_id, envelope.part, envelope.slot)
                await self._publisher.publish(envelope.inbox, body, attributes)
        except BadInput as error:
            return _note_refusal(envelope.inbox, error)
        return True

    async def publish_all(self, replies: Sequence[EncodedReply]) -> list[bool | PenstockError]:
        """Publishes replies for one inbox, and waits until the broker has them.

        Returns what `publish` would return or raise for each reply. All replies in one message
        succeed or fail together.
        """
        messages = list(_messages_of(replies))
        if len(messages) == 1:  # needs no other task
            return await self._publish_some(messages[0])
        sent: list[bool | PenstockError] = []
        for outcomes in await asyncio.gather(*map(self._publish_some, messages)):
            sent += outcomes
        return sent

    async def _publish_some(self, replies: Sequence[EncodedReply]) -> list[bool | PenstockError]:
        envelope, body = replies[0]
        try:
            if len(replies) == 1:
                return [await self.publish(envelope, body)]
            data, attributes = encode_reply_batch(
                [
                    (reply_envelope.request_id, reply_envelope.part, encoded)
                    for reply_envelope, encoded in replies
                ],
                envelope.slot,
            )
            await self._publisher.publish(envelope.inbox, data, attributes)
        except BadInput as error:
            return [_note_refusal(envelope.inbox, error)] * len(replies)
        except PenstockError as error:
            return [error] * len(replies)
        return [True] * len(replies)

    async def publish_dead_letter(self, message: ReceivedMessage, reason: str) -> None:
        """Copies `message` to the dead letters, with the reason it failed.

        Raises:
            PenstockError: the broker did not accept the message.
        """
        attributes = {**message.attributes, "penstock_reason": _truncate(reason)}
        await self._publisher.publish(dead_letter_topic_id(self._model), message.data, attributes)

    async def refuse(
        self, message: ReceivedMessage, error: UndecodableMessage, subscription: Subscription
    ) -> None:
        """Rejects a message that isn't a job for this model.

        Replies if the attributes name an inbox.

        The dead-letter function finishes the record and writes the row. Runs as a separate task.
        """
        set_current(read_attributes(message.attributes))
        facts = {"message_id": message.message_id, "reason": error.message}
        log.warning("message is not a job", extra=facts)
        metrics.UNDECODABLE.inc()
        envelope = decode_leniently(message.attributes)
        try:
            if envelope is not None:
                reason = error_item(error)
                body = ReplyBody([], reason, self._worker, replied_at_s=time.time())
                await self.publish(envelope, encode_reply_body(body))
            await self.publish_dead_letter(message, error.message)
        except PenstockError as failed:
            facts = {"message_id": message.message_id, "reason": failed.message}
            log.warning("rejection not sent", extra=facts)
            subscription.nack(message)
            return
        subscription.ack(message)


def _truncate(reason: str) -> str:
    return reason.encode(errors="replace")[:REASON_LIMIT_BYTES].decode(errors="ignore")


def _note_refusal(inbox: str, error: BadInput) -> Literal[False]:
    """Records that an API instance and its inbox are gone.

    Handing its jobs back would repeat them forever.
    """
    log.warning("inbox rejected a reply", extra={"inbox": inbox, "reason": error.message})
    metrics.REPLIES_REFUSED.inc()
    return False


def _messages_of(replies: Sequence[EncodedReply]) -> Iterator[list[EncodedReply]]:
    """Returns the replies for each message, in order."""
    some: list[EncodedReply] = []
    size_bytes = 0
    for envelope, body in replies:
        size_bytes += len(body)
        if some and not (_share(some[0][0], envelope) and size_bytes <= MAX_REPLY_BATCH_BYTES):
            yield some
            some, size_bytes = [], len(body)
        some.append((envelope, body))
    if some:
        yield some


def _share(first: Envelope, other: Envelope) -> bool:
    """Returns whether replies to two jobs with the same inbox may share a message."""
    takes_batches = bool(first.inbox and first.replies and other.replies)
    return takes_batches and first.slot == other.slot
