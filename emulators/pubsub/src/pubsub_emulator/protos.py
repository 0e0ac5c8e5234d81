"""The raw protobuf classes of `google.pubsub.v1`, from the installed client.

The proto-plus wrappers cost about 0.1 ms per message, so nothing here uses them after import.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

from google.iam.v1 import iam_policy_pb2, policy_pb2
from google.protobuf import empty_pb2
from google.pubsub_v1 import types

if TYPE_CHECKING:
    # The classes are created at runtime, so type checkers know only their names.
    BigQueryConfig: TypeAlias = Any
    Message: TypeAlias = Any
    Policy: TypeAlias = Any
    PubsubMessage: TypeAlias = Any
    PublishRequest: TypeAlias = Any
    PullResponse: TypeAlias = Any
    PushConfig: TypeAlias = Any
    Schema: TypeAlias = Any
    SchemaRevisions: TypeAlias = Any
    SetIamPolicyRequest: TypeAlias = Any
    Snapshot: TypeAlias = Any
    StreamingPullRequest: TypeAlias = Any
    StreamingPullResponse: TypeAlias = Any
    Subscription: TypeAlias = Any
    Topic: TypeAlias = Any
else:
    BigQueryConfig = types.BigQueryConfig.pb()
    Message = Any
    Policy = policy_pb2.Policy
    PubsubMessage = types.PubsubMessage.pb()
    PublishRequest = types.PublishRequest.pb()
    PullResponse = types.PullResponse.pb()
    PushConfig = types.PushConfig.pb()
    Schema = types.Schema.pb()
    SchemaRevisions = types.ListSchemaRevisionsResponse.pb()
    SetIamPolicyRequest = iam_policy_pb2.SetIamPolicyRequest
    Snapshot = types.Snapshot.pb()
    StreamingPullRequest = types.StreamingPullRequest.pb()
    StreamingPullResponse = types.StreamingPullResponse.pb()
    Subscription = types.Subscription.pb()
    Topic = types.Topic.pb()


_OF_OTHERS = {
    "Empty": empty_pb2.Empty,
    "GetIamPolicyRequest": iam_policy_pb2.GetIamPolicyRequest,
    "Policy": Policy,
    "SetIamPolicyRequest": SetIamPolicyRequest,
    "TestIamPermissionsRequest": iam_policy_pb2.TestIamPermissionsRequest,
    "TestIamPermissionsResponse": iam_policy_pb2.TestIamPermissionsResponse,
}


def message_class(name: str) -> Any:
    """Return the raw protobuf class of a request, response or resource."""
    return _OF_OTHERS.get(name) or getattr(types, name).pb()


def empty() -> Any:
    """Return a new `google.protobuf.Empty`, the response to calls that return nothing."""
    return empty_pb2.Empty()
