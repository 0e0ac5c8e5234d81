"""The entry point to the state machine: runs any API call, given its name.

It uses neither gRPC nor an event loop. Only `call`, the steps of a publish, the timers, and
`SubscriptionState.take` change the state, and each change is written to the journal.
"""

from collections.abc import Callable
from typing import Any

from pubsub_emulator.calls.policies import PolicyCalls
from pubsub_emulator.calls.schemas import SchemaCalls
from pubsub_emulator.calls.snapshots import SnapshotCalls
from pubsub_emulator.calls.subscriptions import SubscriptionCalls
from pubsub_emulator.calls.topics import TopicCalls
from pubsub_emulator.state.journal import ChangeJournal
from pubsub_emulator.state.message import Storage
from pubsub_emulator.state.registry import Registry
from pubsub_emulator.state.subscription import SubscriptionState
from pubsub_emulator.state.timers import Timers

DEFAULT_STORAGE_BYTES = 2 * 1024**3


class Broker:
    """Topics, subscriptions, snapshots, and schemas.

    `topics` and `schemas` are for callers that check large messages in a thread.

    Args:
        now_s: a clock that returns seconds since the epoch. The clock must never go backward.
        storage_bytes: memory limit for messages. A publish that exceeds it is rejected with
            RESOURCE_EXHAUSTED.
        journal: receives each change. By default, nothing outlives the process.
        bigquery_endpoint: URL of the BigQuery server to which BigQuery subscriptions write. Without
            it, such subscriptions are rejected.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        storage_bytes: int = DEFAULT_STORAGE_BYTES,
        journal: ChangeJournal | None = None,
        bigquery_endpoint: str = "",
    ) -> None:
        self.bigquery_endpoint = bigquery_endpoint
        self.timers = Timers(now_s)
        self.journal = journal or ChangeJournal()
        self.registry = Registry(
            self.timers, Storage(storage_bytes, self.journal.drop), self.journal
        )
        self.topics = topics = TopicCalls(self.registry)
        self.schemas = schemas = SchemaCalls(self.registry)
        snapshots = SnapshotCalls(self.registry)
        policies = PolicyCalls(self.registry)
        self._subscriptions = SubscriptionCalls(self.registry, has_bigquery=bool(bigquery_endpoint))
        self._calls: dict[str, Callable[[Any], Any]] = {
            "CreateTopic": topics.create_topic,
            "GetTopic": topics.get_topic,
            "UpdateTopic": topics.update_topic,
            "ListTopics": topics.list_topics,
            "ListTopicSubscriptions": topics.list_topic_subscriptions,
            "ListTopicSnapshots": topics.list_topic_snapshots,
            "DeleteTopic": topics.delete_topic,
            "Publish": topics.publish,
            "DetachSubscription": topics.detach_subscription,
            "CreateSubscription": self._subscriptions.create_subscription,
            "GetSubscription": self._subscriptions.get_subscription,
            "UpdateSubscription": self._subscriptions.update_subscription,
            "ListSubscriptions": self._subscriptions.list_subscriptions,
            "DeleteSubscription": self._subscriptions.delete_subscription,
            "ModifyPushConfig": self._subscriptions.modify_push_config,
            "Acknowledge": self._subscriptions.acknowledge,
            "ModifyAckDeadline": self._subscriptions.modify_ack_deadline,
            "CreateSnapshot": snapshots.create_snapshot,
            "GetSnapshot": snapshots.get_snapshot,
            "UpdateSnapshot": snapshots.update_snapshot,
            "ListSnapshots": snapshots.list_snapshots,
            "DeleteSnapshot": snapshots.delete_snapshot,
            "Seek": snapshots.seek,
            "CreateSchema": schemas.create_schema,
            "GetSchema": schemas.get_schema,
            "ListSchemas": schemas.list_schemas,
            "ListSchemaRevisions": schemas.list_schema_revisions,
            "CommitSchema": schemas.commit_schema,
            "RollbackSchema": schemas.rollback_schema,
            "DeleteSchemaRevision": schemas.delete_schema_revision,
            "DeleteSchema": schemas.delete_schema,
            "ValidateSchema": schemas.validate_schema,
            "ValidateMessage": schemas.validate_message,
            "SetIamPolicy": policies.set_iam_policy,
            "GetIamPolicy": policies.get_iam_policy,
            "TestIamPermissions": policies.test_iam_permissions,
        }

    def call(self, name: str, request: Any) -> Any:
        """Run an API call.

        Args:
            name: the call's name in `google.pubsub.v1`, such as `Publish`. Not Pull or
                StreamingPull.
            request: the call's raw protobuf request. A Publish takes ownership of its messages.

        Returns:
            The raw protobuf response. The response belongs to the broker and must be serialized
                before the next call.

        Raises:
            PubsubError: the call was rejected and changed nothing.
        """
        return self._calls[name](request)

    def pullable(self, path: str) -> SubscriptionState:
        """Return a subscription on which to call `take`.

        Raises `NotFound` or `FailedPrecondition` just as a pull does.
        """
        return self._subscriptions.consumable(path, for_pull=True)
