"""One message in one subscription: how often it was delivered, who holds it, and what ends that."""

from enum import Enum, auto
from typing import TYPE_CHECKING

from infra.local.pubsub.message import StoredMessage
from infra.local.pubsub.timers import Timer

if TYPE_CHECKING:
    from infra.local.pubsub.consumers import Consumer


class State(Enum):
    """Where a delivery stands; every delivery is in exactly one place."""

    READY = auto()
    """Can be handed to the next consumer."""
    HELD = auto()
    """Waits behind an older message of its ordering key."""
    BACKOFF = auto()
    """Was nacked or ran out, and the retry policy holds it back."""
    LEASED = auto()
    """Is with a consumer until acked, nacked or out of time."""
    SETTLED = auto()
    """Has left the subscription."""


class Delivery:
    """A message on its way to being acked; `number` is unique in the subscription, also after a seek.

    `attempts` counts hand-outs: 1 + nacks + expired leases at any delivery, as `delivery_attempt` is defined.
    """

    __slots__ = ("attempts", "consumer", "message", "number", "state", "timer")

    def __init__(self, number: int, message: StoredMessage) -> None:
        self.number = number
        self.message = message
        self.attempts = 0
        self.state = State.READY
        self.consumer: Consumer | None = None
        self.timer: Timer | None = None

    def stop_timer(self) -> None:
        """Cancel the lease's or the backoff's end."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
