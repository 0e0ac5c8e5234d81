"""A subscription's deliveries and consumers; wakes consumers for new deliveries.

Consumers take as many messages as they have capacity for; nothing is queued for them here. A stream
that can't write therefore leaves messages for others, and messages that arrive while it is writing
go out in one response.
"""

from collections.abc import Callable
from typing import Literal

from pubsub_emulator.errors import PubsubError
from pubsub_emulator.state.message import StoredMessage
from pubsub_emulator.state.timers import Timer


class Consumer:
    """A stream, a waiting pull or a push loop, with its flow control.

    Args:
        wake: called when there may be messages to take, or when `ended` has been set.
        ack_deadline_s: lease duration, in seconds, for messages it takes.
        max_messages: maximum outstanding messages. 0: no limit.
        max_bytes: maximum outstanding bytes. 0: no limit.
    """

    def __init__(
        self,
        wake: Callable[[], None],
        ack_deadline_s: float,
        max_messages: int = 0,
        max_bytes: int = 0,
    ) -> None:
        self.wake = wake
        self.ack_deadline_s = ack_deadline_s
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.outstanding_messages = 0
        self.outstanding_bytes = 0
        self.is_waiting = False
        self.has_left = False
        self.keys: dict[str, None] = {}
        """Ordering keys whose next message may go here because this consumer holds earlier ones.
        """
        self.ended: PubsubError | None = None

    @property
    def has_room(self) -> bool:
        """True if flow control allows the consumer another message."""
        return (self.max_messages <= 0 or self.outstanding_messages < self.max_messages) and (
            self.max_bytes <= 0 or self.outstanding_bytes < self.max_bytes
        )


State = Literal["arriving", "ready", "held", "backoff", "leased", "settled"]
"""A delivery's state.

- arriving: waits until the whole publish has been added, or until it has been committed and its
  response has been sent.
- ready: can be handed to the next consumer.
- held: waits behind an older message with the same ordering key. Only the consumer that holds the
  older message can take it.
- backoff: was nacked, or its lease expired; held back by the retry policy.
- leased: held by a consumer until it is acked or nacked, or until its lease expires.
- settled: has left the subscription.

Not an enum, because looking up a member takes 0.1 us and happens ten times per message.
"""


class Delivery:
    """A message that has not been acked yet.

    `number` is unique in the subscription, even after a seek.

    `handouts` counts how many times the message was handed to a consumer. `attempts` is 1 + nacks +
    expired leases at each delivery, as `delivery_attempt` is defined; handouts revoked for another
    reason don't count.

    `failure` is the reason the last attempt failed, if this server made that attempt.
    """

    __slots__ = (
        "attempts",
        "consumer",
        "failure",
        "handouts",
        "message",
        "number",
        "state",
        "timer",
    )

    def __init__(self, number: int, message: StoredMessage) -> None:
        self.number = number
        self.message = message
        self.attempts = 0
        self.handouts = 0
        self.failure = ""
        self.state: State = "ready"
        self.consumer: Consumer | None = None
        self.timer: Timer | None = None

    def stop_timer(self) -> None:
        """Cancel the timer that ends the lease or backoff."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Consumers:
    """All of a subscription's consumers.

    Hungry consumers are waiting; woken ones are about to take messages.
    """

    def __init__(self) -> None:
        self._joined: set[Consumer] = set()
        self._hungry: dict[Consumer, None] = {}
        self._woken: set[Consumer] = set()

    def __len__(self) -> int:
        return len(self._joined)

    def join(self, consumer: Consumer) -> None:
        """Connect a consumer. A consumer gets messages only when it takes them."""
        consumer.has_left = False
        self._joined.add(consumer)

    def leave(self, consumer: Consumer, ready: int) -> None:
        """Disconnect a consumer.

        If it had already been woken, wake the next one. Its leases no longer wake it.
        """
        consumer.is_waiting = False
        consumer.has_left = True
        consumer.keys.clear()
        self._joined.discard(consumer)
        self._hungry.pop(consumer, None)
        self._woken.discard(consumer)
        self.offer(ready)

    def end(self, error: PubsubError) -> None:
        """Notify every consumer that the subscription can no longer be consumed."""
        for consumer in list(self._joined):
            consumer.ended = error
            consumer.wake()

    def offer(self, ready: int) -> None:
        """Wake idle consumers, longest-waiting first, one for each ready message."""
        while self._hungry and len(self._woken) < ready:
            consumer = next(iter(self._hungry))
            del self._hungry[consumer]
            self._woken.add(consumer)
            consumer.wake()

    def share(self, consumer: Consumer, ready: int) -> int:
        """Return a consumer's share of the ready messages, split evenly among idle consumers."""
        self._hungry.pop(consumer, None)
        self._woken.discard(consumer)
        consumer.is_waiting = False
        return -(-ready // (1 + len(self._hungry) + len(self._woken)))

    def wait(self, consumer: Consumer) -> None:
        """Wake the consumer when there are messages again, or when it has capacity again."""
        consumer.is_waiting = True
        if consumer.has_room:
            self._hungry[consumer] = None

    def busy(self, consumer: Consumer, ready: int) -> None:
        """Mark the consumer as busy writing. New messages go to others."""
        self._hungry.pop(consumer, None)
        self._woken.discard(consumer)
        consumer.is_waiting = False
        self.offer(ready)

    def took(self, consumer: Consumer, delivery: Delivery) -> None:
        """Count a lease toward the consumer's flow control."""
        delivery.consumer = consumer
        consumer.outstanding_messages += 1
        consumer.outstanding_bytes += delivery.message.size_bytes

    def gave_back(self, delivery: Delivery, ready: int) -> None:
        """Stop counting a lease. A consumer that was full may have capacity again."""
        consumer, delivery.consumer = delivery.consumer, None
        if consumer is None:
            return
        consumer.outstanding_messages -= 1
        consumer.outstanding_bytes -= delivery.message.size_bytes
        if consumer.is_waiting and consumer.has_room and consumer not in self._woken:
            self._hungry.setdefault(consumer, None)
            self.offer(ready)
            self.follow(consumer)

    def follow(self, consumer: Consumer) -> None:
        """Wake a consumer if it can take more messages with an ordering key that it holds."""
        if consumer.keys and consumer.is_waiting and consumer.has_room:
            consumer.wake()
