"""Messages checked against Avro definitions: results match the library's, and nothing crashes."""

import io
import json
import warnings
from contextlib import suppress
from typing import Any

import avro.io
import avro.schema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pubsub_emulator.protos import Schema
from pubsub_emulator.schemas.definition import Definition, read_definition
from pubsub_emulator.schemas.mismatch import MAX_DEPTH, Budget, Mismatch

AVRO = 2
LIST = {
    "type": "record",
    "name": "List",
    "fields": [{"name": "next", "type": ["null", "List"]}],
}
UNION = {"type": "record", "name": "U", "fields": [{"name": "o", "type": ["null", "string"]}]}
FIXED = {"type": "fixed", "name": "F", "size": 2}
ENUM = {"type": "enum", "name": "E", "symbols": ["A", "B"]}


def definition(avro_type: Any) -> Definition:
    return read_definition(Schema(type_=AVRO, definition=json.dumps(avro_type)))


def check(avro_type: Any, data: bytes, encoding: str) -> None:
    definition(avro_type).check(data, encoding, Budget())


@pytest.mark.parametrize(
    ("avro_type", "text"),
    [
        ("null", "null"),
        ("boolean", "true"),
        ("int", "-2147483648"),
        ("long", "9223372036854775807"),
        ("double", "1"),
        ("float", "1.5e3"),
        ("string", '"é"'),
        ("bytes", '"\\u00ff"'),
        (FIXED, '"ab"'),
        (ENUM, '"A"'),
        ({"type": "array", "items": "int"}, "[1, 2]"),
        ({"type": "map", "values": "int"}, '{"a": 1}'),
        (UNION, '{"o": null}'),
        (UNION, '{"o": {"string": "x"}}'),
        (UNION, '{"o": null, "more": 1}'),
        (["null", {**LIST, "namespace": "n"}], '{"n.List": {"next": null}}'),
        (LIST, '{"next": {"List": {"next": null}}}'),
        ({"type": "long", "logicalType": "timestamp-micros"}, "1"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 9}, '"a"'),
    ],
)
def test_json_that_fits(avro_type: Any, text: str) -> None:
    check(avro_type, text.encode(), "JSON")


@pytest.mark.parametrize(
    ("avro_type", "text", "reason"),
    [
        ("null", "0", "it is an integer, but the schema has null"),
        ("boolean", "1", "it is an integer"),
        ("int", "2147483648", "out of range for int"),
        ("int", "1.0", "a number with a fraction"),
        ("int", "true", "a boolean"),
        ("long", "9223372036854775808", "out of range for long"),
        ("double", "NaN", "NaN is none"),
        ("string", "1", "it is an integer"),
        ("bytes", '"\\u0100"', "above U"),
        (FIXED, '"abc"', "it is 3 bytes, but the schema requires 2"),
        (ENUM, '"C"', "not a symbol of E"),
        (ENUM, "[]", "it is a list"),
        ({"type": "array", "items": "int"}, '[1, "2"]', r"\[1\]: it is a string"),
        ({"type": "map", "values": "int"}, '{"a": null}', "a: it is null"),
        (UNION, '{"o": "x"}', "o: it must be null or an object"),
        (UNION, '{"o": {"int": 1}}', "o: it names no branch"),
        (UNION, "{}", "the field o is missing"),
        (LIST, '{"next": {"List": {"next": 1}}}', "next.next: it must be"),
        ("int", "1 x", "not valid JSON"),
        ("int", "", "not valid JSON"),
        ("int", "\udcff", "not valid JSON"),
        ("int", "[" * 100_000, "nested too deeply"),
        ("int", "9" * 5000, "not valid JSON"),
        (LIST, '{"next": {"List": ' * 200 + "1" + "}}" * 200, "more than 100 levels deep"),
    ],
)
def test_json_that_does_not_fit_says_where_and_why(avro_type: Any, text: str, reason: str) -> None:
    with pytest.raises(Mismatch, match=reason):
        check(avro_type, text.encode("utf-8", "surrogateescape"), "JSON")


@pytest.mark.parametrize(
    ("avro_type", "data", "reason"),
    [
        ("int", b"", "Too little data"),
        ("int", b"\x02\x02", "Too much data"),
        ("int", b"\x80\x80\x80\x80\x10", "exceeds 32 bits"),
        ("long", b"\x80" * 20, "exceeds 64 bits"),
        ("boolean", b"\x02", "neither 0 nor 1"),
        ("string", b"\x04\xff\xff", "not valid UTF-8"),
        ("string", b"\x01", "negative"),
        ("bytes", b"\xfe\xff\xff\xff\x0fa", "Too little data"),
        ("double", b"1234567", "Too little data"),
        (FIXED, b"a", "Too little data"),
        (ENUM, b"\x04", "not a symbol of E"),
        (["null", "int"], b"\x04", "no branch 2"),
        (UNION, b"\x02\x02", "o: Too little data"),
        ({"type": "array", "items": "int"}, b"\xfe\xff\xff\xff\x0f\x02", "Too little data"),
        (LIST, b"\x02" * 1_000_000, f"more than {MAX_DEPTH} levels deep"),
    ],
)
def test_binary_that_does_not_fit_says_why(avro_type: Any, data: bytes, reason: str) -> None:
    with pytest.raises(Mismatch, match=reason):
        check(avro_type, data, "BINARY")


def test_a_billion_values_of_no_bytes_are_not_counted_one_by_one() -> None:
    check({"type": "array", "items": "null"}, b"\xfe\xff\xff\xff\x0f\x00", "BINARY")


def test_definition_that_stands_for_more_values_than_are_checked_ends() -> None:
    laughs: Any = {"type": "record", "name": "r0", "fields": [{"name": "a", "type": "null"}]}
    for number in range(1, 20):
        twice = [{"name": "a", "type": laughs}, {"name": "b", "type": f"r{number - 1}"}]
        laughs = {"type": "record", "name": f"r{number}", "fields": twice}
    with pytest.raises(Mismatch, match="more values than"):
        definition(laughs).check(b"", "BINARY", Budget(values=1000))


def test_messages_of_a_request_share_what_may_be_checked() -> None:
    budget, numbers = Budget(values=10), definition({"type": "array", "items": "int"})
    numbers.check(b"[1, 2, 3]", "JSON", budget)
    numbers.check(b"[1, 2, 3]", "JSON", budget)
    with pytest.raises(Mismatch, match="more values than"):
        numbers.check(b"[1, 2, 3]", "JSON", budget)


primitives: list[tuple[Any, st.SearchStrategy[Any]]] = [
    ("null", st.none()),
    ("boolean", st.booleans()),
    ("int", st.integers(-(2**31), 2**31 - 1)),
    ("long", st.integers(-(2**63), 2**63 - 1)),
    ("float", st.floats(width=32, allow_nan=False)),
    ("double", st.floats(allow_nan=False)),
    ("string", st.text(max_size=5)),
    ("bytes", st.binary(max_size=5)),
]


@st.composite
def typed_values(draw: Any, depth: int = 0) -> tuple[Any, Any]:
    """An Avro type and one of its values."""
    kind = draw(st.sampled_from(["primitive", "array", "map", "record", "union", "enum"]))
    if kind == "primitive" or depth > 2:
        name, values = draw(st.sampled_from(primitives))
        return name, draw(values)
    name = f"n{depth}"
    if kind == "enum":
        return {"type": "enum", "name": name, "symbols": ["A", "B"]}, draw(st.sampled_from("AB"))
    inner, value = draw(typed_values(depth + 1))
    if kind == "array":
        return {"type": "array", "items": inner}, [value] * draw(st.integers(0, 3))
    if kind == "map":
        keys = draw(st.lists(st.text(max_size=3), max_size=3))
        return {"type": "map", "values": inner}, dict.fromkeys(keys, value)
    if kind == "union" and inner != "null" and not isinstance(inner, list):
        return ["null", inner], draw(st.sampled_from([None, value]))
    fields = [{"name": "a", "type": inner}, {"name": "b", "type": "int"}]
    return {"type": "record", "name": name, "fields": fields}, {"a": value, "b": 1}


def written(avro_type: Any, value: Any) -> bytes:
    buffer = io.BytesIO()
    writer = avro.io.DatumWriter(avro.schema.parse(json.dumps(avro_type)))
    writer.write(value, avro.io.BinaryEncoder(buffer))
    return buffer.getvalue()


@given(typed_values())
def test_what_the_library_writes_fits_and_a_byte_less_or_more_does_not(
    typed: tuple[Any, Any],
) -> None:
    avro_type, value = typed
    data = written(avro_type, value)
    check(avro_type, data, "BINARY")
    with pytest.raises(Mismatch, match="Too much"):
        check(avro_type, data + b"\0", "BINARY")
    if data:
        with pytest.raises(Mismatch):
            check(avro_type, data[:-1], "BINARY")


@given(typed_values(), st.binary(max_size=20), st.sampled_from(["JSON", "BINARY"]))
def test_any_bytes_fit_or_are_a_mismatch(
    typed: tuple[Any, Any], data: bytes, encoding: str
) -> None:
    with suppress(Mismatch):
        check(typed[0], data, encoding)


def test_definitions_warn_nobody() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        definition({"type": "int", "logicalType": "timestamp-micros"})
