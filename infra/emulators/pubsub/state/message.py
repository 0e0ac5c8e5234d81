"""A published message, shared by all subscriptions, snapshots and logs that hold it."""

from collections.abc import Callable

from infra.emulators.pubsub.errors import ResourceExhausted
from infra.emulators.pubsub.protos import PubsubMessage


class Storage:
    """Counts the bytes of all messages held, each once however many subscriptions hold it.

    Args:
        limit_bytes: what may be held at most.
        drop: called with the sequence of each message that is no longer held.
    """

    def __init__(self, limit_bytes: int, drop: Callable[[int], None]) -> None:
        self.limit_bytes = limit_bytes
        self.drop = drop
        self.held_bytes = 0

    def admit(self, size_bytes: int) -> None:
        """Refuse a publish of `size_bytes` that would go over the limit.

        Raises:
            ResourceExhausted: consumers are too far behind for the memory this server may use.
        """
        if self.held_bytes + size_bytes > self.limit_bytes:
            raise ResourceExhausted(
                f"The embedded server holds {self.held_bytes} bytes of messages, of at most "
                f"{self.limit_bytes}. Acknowledge or delete some, or start it with a higher limit."
            )


class StoredMessage:
    """One message with its server-given id and time.

    `sequence` is the order of arrival over all topics.
    """

    __slots__ = (
        "_storage",
        "attributes",
        "ordering_key",
        "proto",
        "published_s",
        "sequence",
        "size_bytes",
    )

    def __init__(
        self, proto: PubsubMessage, sequence: int, published_s: float, storage: Storage
    ) -> None:
        self.proto = proto
        self.sequence = sequence
        self.published_s = published_s
        self.attributes: dict[str, str] = dict(proto.attributes)
        self.ordering_key: str = proto.ordering_key
        self.size_bytes: int = proto.ByteSize()
        self._storage = storage
        storage.held_bytes += self.size_bytes

    def __del__(self) -> None:
        # Backlogs, snapshots, logs and leases all hold messages; the reference count is the one
        # true ledger.
        self._storage.held_bytes -= self.size_bytes
        self._storage.drop(self.sequence)
