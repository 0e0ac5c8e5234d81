"""Protocol buffer schemas, in all calls and both protocols."""

import asyncio
import base64
import threading
from typing import Any

import grpc
import httpx
import pytest

from pubsub_emulator.errors import InvalidArgument, MessageRefused
from pubsub_emulator.protos import Schema, message_class
from pubsub_emulator.schemas import proto_definition
from pubsub_emulator.schemas.protoc import compile_definition
from pubsub_emulator.server import serve
from tests.limits import WAIT_LIMIT_S
from tests.wire import Wire, connect
from tests.world import PROJECT, KeptWorld, World, message

NAME = f"{PROJECT}/schemas/state"
AVRO, PROTOCOL_BUFFER = 2, 1
JSON, BINARY = 1, 2
STATE = 'syntax = "proto3"; message State { string name = 1; string post_abbr = 2; }'
"""The definition from Google's samples."""
PLUS = STATE.replace("}", "int64 population = 3; }")
ALASKA = b"\x0a\x06Alaska\x12\x02AK"


def schema(definition: str = STATE) -> Any:
    return Schema(type_=PROTOCOL_BUFFER, definition=definition)


def create(world: World, definition: str = STATE) -> Any:
    return world.call(
        "CreateSchema",
        "CreateSchemaRequest",
        parent=PROJECT,
        schema_id="state",
        schema=schema(definition),
    )


def commit(world: World, definition: str) -> Any:
    return world.call("CommitSchema", "CommitSchemaRequest", name=NAME, schema=schema(definition))


def typed_topic(world: World, encoding: int) -> None:
    world.topic(schema_settings={"schema": NAME, "encoding": encoding})
    world.subscription()


def test_schema_is_made_revised_rolled_back_and_shown(world: World) -> None:
    first = create(world).revision_id
    second = commit(world, PLUS).revision_id
    rolled = world.call("RollbackSchema", "RollbackSchemaRequest", name=NAME, revision_id=first)
    assert (rolled.type_, rolled.definition) == (PROTOCOL_BUFFER, STATE)
    named = f"{NAME}@{second}"
    schema = world.call("DeleteSchemaRevision", "DeleteSchemaRevisionRequest", name=named)
    assert schema.revision_id == rolled.revision_id


@pytest.mark.parametrize(
    ("encoding", "good", "wrong"),
    [
        (JSON, b'{"name": "Alaska", "postAbbr": "AK"}', [b'{"state": "Alaska"}', b"{", ALASKA]),
        (BINARY, ALASKA, [b"\x0a\x02\xff\xff", b'{"name": "Alaska"}', ALASKA[:-1]]),
    ],
)
def test_topic_takes_messages_that_fit(encoding: int, good: bytes, wrong: list[bytes]) -> None:
    world = World()
    revision_id = create(world).revision_id
    typed_topic(world, encoding)
    name = {JSON: "JSON", BINARY: "BINARY"}[encoding]
    world.publish(message(good.decode()))
    (pulled,) = world.pull()
    assert dict(pulled.message.attributes) == {
        "googclient_schemaencoding": name,
        "googclient_schemaname": NAME,
        "googclient_schemarevisionid": revision_id,
    }
    for data in wrong:
        unfit = message("")
        unfit.data = data
        with pytest.raises(MessageRefused) as refusal:
            world.publish(unfit)
        assert refusal.value.reason == f"INVALID_{name}_PROTO_MESSAGE"
        assert f"revision_id={revision_id} failed" in refusal.value.metadata["revisionInfo"]
    assert world.pull() == []


def test_message_fits_the_newest_revision_that_it_can(world: World) -> None:
    first = create(world).revision_id
    second = commit(world, PLUS).revision_id
    world.topic("typed", schema_settings={"schema": NAME, "encoding": JSON})
    world.subscription("typed", "typed")
    commit(world, STATE.replace("name", "named").replace("= 1", "= 4"))
    world.publish('{"name": "a"}', '{"population": 3}', '{"named": "a"}', topic_id="typed")
    fitted = [
        received.message.attributes["googclient_schemarevisionid"]
        for received in world.pull("typed")
    ]
    assert fitted[:2] == [second, second]
    assert fitted[2] not in (first, second)


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("string name = 1;", "string name = 1; repeated int32 n = 2;", "n of State is repeated"),
        ("map<int32, int32> m = 1;", "", "m of State is repeated"),
        ("string name = 1;", "string named = 1;", "name of State differs"),
        ("string name = 1;", "bytes name = 1;", "name of State differs"),
        ("string name = 1;", "repeated string name = 1;", "name of State differs"),
        ("B b = 1; message B { int32 x = 1; }", "B b = 1; message B { int64 x = 1; }", "State.B"),
        ("E e = 1; enum E { X = 0; }", "F e = 1; enum F { Y = 0; }", "e of State differs"),
    ],
)
def test_revision_that_changes_more_than_optional_fields_is_refused(
    before: str, after: str, why: str
) -> None:
    world = World()
    create(world, f'syntax = "proto3"; message State {{ {before} }}')
    with pytest.raises(InvalidArgument, match=f"Invalid schema definition given: .*{why}"):
        commit(world, f'syntax = "proto3"; message State {{ {after} }}')


def test_revision_may_not_lose_a_required_field_and_may_have_a_new_name() -> None:
    world = World()
    inner = "optional State s = 1; optional B b = 2; message B { optional B b = 1; }"
    create(world, f"message State {{ required int32 x = 5; {inner} }}")
    commit(world, f"message Land {{ required int32 x = 5; {inner.replace('State', 'Land')} }}")
    with pytest.raises(InvalidArgument, match="x of Land is required"):
        commit(world, f"message Land {{ {inner.replace('State', 'Land')} }}")


@pytest.mark.parametrize(
    "definition", ["", "{}", "message A {", 'import "a"; message A {}', "/" * 310_000]
)
def test_definition_that_is_none_is_refused_by_every_call(world: World, definition: str) -> None:
    create(world)
    with pytest.raises(InvalidArgument, match="definition"):
        commit(world, definition)
    with pytest.raises(InvalidArgument, match="definition"):
        world.call(
            "ValidateSchema",
            "ValidateSchemaRequest",
            parent=PROJECT,
            schema=schema(definition),
        )


def test_schemas_are_there_after_a_restart(kept: KeptWorld) -> None:
    create(kept)
    revision_id = commit(kept, PLUS).revision_id
    kept.topic("typed", schema_settings={"schema": NAME, "encoding": BINARY})
    kept.restart()
    with pytest.raises(MessageRefused):
        kept.publish("{}", topic_id="typed")
    kept.subscription("typed", "typed")
    kept.publish(ALASKA.decode(), topic_id="typed")
    (pulled,) = kept.pull("typed")
    assert pulled.message.attributes["googclient_schemarevisionid"] == revision_id


async def validate(wire: Wire, definition: str, data: bytes = ALASKA) -> str:
    """Validates a message against a definition and returns the server's response."""
    request = message_class("ValidateMessageRequest")(
        parent="projects/p", schema=schema(definition), encoding=BINARY, message=data
    )
    try:
        await wire.call("SchemaService", "ValidateMessage", request, "ValidateMessageResponse")
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "OK"


@pytest.mark.anyio
async def test_others_are_answered_while_a_definition_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()
    definitions = []

    def compile_later(definition: str) -> Any:
        definitions.append(definition)
        assert released.wait(WAIT_LIMIT_S)
        return compile_definition(definition)

    monkeypatch.setattr(proto_definition, "compile_definition", compile_later)
    async with serve() as server, connect(server.endpoint) as wire:
        compiled = asyncio.ensure_future(validate(wire, f"{STATE} // later"))
        await wire.topic("projects/p/topics/jobs")
        await wire.publish("projects/p/topics/jobs", "x")
        released.set()
        assert await compiled == "OK"
        assert definitions == [f"{STATE} // later"]


@pytest.mark.anyio
async def test_what_takes_the_compiler_or_the_check_far_is_refused() -> None:
    twice = "".join("B b = 1;" for _ in range(10_000))
    async with serve() as server, connect(server.endpoint) as wire:
        deep = 'syntax = "proto3"; ' + "message A {" * 20_000
        assert "recursion limit" in await validate(wire, deep)
        large = f'syntax = "proto3"; message {"a" * 50_000} {{ {twice} }}'
        assert "512 MiB of memory" in await validate(wire, large)
        assert "failed schema validation" in await validate(wire, STATE, b"\x0b" * 1_000_000)
        assert await validate(wire, STATE) == "OK"


@pytest.mark.anyio
async def test_rest_has_the_same_calls() -> None:
    async with serve(rest_port=0) as server:
        assert server.rest_endpoint
        project = f"{server.rest_endpoint}/v1/projects/p"
        async with httpx.AsyncClient(base_url=project, timeout=WAIT_LIMIT_S) as http:
            definition = {"type": "PROTOCOL_BUFFER", "definition": STATE}
            made = await http.post("/schemas?schemaId=state", json=definition)
            assert made.json()["type"] == "PROTOCOL_BUFFER"
            plus = {**definition, "definition": PLUS}
            revised = await http.post("/schemas/state:commit", json={"schema": plus})
            assert revised.json()["definition"] == PLUS
            no = {"schema": {**definition, "definition": "message A { words x = 1; }"}}
            refused = await http.post("/schemas:validate", json=no)
            assert refused.status_code == 400
            assert "line 1, column 13" in refused.json()["error"]["message"]
            settings = {"schema": "projects/p/schemas/state", "encoding": "BINARY"}
            await http.put("/topics/typed", json={"schemaSettings": settings})
            for data, status in ((ALASKA, 200), (ALASKA[:-1], 400)):
                sent = {"messages": [{"data": base64.b64encode(data).decode()}]}
                answer = await http.post("/topics/typed:publish", json=sent)
                assert answer.status_code == status
            (info,) = answer.json()["error"]["details"]
            assert info["reason"] == "INVALID_BINARY_PROTO_MESSAGE"
