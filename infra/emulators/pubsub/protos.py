"""The raw protobuf classes of `google.pubsub.v1`, as the installed client carries them.

The proto-plus wrappers cost about 0.1 ms a message, so nothing here touches them after import.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

from google.protobuf import empty_pb2
from google.pubsub_v1.types import pubsub

if TYPE_CHECKING:
    # The classes are made at run time, so a checker knows them only by name.
    Message: TypeAlias = Any
    PubsubMessage: TypeAlias = Any
    PublishRequest: TypeAlias = Any
    PullResponse: TypeAlias = Any
    PushConfig: TypeAlias = Any
    Snapshot: TypeAlias = Any
    StreamingPullRequest: TypeAlias = Any
    StreamingPullResponse: TypeAlias = Any
    Subscription: TypeAlias = Any
    Topic: TypeAlias = Any
else:
    Message = Any
    PubsubMessage = pubsub.PubsubMessage.pb()
    PublishRequest = pubsub.PublishRequest.pb()
    PullResponse = pubsub.PullResponse.pb()
    PushConfig = pubsub.PushConfig.pb()
    Snapshot = pubsub.Snapshot.pb()
    StreamingPullRequest = pubsub.StreamingPullRequest.pb()
    StreamingPullResponse = pubsub.StreamingPullResponse.pb()
    Subscription = pubsub.Subscription.pb()
    Topic = pubsub.Topic.pb()


def message_class(name: str) -> Any:
    """Return the raw protobuf class of `google.pubsub.v1.<name>`."""
    return getattr(pubsub, name).pb()


def empty() -> Any:
    """Return a new `google.protobuf.Empty`, the response of calls that have nothing to say."""
    return empty_pb2.Empty()
