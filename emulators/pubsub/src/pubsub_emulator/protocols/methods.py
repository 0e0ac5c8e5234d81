"""Every unary call in the services: its request, its response, and what it waits for.

Both the gRPC and the REST server use this table.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from pubsub_emulator.calls.broker import Broker
from pubsub_emulator.calls.publishing import Publishing
from pubsub_emulator.errors import AckIdsRefused
from pubsub_emulator.protocols.delivery_order import pause_before_delivery_s
from pubsub_emulator.protocols.slices import run_later, run_on, run_slice
from pubsub_emulator.protos import message_class
from pubsub_emulator.schemas.definition import (
    Definition,
    is_read_slowly,
    read_definition,
)
from pubsub_emulator.state.journal import ChangeJournal
from pubsub_emulator.state.schema import MessageCheck
from pubsub_emulator.streaming import pull

PUBLISHER = "google.pubsub.v1.Publisher"
SUBSCRIBER = "google.pubsub.v1.Subscriber"
SCHEMA_SERVICE = "google.pubsub.v1.SchemaService"
IAM_POLICY = "google.iam.v1.IAMPolicy"

_CALLS = {
    PUBLISHER: {
        "CreateTopic": ("Topic", "Topic"),
        "UpdateTopic": ("UpdateTopicRequest", "Topic"),
        "GetTopic": ("GetTopicRequest", "Topic"),
        "ListTopics": ("ListTopicsRequest", "ListTopicsResponse"),
        "ListTopicSubscriptions": (
            "ListTopicSubscriptionsRequest",
            "ListTopicSubscriptionsResponse",
        ),
        "ListTopicSnapshots": ("ListTopicSnapshotsRequest", "ListTopicSnapshotsResponse"),
        "DeleteTopic": ("DeleteTopicRequest", "Empty"),
        "DetachSubscription": ("DetachSubscriptionRequest", "DetachSubscriptionResponse"),
        "Publish": ("PublishRequest", "PublishResponse"),
    },
    SUBSCRIBER: {
        "CreateSubscription": ("Subscription", "Subscription"),
        "GetSubscription": ("GetSubscriptionRequest", "Subscription"),
        "UpdateSubscription": ("UpdateSubscriptionRequest", "Subscription"),
        "ListSubscriptions": ("ListSubscriptionsRequest", "ListSubscriptionsResponse"),
        "DeleteSubscription": ("DeleteSubscriptionRequest", "Empty"),
        "ModifyAckDeadline": ("ModifyAckDeadlineRequest", "Empty"),
        "Acknowledge": ("AcknowledgeRequest", "Empty"),
        "Pull": ("PullRequest", "PullResponse"),
        "ModifyPushConfig": ("ModifyPushConfigRequest", "Empty"),
        "CreateSnapshot": ("CreateSnapshotRequest", "Snapshot"),
        "GetSnapshot": ("GetSnapshotRequest", "Snapshot"),
        "ListSnapshots": ("ListSnapshotsRequest", "ListSnapshotsResponse"),
        "UpdateSnapshot": ("UpdateSnapshotRequest", "Snapshot"),
        "DeleteSnapshot": ("DeleteSnapshotRequest", "Empty"),
        "Seek": ("SeekRequest", "SeekResponse"),
    },
    SCHEMA_SERVICE: {
        "CreateSchema": ("CreateSchemaRequest", "Schema"),
        "GetSchema": ("GetSchemaRequest", "Schema"),
        "ListSchemas": ("ListSchemasRequest", "ListSchemasResponse"),
        "ListSchemaRevisions": ("ListSchemaRevisionsRequest", "ListSchemaRevisionsResponse"),
        "CommitSchema": ("CommitSchemaRequest", "Schema"),
        "RollbackSchema": ("RollbackSchemaRequest", "Schema"),
        "DeleteSchemaRevision": ("DeleteSchemaRevisionRequest", "Schema"),
        "DeleteSchema": ("DeleteSchemaRequest", "Empty"),
        "ValidateSchema": ("ValidateSchemaRequest", "ValidateSchemaResponse"),
        "ValidateMessage": ("ValidateMessageRequest", "ValidateMessageResponse"),
    },
    IAM_POLICY: {
        "SetIamPolicy": ("SetIamPolicyRequest", "Policy"),
        "GetIamPolicy": ("GetIamPolicyRequest", "Policy"),
        "TestIamPermissions": ("TestIamPermissionsRequest", "TestIamPermissionsResponse"),
    },
}
# Changes made by these calls must be durable before the response is sent; the other calls only read
# data or change leases.
_LASTING_CALLS = frozenset(
    {
        "CreateTopic",
        "UpdateTopic",
        "DeleteTopic",
        "DetachSubscription",
        "CreateSubscription",
        "UpdateSubscription",
        "DeleteSubscription",
        "ModifyPushConfig",
        "CreateSnapshot",
        "UpdateSnapshot",
        "DeleteSnapshot",
        "Seek",
        "CreateSchema",
        "CommitSchema",
        "RollbackSchema",
        "DeleteSchemaRevision",
        "DeleteSchema",
        "SetIamPolicy",
    }
)
_CALLS_WITH_DEFINITIONS = ("CreateSchema", "CommitSchema", "ValidateSchema")
# Separate threads, so that a client with slow definitions delays only calls of the same kind.
_readers = ThreadPoolExecutor(2, "definitions")


class Call(Protocol):
    """The parts of a gRPC call context that a method needs."""

    def time_remaining(self) -> float | None:
        """Return the number of seconds until the caller gives up.

        None if the caller never gives up.
        """

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the headers, with names in lowercase."""


Answer = Callable[[Any, Call], Awaitable[bytes]]


@dataclass(frozen=True)
class Method:
    """A unary call. `answer` returns the serialized response, or raises `PubsubError`."""

    service: str
    name: str
    request: Any
    response: Any
    answer: Answer


def unary_methods(broker: Broker) -> list[Method]:
    """Return all calls except StreamingPull, for this broker."""
    waiting = {
        "Publish": _publish(broker),
        "Acknowledge": _acknowledge(broker),
        "Pull": _pull(broker),
        "ValidateMessage": _validate_message(broker),
        **{name: _with_definition(broker, name) for name in _CALLS_WITH_DEFINITIONS},
    }
    return [
        Method(
            service,
            name,
            message_class(request),
            message_class(response),
            waiting.get(name) or _call(broker, name),
        )
        for service, calls in _CALLS.items()
        for name, (request, response) in calls.items()
    ]


def _publish(broker: Broker) -> Answer:
    async def publish(request: Any, call: Call) -> bytes:
        journal = broker.journal
        journal.admit()
        check = broker.topics.message_check(request)
        if check is None:
            publishing = broker.topics.begin_publish(request)
        else:
            publishing = await _begin_checked_publish(broker, request, check)
        steps = publishing.take_in()
        if not run_slice(steps):
            await _take_in_the_rest(steps, journal)
        pause_s = pause_before_delivery_s(call.invocation_metadata())
        if pause_s is None:
            # done while the publish is being written, because the response confirms the write
            run_on(publishing.let_out())
        else:
            # Waits in the journal, because a publish must not be left half done when its caller
            # gives up.
            let_out = partial(run_on, publishing.let_out())
            journal.after_commit(partial(run_later, pause_s, let_out) if pause_s else let_out)
        await journal.committed()
        if pause_s is None and len(publishing.message_ids) == 1:
            # Let the awakened stream write first, because a reader is waiting for it. This costs
            # nothing under load, when publishers send many messages at a time.
            await asyncio.sleep(0)
        return _serialize(publishing.response)

    return publish


async def _begin_checked_publish(broker: Broker, request: Any, check: MessageCheck) -> Publishing:
    # Other calls are served in the meantime, because validating a few bytes can take a second.
    messages = [message.data for message in request.messages]
    revision_ids = await asyncio.to_thread(check.run, messages)
    return broker.topics.begin_checked_publish(request, check, revision_ids)


async def _take_in_the_rest(steps: Generator[None], journal: ChangeJournal) -> None:
    # Also closed when the caller gives up; otherwise, the added messages would never be released or
    # removed.
    with closing(steps):
        is_through = False
        while not is_through:
            # There may be many subscriptions, each receiving many messages. The slice size is also
            # limited by the size of a commit, because every other publish waits for the commit.
            await journal.committed()
            await asyncio.sleep(0)
            is_through = run_slice(steps)


def _with_definition(broker: Broker, name: str) -> Answer:
    answer = _call(broker, name)

    async def answer_with_definition(request: Any, call: Call) -> bytes:
        definitions = await _read_definitions(broker, name, request)
        response = await answer(request, call)
        del definitions  # kept this long so that definitions aren't parsed again
        return response

    return answer_with_definition


async def _read_definitions(broker: Broker, name: str, request: Any) -> list[Definition]:
    """Read a call's slow definitions in a thread."""
    schemas = [request.schema]
    if name == "CommitSchema" and request.name in broker.registry.schemas:
        schemas.append(broker.registry.schemas[request.name].latest)
    loop = asyncio.get_running_loop()
    return [
        await loop.run_in_executor(_readers, read_definition, schema)
        for schema in schemas
        if is_read_slowly(schema)
    ]


def _validate_message(broker: Broker) -> Answer:
    async def validate_message(request: Any, call: Call) -> bytes:
        definitions = await _read_definitions(broker, "ValidateMessage", request)
        await asyncio.to_thread(broker.schemas.validation(request).run, [request.message])
        del definitions
        return b""

    return validate_message


def _acknowledge(broker: Broker) -> Answer:
    async def acknowledge(request: Any, call: Call) -> bytes:
        try:
            response = _serialize(broker.call("Acknowledge", request))
        except AckIdsRefused:
            # The response implicitly confirms every id that it does not name.
            await broker.journal.acks_committed()
            raise
        # Otherwise, acks are best-effort and are written with the next publish.
        if broker.registry.subscriptions[request.subscription].settings.exactly_once:
            await broker.journal.acks_committed()
        return response

    return acknowledge


def _pull(broker: Broker) -> Answer:
    async def answer_pull(request: Any, call: Call) -> bytes:
        return await pull(broker, request, call.time_remaining())

    return answer_pull


def _call(broker: Broker, name: str) -> Answer:
    async def answer(request: Any, call: Call) -> bytes:
        return _serialize(broker.call(name, request))

    async def answer_lasting(request: Any, call: Call) -> bytes:
        broker.journal.admit()
        # Serialized before waiting, because the response belongs to the broker and the next call
        # may change it.
        response = _serialize(broker.call(name, request))
        await broker.journal.committed()
        return response

    return answer_lasting if name in _LASTING_CALLS else answer


def _serialize(response: Any) -> bytes:
    serialized: bytes = response.SerializeToString()
    return serialized
