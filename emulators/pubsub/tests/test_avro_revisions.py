"""Revisions of Avro definitions: each must be able to read data written with the other."""

from __future__ import annotations

import json
from typing import Any, cast

import avro.schema
import pytest
from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
from hypothesis import given
from hypothesis import strategies as st

from pubsub_emulator.errors import InvalidArgument
from pubsub_emulator.schemas.avro_changes import check_changes
from pubsub_emulator.schemas.mismatch import Malformed
from tests.test_schemas import NAME, commit, create, get, revision_ids
from tests.world import World


def record(*fields: dict[str, Any], name: str = "User", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def field(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


def enum(*symbols: str, name: str = "Kind", **more: Any) -> dict[str, Any]:
    return {"type": "enum", "name": name, "symbols": list(symbols), **more}


NAMED = field("name", "string")
OPTIONAL = field("age", ["null", "int"], default=None)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (record(NAMED), record(NAMED, OPTIONAL)),
        (record(NAMED), record(NAMED, doc="of a user")),
        (record(NAMED), record(field("name", "bytes"))),
        (record(NAMED, OPTIONAL), record(field("years", "int", default=0), NAMED)),
        (
            record(NAMED, aliases=["Person"]),
            record(field("name", ["string"]), name="Person", aliases=["User"]),
        ),
        (enum("A", default="A"), enum("A", "B", default="A")),
        (["null", "string", record(NAMED)], [record(NAMED, OPTIONAL), "bytes", "null"]),
        (["int", "long"], "long"),
        (
            record(field("next", ["null", "User"])),
            record(field("next", ["User", "null"]), OPTIONAL),
        ),
    ],
)
def test_what_can_be_read_in_both_directions_is_a_revision(one: Any, other: Any) -> None:
    for first, second in ((one, other), (other, one)):
        world = World()
        create(world, json.dumps(first))
        commit(world, json.dumps(second))
        assert json.loads(get(world).definition) == second


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (record(NAMED), record(NAMED, field("age", "int")), "age, which has no default"),
        (record(NAMED), record(field("name", "int")), "name is string but must be read as int"),
        (record(field("n", "int")), record(field("n", "long")), "n is long"),
        (record(NAMED), record(NAMED, name="Person"), "it is User"),
        (record(NAMED), "string", "it is User"),
        (enum("A"), enum("A", "B"), "may be B"),
        (
            {"type": "fixed", "name": "F", "size": 4},
            {"type": "fixed", "name": "F", "size": 5},
            "4 bytes",
        ),
        (["null", "string"], "string", "is null"),
        (["null", "string"], ["null", "int"], "may be string"),
        (
            record(field("list", {"type": "array", "items": record(NAMED, name="Inner")})),
            record(field("list", {"type": "array", "items": record(name="Inner")})),
            r"list\[\] has no name",
        ),
    ],
)
def test_what_one_can_not_read_of_the_other_is_refused(one: Any, other: Any, reason: str) -> None:
    for first, second in ((one, other), (other, one)):
        world = World()
        create(world, json.dumps(first))
        with pytest.raises(InvalidArgument, match="can't read data written by") as refusal:
            commit(world, json.dumps(second))
        assert len(revision_ids(world)) == 1
        if (first, second) == (one, other):
            assert refusal.match(reason)


def test_a_revision_is_compared_with_the_latest_and_a_rollback_with_none() -> None:
    world = World()
    first = create(world, json.dumps(record(NAMED)))
    steps = (record(NAMED, OPTIONAL), record(field("name", "string", default=""), OPTIONAL))
    for step in (*steps, record(OPTIONAL)):
        commit(world, json.dumps(step))
    world.call("RollbackSchema", "RollbackSchemaRequest", name=NAME, revision_id=first.revision_id)
    assert json.loads(get(world).definition) == record(NAMED)


def test_a_large_definition_is_compared_in_one_pass() -> None:
    fixed = [{"type": "fixed", "name": f"F{number}", "size": 4} for number in range(4_000)]
    chain = [
        record(field("next", f"R{number + 1}"), name=f"R{number}") for number in range(1_500, 0, -1)
    ]
    world = World()
    rest = [record(name="R1501"), *chain]
    create(world, json.dumps([*fixed, *rest], separators=(",", ":")))
    commit(world, json.dumps([*fixed[::-1], *rest], separators=(",", ":")))
    assert len(revision_ids(world)) == 2


PRIMITIVES = st.sampled_from(
    ["null", "boolean", "int", "long", "float", "double", "bytes", "string"]
)


def definitions(depth: int) -> st.SearchStrategy[Any]:
    """Definitions without unions: Apache's check requires only one compatible branch of a union."""
    if not depth:
        return PRIMITIVES
    inner = definitions(depth - 1)
    symbols = st.sets(st.sampled_from("ABC"), min_size=1).map(sorted)
    made_field = st.tuples(st.sampled_from("xyz"), inner, st.booleans())
    return st.one_of(
        inner,
        st.builds(lambda kind: {"type": "array", "items": kind}, inner),
        st.builds(lambda kind: {"type": "map", "values": kind}, inner),
        st.builds(
            lambda names, has_default: enum(
                *names, name=f"E{depth}", **({"default": names[0]} if has_default else {})
            ),
            symbols,
            st.booleans(),
        ),
        st.lists(made_field, max_size=3, unique_by=lambda made: made[0]).map(
            lambda made: _record_of(made, depth)
        ),
    )


def _record_of(made: list[tuple[str, Any, bool]], depth: int) -> dict[str, Any]:
    fields = []
    for name, kind, has_default in made:
        default = {"int": 0, "string": "", "null": None}
        more = {"default": default[kind]} if has_default and str(kind) in default else {}
        # Each record is named after its position, because names must be unique.
        fields.append(field(name, _rename_types(kind, name), **more))
    return record(*fields, name=f"R{depth}")


def _rename_types(kind: Any, place: str) -> Any:
    if isinstance(kind, list):
        return [_rename_types(part, place) for part in kind]
    if isinstance(kind, dict):
        renamed = {key: _rename_types(value, place) for key, value in kind.items()}
        return (
            renamed
            | ({"name": f"{place}_{kind['name']}"} if "symbols" in kind else {})
            | ({"name": f"{place}_{kind['name']}"} if "fields" in kind else {})
        )
    return kind


@given(one=definitions(2), other=definitions(2))
def test_apaches_check_says_the_same(one: Any, other: Any) -> None:
    first, second = (avro.schema.make_avsc_object(definition) for definition in (one, other))
    apaches = cast("Any", ReaderWriterCompatibilityChecker)
    expected = all(
        apaches().get_compatibility(reader, writer).compatibility
        is SchemaCompatibilityType.compatible
        for reader, writer in ((first, second), (second, first))
    )
    try:
        check_changes(first, second)
        is_readable = True
    except Malformed:
        is_readable = False
    assert is_readable == expected
