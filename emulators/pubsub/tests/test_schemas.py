"""Schemas: revisions, topics that have a schema, and the requirements their messages must meet."""

import json
from typing import Any

import grpc
import pytest

from pubsub_emulator.errors import (
    FailedPrecondition,
    InvalidArgument,
    MessageRefused,
    PubsubError,
    ResourceExhausted,
    ResourceExists,
    ResourceNotFound,
)
from pubsub_emulator.protos import Schema, message_class
from pubsub_emulator.schemas.definition import MAX_DEFINITION_BYTES
from pubsub_emulator.server import PubsubServer
from pubsub_emulator.state.message import cost_of
from pubsub_emulator.state.schema import MAX_REVISIONS
from tests.wire import connect
from tests.world import (
    PROJECT,
    KeptWorld,
    World,
    message,
    subscription_path,
    topic_path,
)

NAME = f"{PROJECT}/schemas/user"
AVRO, PROTOCOL_BUFFER = 2, 1
BASIC, FULL = 1, 2
JSON, BINARY = 1, 2


def record(**fields: Any) -> str:
    """A record definition with fields of these types. Some numbers may be missing."""
    default = {"int": {"default": 0}}
    listed = [
        {"name": name, "type": kind, **default.get(kind, {})} for name, kind in fields.items()
    ]
    return json.dumps({"type": "record", "name": "User", "fields": listed})


ONE, TWO = record(name="string"), record(name="string", age="int")


def schema(definition: str = ONE, kind: int = AVRO) -> Any:
    return Schema(type_=kind, definition=definition)


def create(world: World, definition: str = ONE, schema_id: str = "user") -> Any:
    return world.call(
        "CreateSchema",
        "CreateSchemaRequest",
        parent=PROJECT,
        schema_id=schema_id,
        schema=schema(definition),
    )


def commit(world: World, definition: str = TWO) -> Any:
    return world.call("CommitSchema", "CommitSchemaRequest", name=NAME, schema=schema(definition))


def get(world: World, name: str = NAME, view: int = 0) -> Any:
    return world.call("GetSchema", "GetSchemaRequest", name=name, view=view)


def revision_ids(world: World) -> list[str]:
    listed = world.call("ListSchemaRevisions", "ListSchemaRevisionsRequest", name=NAME)
    return [revision.revision_id for revision in listed.schemas]


def typed_topic(world: World, topic_id: str = "jobs", **settings: Any) -> str:
    return world.topic(topic_id, schema_settings={"schema": NAME, "encoding": JSON, **settings})


def user(**fields: Any) -> str:
    return json.dumps(fields)


def test_schema_is_made_shown_and_deleted(world: World) -> None:
    made = create(world)
    assert (made.name, made.definition, len(made.revision_id)) == (NAME, ONE, 8)
    assert made.revision_create_time.seconds == int(world.now_s)
    assert get(world) == get(world, f"{NAME}@{made.revision_id}") == made
    assert get(world, view=BASIC).definition == ""
    world.call("DeleteSchema", "DeleteSchemaRequest", name=NAME)
    with pytest.raises(ResourceNotFound, match=r"\(resource=user\)"):
        get(world)


def test_revisions_are_added_copied_and_deleted(world: World) -> None:
    first = create(world).revision_id
    second = commit(world).revision_id
    third = world.call("RollbackSchema", "RollbackSchemaRequest", name=NAME, revision_id=first)
    assert third.definition == ONE
    assert revision_ids(world) == [first, second, third.revision_id]
    named = f"{NAME}@{second}"
    schema = world.call("DeleteSchemaRevision", "DeleteSchemaRevisionRequest", name=named)
    assert schema.revision_id == third.revision_id
    assert revision_ids(world) == [first, third.revision_id]
    with pytest.raises(ResourceNotFound, match=f"user@{second}"):
        get(world, named)


def test_lists_have_definitions_only_when_asked(world: World) -> None:
    for schema_id in ("one", "two"):
        create(world, schema_id=schema_id)
    listed = world.call("ListSchemas", "ListSchemasRequest", parent=PROJECT)
    assert [schema.definition for schema in listed.schemas] == ["", ""]
    request = {"parent": PROJECT, "view": FULL, "page_size": 1}
    page = world.call("ListSchemas", "ListSchemasRequest", **request)
    assert [schema.definition for schema in page.schemas] == [ONE]
    request["page_token"] = page.next_page_token
    page = world.call("ListSchemas", "ListSchemasRequest", **request)
    assert [schema.name for schema in page.schemas] == [f"{PROJECT}/schemas/two"]
    assert page.next_page_token == ""


def test_second_of_a_name_is_refused(world: World) -> None:
    create(world)
    with pytest.raises(ResourceExists, match=r"\(resource=user\)"):
        create(world)


def test_only_revision_and_one_more_than_the_most_are_refused(world: World) -> None:
    only = create(world).revision_id
    with pytest.raises(FailedPrecondition, match="only revision"):
        world.call("DeleteSchemaRevision", "DeleteSchemaRevisionRequest", name=f"{NAME}@{only}")
    for _ in range(MAX_REVISIONS - 1):
        commit(world)
    with pytest.raises(ResourceExhausted, match=f"{MAX_REVISIONS} revisions"):
        commit(world)


@pytest.mark.parametrize(
    "definition",
    [
        "",
        "{",
        "no json",
        "1",
        '{"type": "record", "name": "x"}',
        '{"type": "array"}',
        '{"type": "error_union"}',
        '{"type": "error", "name": "x", "fields": []}',
        '{"type": ["int"]}',
        '["string", "string"]',
        '{"type": "record", "name": 1, "fields": []}',
        "[" * 100_000,
        '{"type":"array","items":' * 70 + '"int"' + "}" * 70,
        json.dumps({"type": "string", "doc": "x" * MAX_DEFINITION_BYTES}),
    ],
)
def test_definition_that_is_none_is_refused_by_every_call(world: World, definition: str) -> None:
    create(world)
    with pytest.raises(InvalidArgument, match="definition"):
        create(world, definition, "other")
    with pytest.raises(InvalidArgument, match="definition"):
        commit(world, definition)
    with pytest.raises(InvalidArgument, match="definition"):
        world.call(
            "ValidateSchema",
            "ValidateSchemaRequest",
            parent=PROJECT,
            schema=schema(definition),
        )
    assert len(revision_ids(world)) == 1


def test_type_must_be_one_and_stay() -> None:
    world = World()
    create(world)
    for kind in (0, 9):
        with pytest.raises(InvalidArgument, match="type"):
            world.call(
                "ValidateSchema",
                "ValidateSchemaRequest",
                parent=PROJECT,
                schema=schema(ONE, kind),
            )
    other = schema("message A {}", PROTOCOL_BUFFER)
    with pytest.raises(InvalidArgument, match="type"):
        world.call("CommitSchema", "CommitSchemaRequest", name=NAME, schema=other)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("GetSchema", {"name": NAME}),
        ("DeleteSchema", {"name": NAME}),
        ("ListSchemaRevisions", {"name": NAME}),
        ("CommitSchema", {"name": NAME, "schema": schema()}),
        ("RollbackSchema", {"name": NAME, "revision_id": "a"}),
        ("DeleteSchemaRevision", {"name": f"{NAME}@a"}),
        ("ValidateMessage", {"parent": PROJECT, "name": NAME, "encoding": JSON}),
    ],
)
def test_missing_schema_is_not_found_and_wrong_name_is_invalid(
    world: World, name: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(ResourceNotFound):
        world.call(name, f"{name}Request", **fields)
    for nonsense in ("", "nonsense", f"{PROJECT}/schemas/1", topic_path("jobs")):
        with pytest.raises(InvalidArgument):
            world.call(name, f"{name}Request", **{**fields, "name": nonsense})


@pytest.mark.parametrize(
    ("fields", "error", "word"),
    [
        ({"name": NAME, "encoding": JSON, "message": b'{"name": "a"}'}, None, ""),
        ({"schema": schema(), "encoding": BINARY, "message": b"\x02a"}, None, ""),
        ({"name": NAME, "encoding": JSON, "message": b"{}"}, MessageRefused, "validation"),
        ({"name": NAME, "message": b"{}"}, InvalidArgument, "encoding"),
        ({"encoding": JSON, "message": b"{}"}, InvalidArgument, "name or schema"),
        ({"schema": schema("{"), "encoding": JSON}, InvalidArgument, "definition"),
    ],
)
def test_message_is_validated(
    world: World, fields: dict[str, Any], error: type[PubsubError] | None, word: str
) -> None:
    create(world)
    request = {"parent": PROJECT, **fields}
    if error is None:
        world.call("ValidateMessage", "ValidateMessageRequest", **request)
        return
    with pytest.raises(error, match=word):
        world.call("ValidateMessage", "ValidateMessageRequest", **request)


@pytest.mark.parametrize(
    ("settings", "error", "word"),
    [
        ({"encoding": 0}, InvalidArgument, "encoding"),
        ({"encoding": 7}, InvalidArgument, "encoding"),
        ({"schema": ""}, InvalidArgument, "name="),
        ({"schema": "_deleted-schema_"}, InvalidArgument, "name="),
        ({"schema": f"{PROJECT}/schemas/missing"}, ResourceNotFound, "missing"),
        ({"first_revision_id": "gone"}, ResourceNotFound, "user@gone"),
        ({"last_revision_id": "gone"}, ResourceNotFound, "user@gone"),
    ],
)
def test_topic_with_wrong_schema_settings_is_refused(
    settings: dict[str, Any], error: type[PubsubError], word: str
) -> None:
    world = World()
    create(world)
    with pytest.raises(error, match=word):
        typed_topic(world, **settings)


def test_range_that_ends_before_it_begins_is_refused() -> None:
    world = World()
    first, second = create(world).revision_id, commit(world).revision_id
    with pytest.raises(InvalidArgument, match="first_revision_id"):
        typed_topic(world, first_revision_id=second, last_revision_id=first)


def test_message_must_fit_and_says_what_it_fits() -> None:
    world = World()
    revision_id = create(world).revision_id
    typed_topic(world)
    world.subscription()
    world.publish(message(user(name="a"), k="v"))
    (pulled,) = world.pull()
    assert dict(pulled.message.attributes) == {
        "k": "v",
        "googclient_schemaencoding": "JSON",
        "googclient_schemaname": NAME,
        "googclient_schemarevisionid": revision_id,
    }
    with pytest.raises(MessageRefused) as refusal:
        world.publish(user(name="a"), user(name=1))
    assert str(refusal.value) == "Invalid data in message: Message failed schema validation."
    assert refusal.value.reason == "INVALID_JSON_AVRO_MESSAGE"
    assert (
        f"revision_id={revision_id} failed with status: name: it is an integer"
        in (refusal.value.metadata["revisionInfo"])
    )
    assert world.pull() == []


def test_message_fits_the_newest_revision_of_the_range_that_it_can() -> None:
    world = World()
    first, second = create(world).revision_id, commit(world).revision_id
    third = commit(world, record(name="string", more="int")).revision_id
    typed_topic(world, last_revision_id=second)
    world.subscription()
    world.publish(user(name="a"), user(name="a", age=1), user(name="a", more=1))
    fitted = [
        received.message.attributes["googclient_schemarevisionid"] for received in world.pull()
    ]
    assert fitted == [first, second, first]
    assert third not in fitted
    topic = {"name": topic_path("jobs"), "schema_settings": {"first_revision_id": second}}
    world.call(
        "UpdateTopic",
        "UpdateTopicRequest",
        topic=topic,
        update_mask={"paths": ["schema_settings.first_revision_id"]},
    )
    with pytest.raises(MessageRefused):
        world.publish(user(name="a"))
    with pytest.raises(FailedPrecondition, match="/topics/jobs uses this revision"):
        world.call("DeleteSchemaRevision", "DeleteSchemaRevisionRequest", name=f"{NAME}@{second}")


def test_topic_of_a_deleted_schema_takes_no_messages_until_it_has_none() -> None:
    world = World()
    create(world)
    typed_topic(world)
    world.call("DeleteSchema", "DeleteSchemaRequest", name=NAME)
    create(world)
    jobs_topic = world.call("GetTopic", "GetTopicRequest", topic=topic_path("jobs"))
    assert jobs_topic.schema_settings.schema == "_deleted-schema_"
    with pytest.raises(ResourceNotFound, match="topic's schema was deleted"):
        world.publish(user(name="a"))
    for paths in (["labels"], ["schema_settings"]):
        topic = {"name": topic_path("jobs"), "labels": {"a": "b"}}
        world.call("UpdateTopic", "UpdateTopicRequest", topic=topic, update_mask={"paths": paths})
    assert len(world.publish("anything")) == 1


def test_schema_attributes_count_for_the_storage_limit() -> None:
    data = user(name="a")
    plain_bytes = cost_of(message(data).ByteSize(), attributes=0)
    world = World(storage_bytes=plain_bytes + 600)
    create(world)
    typed_topic(world)
    with pytest.raises(ResourceExhausted):
        world.publish(data)
    world.topic("plain")
    world.publish(data, topic_id="plain")


def test_schemas_are_there_after_a_restart(kept: KeptWorld) -> None:
    create(kept)
    revision_id = commit(kept).revision_id
    create(kept, schema_id="gone")
    kept.call("DeleteSchema", "DeleteSchemaRequest", name=f"{PROJECT}/schemas/gone")
    typed_topic(kept, "typed")
    schema = get(kept)
    kept.restart()
    assert get(kept) == schema
    assert len(revision_ids(kept)) == 2
    with pytest.raises(ResourceNotFound):
        get(kept, f"{PROJECT}/schemas/gone")
    with pytest.raises(MessageRefused):
        kept.publish("{}", topic_id="typed")
    kept.subscription("typed", "typed")
    kept.publish(user(name="a", age=1), topic_id="typed")
    (pulled,) = kept.pull("typed")
    assert pulled.message.attributes["googclient_schemarevisionid"] == revision_id
    assert subscription_path("typed") in kept.broker.registry.subscriptions


@pytest.mark.anyio
async def test_messages_are_checked_on_the_wire_too(server: PubsubServer) -> None:
    numbers = schema('{"type": "array", "items": "int"}')
    request = {"parent": "projects/p", "schema_id": "list", "schema": numbers}
    settings = {"schema": "projects/p/schemas/list", "encoding": JSON}
    topic, subscription = "projects/p/topics/typed", "projects/p/subscriptions/typed"
    async with connect(server.endpoint) as wire:
        made = message_class("CreateSchemaRequest")(**request)
        await wire.call("SchemaService", "CreateSchema", made, "Schema")
        typed = message_class("Topic")(name=topic, schema_settings=settings)
        await wire.call("Publisher", "CreateTopic", typed, "Topic")
        await wire.subscription(subscription, topic)
        await wire.publish(topic, "[" + "1," * 100_000 + "1]")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await wire.publish(topic, "[1.5]")
        validated = message_class("ValidateMessageRequest")(
            parent="projects/p", name="projects/p/schemas/list", encoding=JSON, message=b"[]"
        )
        await wire.call("SchemaService", "ValidateMessage", validated, "ValidateMessageResponse")
        (received,) = (await wire.pull(subscription)).received_messages
    assert received.message.attributes["googclient_schemaname"] == "projects/p/schemas/list"
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    trailing: Any = refusal.value.trailing_metadata()
    assert b"INVALID_JSON_AVRO_MESSAGE" in dict(trailing)["grpc-status-details-bin"]


@pytest.mark.anyio
async def test_long_definition_is_read_on_the_wire_too(server: PubsubServer) -> None:
    fields: dict[str, Any] = {f"field_{number}": "int" for number in range(1000)}
    async with connect(server.endpoint) as wire:
        for definition, code in ((record(**fields), None), ("[" * 10_000, "INVALID_ARGUMENT")):
            request = message_class("CreateSchemaRequest")(
                parent="projects/p", schema_id="long", schema=schema(definition)
            )
            try:
                await wire.call("SchemaService", "CreateSchema", request, "Schema")
                outcome = None
            except grpc.aio.AioRpcError as error:
                outcome = error.code().name
            assert outcome == code


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ('{"type": "record", "name": "\\ud800", "fields": []}', b"{}"),
        ('{"type": "map", "values": "int"}', b'{"\\ud800": "x"}'),
    ],
)
async def test_refusal_that_quotes_half_a_character_arrives(
    server: PubsubServer, definition: str, message: bytes
) -> None:
    request = message_class("ValidateMessageRequest")(
        parent="projects/p", schema=schema(definition), encoding=JSON, message=message
    )
    async with connect(server.endpoint) as wire:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await wire.call("SchemaService", "ValidateMessage", request, "ValidateMessageResponse")
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
