"""Reads, replays, and discards a model's dead letters.

They are the messages that `jobs.<model>.dead.keep` keeps for a week. Reading them doesn't remove
any. A letter whose caller is still waiting (for an unfinished prediction) can be replayed. All
other callers have already received a response, from the function `dead_letter` or because of a
deadline, and won't get another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shared.broker.transport import (
    ReceivedMessage,
    Subscription,
    Transport,
    dead_letter_subscription_id,
    jobs_topic_id,
)
from shared.errors import BadInput, UndecodableMessage
from shared.messages import Envelope, decode_job, decode_leniently, encode_job, record_id
from shared.stores.records import Records

HELD_MAX_BYTES = 256 * 1024 * 1024
FIRST_WAIT_S, NEXT_WAIT_S = 5.0, 2.0
"""Maximum time to wait for the first and for each further letter. Brokers don't mark the last one.
"""
ACK_DEADLINE_S = 60
_DELIVERIES = "cloudpubsubdeadlettersourcedeliverycount"


@dataclass(frozen=True)
class Letter:
    """One dead letter.

    Attributes:
        message: the message as received, not acked.
        envelope: the caller and the job, or None if the attributes don't contain them.
        answered: the reason no caller is waiting for the letter anymore. Empty if its caller is
            still waiting.
    """

    message: ReceivedMessage
    envelope: Envelope | None
    answered: str

    @property
    def id(self) -> str:
        """The broker's ID for the message, which never changes."""
        return self.message.message_id

    @property
    def is_awaited(self) -> bool:
        return not self.answered

    @property
    def reason(self) -> str:
        """The reason the letter is here, plus its flow and step, if any."""
        attributes = {name.lower(): value for name, value in self.message.attributes.items()}
        attempts = attributes.get(_DELIVERIES)
        many = (
            f"not finished in {attempts} attempts" if attempts else "not finished in its attempts"
        )
        reason = attributes.get("penstock_reason") or many
        envelope = self.envelope
        if envelope is None or not envelope.flow:
            return reason
        return f"flow {envelope.flow}, step {envelope.step}: {reason}"


class HeldLetters:
    """One model's dead letters, held while the context of `hold_letters` is open.

    Args:
        model: the model's name as used in topic names.
        letters: oldest first, as far as the broker preserves order.
    """

    def __init__(
        self,
        transport: Transport,
        records: Records,
        model: str,
        subscription: Subscription,
        letters: Sequence[Letter],
    ) -> None:
        self._transport = transport
        self._records = records
        self.model = model
        self._subscription = subscription
        self.letters = letters

    def find(self, letter_id: str) -> Letter:
        """Returns the letter with this ID.

        Raises:
            BadInput: there is no such letter.
        """
        for letter in self.letters:
            if letter.id == letter_id:
                return letter
        raise BadInput(
            f"{self.model} has no dead letter {letter_id!r} among the {len(self.letters)} "
            "that were read",
            field="id",
        )

    async def replay(self, letter: Letter, deadline_s: float) -> None:
        """Publishes the job again, due in `deadline_s` seconds, and removes the letter.

        The job keeps its ID, so its record gets only one response.

        Raises:
            BadInput: no caller is waiting for the letter, or it can't be read.
            PenstockError: the broker did not accept it. The letter stays.
        """
        if not letter.is_awaited:
            raise BadInput(f"{letter.id}: {letter.answered}", field="id")
        try:
            job = decode_job(letter.message.data, letter.message.attributes)
        except UndecodableMessage as error:
            raise BadInput(f"{letter.id}: not a job: {error.message}", field="id") from error
        envelope = job.envelope
        envelope.deadline_s = time.time() + deadline_s
        envelope.published_at_s = time.time()
        envelope.start_by_s, envelope.attempt = 0.0, 1
        # Earlier crashes were caused by the problem that has now been fixed.
        await self._records.hand_over(record_id(envelope.request_id, envelope.part))
        data, attributes = encode_job(job)
        await self._transport.publish(jobs_topic_id(self.model), data, attributes)
        self._subscription.ack(letter.message)

    def discard(self, letter: Letter) -> None:
        self._subscription.ack(letter.message)


@asynccontextmanager
async def hold_letters(
    transport: Transport,
    records: Records,
    model: str,
    *,
    max_letters: int,
) -> AsyncIterator[HeldLetters]:
    """Holds up to `max_letters` of a model's dead letters.

    Letters that are not acked are returned at the end.

    Raises:
        Unavailable: the broker or Redis is unreachable.
    """
    async with transport.subscribe(
        dead_letter_subscription_id(model),
        max_messages=max_letters,
        max_bytes=HELD_MAX_BYTES,
        ack_deadline_s=ACK_DEADLINE_S,
    ) as subscription:
        messages: list[ReceivedMessage] = []
        received = aiter(subscription)
        while len(messages) < max_letters:
            try:
                async with asyncio.timeout(NEXT_WAIT_S if messages else FIRST_WAIT_S):
                    messages.append(await anext(received))
            except (TimeoutError, StopAsyncIteration):
                break
        letters = [await _letter(message, records) for message in messages]
        yield HeldLetters(transport, records, model, subscription, letters)


async def _letter(message: ReceivedMessage, records: Records) -> Letter:
    envelope = decode_leniently(message.attributes)
    if envelope is None:
        return Letter(message, None, "its attributes do not include the job's owner")
    part = 0 if envelope.flow else envelope.part  # a caller waits for the whole run
    record = await records.read(record_id(envelope.request_id, part))
    if record is not None and record.is_over:
        return Letter(message, envelope, f"its caller already got a response: {record.state}")
    if envelope.has_record or envelope.flow:
        return Letter(message, envelope, "" if record else "its prediction no longer exists")
    is_late = envelope.deadline_s <= time.time()
    return Letter(message, envelope, "its caller's deadline has passed" if is_late else "")
