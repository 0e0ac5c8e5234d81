"""One snapshot: the backlog of a subscription when it was made, and all that its topic got since."""

from infra.local.pubsub.errors import FailedPrecondition, InvalidArgument
from infra.local.pubsub.filter import Filter
from infra.local.pubsub.message import StoredMessage
from infra.local.pubsub.protos import Snapshot as SnapshotProto
from infra.local.pubsub.subscription import Subscription
from infra.local.pubsub.timers import Timer
from infra.local.pubsub.topic import Topic

LONGEST_LIFE_S = 7 * 86400.0
SHORTEST_LIFE_S = 3600.0


class Snapshot:
    """Holds messages until it expires; attached to the topic like a subscription."""

    def __init__(self, proto: SnapshotProto, topic: Topic, source: Subscription, expire_s: float) -> None:
        self.path: str = proto.name
        self.proto = proto
        self.topic: Topic | None = topic
        self.latest_expire_s = expire_s
        self.timer: Timer | None = None
        # The source's filter is left out: the snapshot may be used on another subscription of the topic.
        self.filter: Filter | None = None
        self.messages: dict[int, StoredMessage] = {message.sequence: message for message in source.backlog.messages}

    def add(self, message: StoredMessage) -> None:
        """Keep a message that was published after the snapshot was made."""
        self.messages[message.sequence] = message


def snapshot_expire_s(source: Subscription, now_s: float) -> float:
    """Return when a snapshot made now expires: 7 days less the age of the oldest unacked message.

    Source: the field `expire_time` of https://cloud.google.com/pubsub/docs/reference/rpc/google.pubsub.v1#snapshot

    Raises:
        FailedPrecondition: it would live for less than an hour.
    """
    oldest_s = min((message.published_s for message in source.backlog.messages), default=now_s)
    expire_s = oldest_s + LONGEST_LIFE_S
    if expire_s - now_s < SHORTEST_LIFE_S:
        raise FailedPrecondition(
            "The snapshot would expire in less than 1 hour, because the subscription's oldest unacked message is "
            f"{(now_s - oldest_s) / 86400:.1f} days old (subscription={source.path})."
        )
    return expire_s


def check_expire_time(snapshot: Snapshot, expire_s: float, now_s: float) -> None:
    """Refuse an updated end (seconds since the epoch) in the past, or after the one it was made with.

    Raises:
        InvalidArgument: with the bound that it breaks.
    """
    if expire_s <= now_s:
        raise InvalidArgument(f"The value for expire_time is in the past (snapshot={snapshot.path}).")
    if expire_s > snapshot.latest_expire_s:
        raise InvalidArgument(
            "The value for expire_time is later than the messages of the snapshot can be kept "
            f"(snapshot={snapshot.path})."
        )
