"""A subscription's delivery settings, parsed once into plain numbers for the hot path."""

from dataclasses import dataclass
from typing import Any, Literal

from pubsub_emulator.protos import Subscription

DEFAULT_MINIMUM_BACKOFF_S = 10.0
DEFAULT_MAXIMUM_BACKOFF_S = 600.0
DEFAULT_MAX_DELIVERY_ATTEMPTS = 5

Kind = Literal["PULL", "PUSH", "BIGQUERY"]
"""PULL: clients fetch messages. For PUSH and BIGQUERY subscriptions, this server delivers the
messages.
"""


@dataclass(frozen=True)
class DeliverySettings:
    """Plain copies of the fields that control delivery. Times are in seconds."""

    ack_deadline_s: float
    retention_s: float
    retain_acked: bool
    is_ordered: bool
    exactly_once: bool
    ttl_s: float | None
    """None: never expires."""
    max_delivery_attempts: int
    """0: no dead-letter policy."""
    dead_letter_topic: str
    minimum_backoff_s: float
    maximum_backoff_s: float
    """If both are 0, there is no retry policy, and messages are redelivered immediately."""
    push_endpoint: str
    kind: Kind

    @classmethod
    def of(cls, proto: Subscription) -> "DeliverySettings":
        """Parse a validated proto with its defaults filled in."""
        minimum_backoff_s = maximum_backoff_s = 0.0
        if proto.HasField("retry_policy"):
            minimum_backoff_s = seconds_of(proto.retry_policy.minimum_backoff)
            maximum_backoff_s = seconds_of(proto.retry_policy.maximum_backoff)
        has_dead_letters = proto.HasField("dead_letter_policy")
        never_expires = not proto.expiration_policy.HasField("ttl")
        return cls(
            ack_deadline_s=float(proto.ack_deadline_seconds),
            retention_s=seconds_of(proto.message_retention_duration),
            retain_acked=proto.retain_acked_messages,
            is_ordered=proto.enable_message_ordering,
            exactly_once=proto.enable_exactly_once_delivery,
            ttl_s=None if never_expires else seconds_of(proto.expiration_policy.ttl),
            max_delivery_attempts=proto.dead_letter_policy.max_delivery_attempts
            if has_dead_letters
            else 0,
            dead_letter_topic=proto.dead_letter_policy.dead_letter_topic,
            minimum_backoff_s=minimum_backoff_s,
            maximum_backoff_s=maximum_backoff_s,
            push_endpoint=proto.push_config.push_endpoint,
            kind=_kind_of(proto),
        )

    def backoff_s(self, attempts: int) -> float:
        """Return the backoff in seconds, doubling from the minimum to the maximum."""
        doublings = min(attempts - 1, 30)
        return min(self.minimum_backoff_s * 2.0**doublings, self.maximum_backoff_s)


def _kind_of(proto: Subscription) -> Kind:
    if proto.HasField("bigquery_config"):
        return "BIGQUERY"
    return "PUSH" if proto.push_config.push_endpoint else "PULL"


def seconds_of(duration: Any) -> float:
    """Return a protobuf Duration or Timestamp as seconds."""
    return float(duration.seconds + duration.nanos / 1e9)
