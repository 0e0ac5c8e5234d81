"""A published message, shared by all the subscriptions, snapshots and logs that hold it."""

from collections.abc import Callable

from pubsub_emulator.errors import ResourceExhausted
from pubsub_emulator.protos import PubsubMessage

MESSAGE_COST_BYTES = 320
"""Memory a message uses in this process, in addition to its own bytes."""
ATTRIBUTE_COST_BYTES = 180
"""Memory per attribute, which is stored both in the serialized message and as text."""
DELIVERY_COST_BYTES = 700
"""Maximum memory per subscription that holds the message, reached while the message is leased."""
# All three values come from the memory growth of a process with 60,000 messages, rounded up
# (CPython 3.11).


class Storage:
    """Counts the memory used by all messages in this process.

    A message's bytes are counted once, no matter how many subscriptions hold it.

    Args:
        limit_bytes: maximum memory in bytes.
        drop: called with the sequence number of each message that is no longer held.
    """

    def __init__(self, limit_bytes: int, drop: Callable[[int], None]) -> None:
        self.limit_bytes = limit_bytes
        self.drop = drop
        self.held_bytes = 0

    def admit(self, cost_bytes: int) -> None:
        """Reject a publish that would exceed the limit.

        Args:
            cost_bytes: memory that the messages will use, as returned by `cost_of`.

        Raises:
            ResourceExhausted: consumers have fallen too far behind for the memory limit.
        """
        if self.held_bytes + cost_bytes > self.limit_bytes:
            raise ResourceExhausted(
                f"Messages take up {self.held_bytes} bytes of the embedded server's memory, and "
                f"the maximum is {self.limit_bytes}. Acknowledge or delete some, or start it "
                "with a higher limit."
            )


def cost_of(size_bytes: int, attributes: int, messages: int = 1) -> int:
    """Return the memory used by messages, not counting the subscriptions that hold them.

    Args:
        size_bytes: total serialized size in bytes.
    """
    return size_bytes + MESSAGE_COST_BYTES * messages + ATTRIBUTE_COST_BYTES * attributes


class StoredMessage:
    """A message whose id and time were set by the server.

    `sequence` is the message's position in the order of arrival across all topics. `serialized` is
    used in each response and in the journal, so it is created only once.
    """

    __slots__ = (
        "attributes",
        "cost_bytes",
        "ordering_key",
        "published_s",
        "sequence",
        "serialized",
        "size_bytes",
        "storage",
    )

    def __init__(
        self,
        proto: PubsubMessage,
        attributes: dict[str, str],
        sequence: int,
        published_s: float,
        storage: Storage,
    ) -> None:
        self.sequence = sequence
        self.published_s = published_s
        self.attributes = attributes
        self.ordering_key: str = proto.ordering_key
        self.serialized: bytes = proto.SerializeToString()
        self.size_bytes = len(self.serialized)
        self.storage = storage
        self.cost_bytes = cost_of(self.size_bytes, len(attributes))
        storage.held_bytes += self.cost_bytes

    @property
    def proto(self) -> PubsubMessage:
        """Parse the message again and return it. The result belongs to the caller."""
        return PubsubMessage.FromString(self.serialized)

    def __del__(self) -> None:
        # Backlogs, snapshots, logs and leases all hold messages; only the reference count covers
        # them all.
        self.storage.held_bytes -= self.cost_bytes
        self.storage.drop(self.sequence)
