"""Schemas and IAM policies through Google's clients."""

import json
from collections.abc import Callable, Iterator

import pytest
from google.api_core import exceptions
from google.cloud.pubsub_v1 import PublisherClient, SchemaServiceClient, SubscriberClient
from google.pubsub_v1.types import Encoding, Schema, SchemaView

from tests.conformance.target import Target
from tests.limits import WAIT_LIMIT_S

Make = Callable[..., str]


def avro(**fields: object) -> Schema:
    # The service rejects a revision with a field that older messages lack and that has no default.
    default = {"int": {"default": 0}}
    listed = [
        {"name": name, "type": kind, **default.get(str(kind), {})} for name, kind in fields.items()
    ]
    definition = {"type": "record", "name": "User", "fields": listed}
    return Schema(type_=Schema.Type.AVRO, definition=json.dumps(definition))


@pytest.fixture
def schemas(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[SchemaServiceClient]:
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", target.endpoint)
    with SchemaServiceClient() as client:
        yield client


@pytest.fixture
def user(schemas: SchemaServiceClient, project: str) -> Schema:
    """Returns this project's schema `user`, with its first revision."""
    request = {"parent": project, "schema": avro(name="string"), "schema_id": "user"}
    made: Schema = schemas.create_schema(request=request)
    return made


def test_schema_is_made_shown_listed_and_deleted(
    schemas: SchemaServiceClient, user: Schema, project: str
) -> None:
    schema = schemas.get_schema(name=user.name)
    assert (schema.definition, schema.revision_id) == (user.definition, user.revision_id)
    basic = schemas.get_schema(request={"name": user.name, "view": SchemaView.BASIC})
    assert basic.definition == ""
    assert [listed_schema.name for listed_schema in schemas.list_schemas(parent=project)] == [
        user.name
    ]
    with pytest.raises(exceptions.AlreadyExists):
        schemas.create_schema(parent=project, schema=avro(name="string"), schema_id="user")
    schemas.delete_schema(name=user.name)
    with pytest.raises(exceptions.NotFound):
        schemas.get_schema(name=user.name)


def test_lists_have_no_definitions_unless_asked(
    target: Target, schemas: SchemaServiceClient, user: Schema, project: str
) -> None:
    target.requires("BASIC views")
    (listed,) = schemas.list_schemas(parent=project)
    assert listed.definition == ""


def test_revisions(schemas: SchemaServiceClient, user: Schema) -> None:
    second = schemas.commit_schema(name=user.name, schema=avro(name="string", age="int"))
    third = schemas.rollback_schema(name=user.name, revision_id=user.revision_id)
    assert third.definition == user.definition
    listed = [revision.revision_id for revision in schemas.list_schema_revisions(name=user.name)]
    assert listed == [user.revision_id, second.revision_id, third.revision_id]
    named = f"{user.name}@{second.revision_id}"
    assert schemas.get_schema(name=named).definition == second.definition
    schemas.delete_schema_revision(request={"name": named})
    with pytest.raises(exceptions.NotFound):
        schemas.get_schema(name=named)


@pytest.mark.parametrize("definition", ["", "{", '{"type": "record", "name": "x"}'])
def test_definition_that_is_none_is_refused(
    schemas: SchemaServiceClient, project: str, definition: str
) -> None:
    schema = Schema(type_=Schema.Type.AVRO, definition=definition)
    with pytest.raises(exceptions.InvalidArgument):
        schemas.validate_schema(parent=project, schema=schema)
    with pytest.raises(exceptions.InvalidArgument):
        schemas.create_schema(parent=project, schema=schema, schema_id="none")


@pytest.mark.parametrize(
    ("encoding", "message", "fits"),
    [
        (Encoding.JSON, b'{"name": "a", "age": 1}', True),
        (Encoding.JSON, b'{"name": "a", "age": 1, "more": 2}', True),
        (Encoding.JSON, b'{"name": "a"}', False),
        (Encoding.JSON, b'{"name": "a", "age": "1"}', False),
        (Encoding.JSON, b'{"name": "a", "age": 3000000000}', False),
        (Encoding.JSON, b"", False),
        (Encoding.BINARY, b"\x02a\x02", True),
        (Encoding.BINARY, b"\x02a", False),
    ],
)
def test_message_is_validated(
    schemas: SchemaServiceClient, project: str, encoding: Encoding, message: bytes, fits: bool
) -> None:
    request = {
        "parent": project,
        "schema": avro(name="string", age="int"),
        "message": message,
        "encoding": encoding,
    }
    if fits:
        schemas.validate_message(request=request)
        return
    with pytest.raises(exceptions.InvalidArgument):
        schemas.validate_message(request=request)


def test_topic_takes_what_fits_its_schema(
    schemas: SchemaServiceClient,
    user: Schema,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
) -> None:
    topic = make_topic(schema_settings={"schema": user.name, "encoding": Encoding.JSON})
    subscription = make_subscription(topic)
    publisher.publish(topic, b'{"name": "a"}').result(timeout=WAIT_LIMIT_S)
    with pytest.raises(exceptions.InvalidArgument):
        publisher.publish(topic, b"{}").result(timeout=WAIT_LIMIT_S)
    (received,) = subscriber.pull(subscription=subscription, max_messages=5).received_messages
    assert dict(received.message.attributes) == {
        "googclient_schemaencoding": "JSON",
        "googclient_schemaname": user.name,
        "googclient_schemarevisionid": user.revision_id,
    }
    schemas.delete_schema(name=user.name)
    assert publisher.get_topic(topic=topic).schema_settings.schema == "_deleted-schema_"
    with pytest.raises(exceptions.NotFound):
        publisher.publish(topic, b'{"name": "a"}').result(timeout=WAIT_LIMIT_S)


@pytest.mark.parametrize(
    ("encoding", "good", "wrong"),
    [
        (Encoding.JSON, b'{"name": "Alaska", "postAbbr": "AK"}', b'{"state": "Alaska"}'),
        (Encoding.BINARY, b"\x0a\x06Alaska\x12\x02AK", b"\x0a\x06Alask"),
    ],
)
def test_topic_takes_what_fits_its_protocol_buffer(
    target: Target,
    schemas: SchemaServiceClient,
    project: str,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    make_topic: Make,
    make_subscription: Make,
    encoding: Encoding,
    good: bytes,
    wrong: bytes,
) -> None:
    target.requires("PROTOCOL_BUFFER")
    fields = "string name = 1; string post_abbr = 2;"
    state, plus, none = (
        Schema(
            type_=Schema.Type.PROTOCOL_BUFFER,
            definition=f'syntax = "proto3"; message State {{ {fields_text} }}',
        )
        for fields_text in (fields, f"{fields} int64 population = 3;", "words name = 1;")
    )
    schemas.validate_schema(parent=project, schema=state)
    made = schemas.create_schema(parent=project, schema=state, schema_id="state")
    latest = schemas.commit_schema(name=made.name, schema=plus)
    with pytest.raises(exceptions.InvalidArgument):
        schemas.commit_schema(name=made.name, schema=none)
    topic = make_topic(schema_settings={"schema": made.name, "encoding": encoding})
    subscription = make_subscription(topic)
    publisher.publish(topic, good).result(timeout=WAIT_LIMIT_S)
    with pytest.raises(exceptions.InvalidArgument):
        publisher.publish(topic, wrong).result(timeout=WAIT_LIMIT_S)
    (received,) = subscriber.pull(subscription=subscription, max_messages=5).received_messages
    assert received.message.data == good
    assert received.message.attributes["googclient_schemarevisionid"] == latest.revision_id


def test_topic_needs_its_schema_and_an_encoding(
    user: Schema, make_topic: Make, project: str
) -> None:
    missing = f"{project}/schemas/missing"
    with pytest.raises(exceptions.NotFound):
        make_topic(schema_settings={"schema": missing, "encoding": Encoding.JSON})
    with pytest.raises(exceptions.InvalidArgument):
        make_topic(schema_settings={"schema": user.name})


def test_policies(target: Target, publisher: PublisherClient, make_topic: Make) -> None:
    target.requires("IAM")
    topic = make_topic()
    policy = publisher.get_iam_policy(request={"resource": topic})
    policy.bindings.add(role="roles/pubsub.viewer", members=["group:all@example.com"])
    publisher.set_iam_policy(request={"resource": topic, "policy": policy})
    stored_policy = publisher.get_iam_policy(request={"resource": topic})
    assert stored_policy.bindings == policy.bindings
    with pytest.raises(exceptions.Aborted):
        publisher.set_iam_policy(request={"resource": topic, "policy": policy})
    permissions = ["pubsub.topics.get", "pubsub.topics.update"]
    granted = publisher.test_iam_permissions(
        request={"resource": topic, "permissions": permissions}
    )
    assert list(granted.permissions) == permissions
