"""Validates a message in Avro's JSON encoding.

Source: https://avro.apache.org/docs/1.12.0/specification/#json-encoding. As in the service and its
emulator, a record may have fields that the schema lacks, and a default value does not make up for a
missing field.
"""

import json
from collections.abc import Callable
from typing import Any, NoReturn

import avro.schema

from pubsub_emulator.schemas.mismatch import Budget, Mismatch

_INTS = {"int": 2**31, "long": 2**63}
_SYMBOLS_A_VALUE = 16
"""Number of symbols that can be compared in the time it takes to check one value."""
_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number with a fraction",
    type(None): "null",
}


def check_json(schema: avro.schema.Schema, message: bytes, budget: Budget) -> None:
    """Reject a message that is not exactly one value of a schema.

    Raises:
        Mismatch: the message does not match; the error has the location and the reason.
    """
    try:
        value = json.loads(message.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise Mismatch("the message is nested too deeply") from None
    except ValueError as error:
        raise Mismatch(f"the message is not valid JSON: {error}") from None
    _check(schema, value, budget, 0)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is none")


def _check(schema: Any, value: Any, budget: Budget, depth: int) -> None:
    budget.enter(depth)
    _CHECK[schema.type](schema, value, budget, depth)


def _check_within(part: str, schema: Any, value: Any, budget: Budget, depth: int) -> None:
    try:
        _check(schema, value, budget, depth)
    except Mismatch as mismatch:
        mismatch.within(part)
        raise


def _refuse(schema: Any, value: Any) -> NoReturn:
    raise Mismatch(f"it is {_NAMES[type(value)]}, but the schema has {schema.type}")


def _null(schema: Any, value: Any, budget: Budget, depth: int) -> None:
    if value is not None:
        _refuse(schema, value)


def _boolean(schema: Any, value: Any, budget: Budget, depth: int) -> None:
    if not isinstance(value, bool):
        _refuse(schema, value)


def _integer(schema: Any, value: Any, budget: Budget, depth: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(schema, value)
    limit = _INTS[schema.type]
    if not -limit <= value < limit:
        raise Mismatch(f"it is out of range for {schema.type}")


def _number(schema: Any, value: Any, budget: Budget, depth: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(schema, value)


def _string(schema: Any, value: Any, budget: Budget, depth: int) -> None:
    if not isinstance(value, str):
        _refuse(schema, value)


def _bytes(schema: Any, value: Any, budget: Budget, depth: int) -> None:
    """Reject a string in which any character does not represent exactly one byte."""
    if not isinstance(value, str):
        _refuse(schema, value)
    if not value.isascii() and max(value) > "\xff":
        raise Mismatch("it has characters above U+00FF, which can't represent bytes")


def _fixed(schema: Any, value: Any, budget: Budget, depth: int) -> None:
    _bytes(schema, value, budget, depth)
    if len(value) != schema.size:
        raise Mismatch(f"it is {len(value)} bytes, but the schema requires {schema.size}")


def _enum(schema: Any, value: Any, budget: Budget, depth: int) -> None:
    if not isinstance(value, str):
        _refuse(schema, value)
    budget.enter(depth, len(schema.symbols) // _SYMBOLS_A_VALUE)
    if value not in schema.symbols:
        raise Mismatch(f"it is not a symbol of {schema.fullname}")


def _record(schema: Any, value: Any, budget: Budget, depth: int) -> None:
    if not isinstance(value, dict):
        _refuse(schema, value)
    for field in schema.fields:
        if field.name not in value:
            raise Mismatch(f"the field {field.name} is missing")
        _check_within(f".{field.name}", field.type, value[field.name], budget, depth + 1)


def _array(schema: Any, value: Any, budget: Budget, depth: int) -> None:
    if not isinstance(value, list):
        _refuse(schema, value)
    for number, item in enumerate(value):
        _check_within(f"[{number}]", schema.items, item, budget, depth + 1)


def _map(schema: Any, value: Any, budget: Budget, depth: int) -> None:
    if not isinstance(value, dict):
        _refuse(schema, value)
    for key, item in value.items():
        _check_within(f".{key}", schema.values, item, budget, depth + 1)


def _union(schema: Any, value: Any, budget: Budget, depth: int) -> None:
    if value is None:
        name, inner = "null", None
    elif isinstance(value, dict) and len(value) == 1:
        ((name, inner),) = value.items()
    else:
        raise Mismatch("it must be null or an object that names one branch of the union")
    budget.enter(depth, len(schema.schemas))
    for branch in schema.schemas:
        if getattr(branch, "fullname", branch.type) == name:
            _check(branch, inner, budget, depth + 1)
            return
    raise Mismatch("it names no branch of the union")


_CHECK: dict[str, Callable[[Any, Any, Budget, int], None]] = {
    "null": _null,
    "boolean": _boolean,
    "int": _integer,
    "long": _integer,
    "float": _number,
    "double": _number,
    "bytes": _bytes,
    "string": _string,
    "fixed": _fixed,
    "enum": _enum,
    "record": _record,
    "error": _record,
    "array": _array,
    "map": _map,
    "union": _union,
}
