"""A snapshot: a subscription's backlog and everything its topic has received since."""

from collections.abc import Collection

from pubsub_emulator.errors import FailedPrecondition, InvalidArgument
from pubsub_emulator.protos import Snapshot as SnapshotProto
from pubsub_emulator.state.arrivals import Arrivals
from pubsub_emulator.state.filter import Filter
from pubsub_emulator.state.journal import ChangeJournal
from pubsub_emulator.state.message import StoredMessage
from pubsub_emulator.state.subscription import SubscriptionState
from pubsub_emulator.state.timers import Timer
from pubsub_emulator.state.topic import Topic

LONGEST_LIFE_S = 7 * 86400.0
SHORTEST_LIFE_S = 3600.0


class Snapshot:
    """Holds messages until it expires. Like a subscription, a snapshot is attached to the topic.

    `holder` is the snapshot's number in the journal. `latest_expire_s` is its original expiration,
    in seconds since the epoch.
    """

    def __init__(
        self,
        proto: SnapshotProto,
        topic: Topic | None,
        journal: ChangeJournal,
        holder: int,
        latest_expire_s: float,
    ) -> None:
        self.path: str = proto.name
        self.proto = proto
        self.topic = topic
        self.holder = holder
        self.latest_expire_s = self.moment_s = latest_expire_s
        self._journal = journal
        self.timer: Timer | None = None
        # The source's filter is ignored, because the snapshot may be used with any of the topic's
        # other subscriptions.
        self.filter: Filter | None = None
        self.messages: dict[int, StoredMessage] = {}

    def add(self, message: StoredMessage, arrivals: Arrivals | None = None) -> None:
        """Hold a message that was unacked at the snapshot's creation or was published later."""
        self._journal.hold(message, self.holder)
        self.restore(message)

    def restore(self, message: StoredMessage) -> None:
        """Add a message that the snapshot held before a restart."""
        self.messages[message.sequence] = message

    def withdraw(self, sequences: Collection[int]) -> None:
        for message in [
            stored for stored in self.messages.values() if stored.sequence in sequences
        ]:
            self._journal.release(message, self.holder)
            del self.messages[message.sequence]

    def close(self) -> None:
        """Release all messages after the snapshot is deleted."""
        for message in self.messages.values():
            self._journal.release(message, self.holder)
        self.messages.clear()


def snapshot_expire_s(source: SubscriptionState, now_s: float) -> float:
    """Return when a new snapshot expires: 7 days minus the age of the oldest unacked message.

    Source: the `expire_time` field in
        https://cloud.google.com/pubsub/docs/reference/rpc/google.pubsub.v1#snapshot

    Raises:
        FailedPrecondition: the snapshot would expire in less than an hour.
    """
    oldest_s = min((message.published_s for message in source.backlog.messages), default=now_s)
    expire_s = oldest_s + LONGEST_LIFE_S
    if expire_s - now_s < SHORTEST_LIFE_S:
        raise FailedPrecondition(
            "The snapshot would expire in less than 1 hour, because the subscription's oldest "
            f"unacked message is {(now_s - oldest_s) / 86400:.1f} days old "
            f"(subscription={source.path})."
        )
    return expire_s


def check_expire_time(snapshot: Snapshot, expire_s: float, now_s: float) -> None:
    """Reject an expiration (seconds since the epoch) in the past or after the original one.

    Raises:
        InvalidArgument: the expiration is invalid; the message states the limit.
    """
    if expire_s <= now_s:
        raise InvalidArgument(
            f"The value for expire_time is in the past (snapshot={snapshot.path})."
        )
    if expire_s > snapshot.latest_expire_s:
        raise InvalidArgument(
            "The value for expire_time is too late: the snapshot's messages can't be "
            f"retained that long (snapshot={snapshot.path})."
        )
