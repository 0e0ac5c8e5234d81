"""Validates a message in the JSON encoding of protocol buffers.

Source: https://protobuf.dev/programming-guides/json/. Unknown fields are rejected, which is the
default for parsers. Definitions have no imports, so no type has a special JSON form.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from pubsub_emulator.schemas.mismatch import Budget, Mismatch
from pubsub_emulator.schemas.proto_types import Field, MessageType

_LONGEST_NAME = 100
_MAX_FLOAT = (2 - 2**-23) * 2.0**127
_RANGES = {
    **dict.fromkeys(("INT32", "SINT32", "SFIXED32", "ENUM"), (-(2**31), 2**31)),
    **dict.fromkeys(("INT64", "SINT64", "SFIXED64"), (-(2**63), 2**63)),
    **dict.fromkeys(("UINT32", "FIXED32"), (0, 2**32)),
    **dict.fromkeys(("UINT64", "FIXED64"), (0, 2**64)),
}
_WHOLE = re.compile(r"-?[0-9]{1,20}")
_NUMBER = re.compile(r"-?[0-9]{1,400}(\.[0-9]{1,400})?([eE][+-]?[0-9]{1,4})?")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]*={0,2}")
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")
_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def check_json(root: MessageType, message: bytes, budget: Budget) -> None:
    """Reject JSON that is not a message of the given type.

    Raises:
        Mismatch: the message does not match; the error has the location and the reason.
    """
    try:
        value = json.loads(
            message.decode(), parse_constant=_refuse_constant, object_pairs_hook=_without_twins
        )
    except RecursionError:
        raise Mismatch("the message is nested too deeply") from None
    except ValueError as error:
        raise Mismatch(f"the message is not valid JSON: {error}") from None
    _message(root, value, budget, 0)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} must be in quotes")


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object has a duplicate name")
    return members


def _refuse(expected: str, value: Any) -> NoReturn:
    raise Mismatch(f"it is {_KINDS[type(value)]}, but the schema has {expected}")


def _message(kind: MessageType, value: Any, budget: Budget, depth: int) -> None:
    budget.enter(depth)
    if not isinstance(value, dict):
        _refuse(f"the message {kind.name}", value)
    seen: set[int] = set()
    oneofs: set[int] = set()
    for name, inner in value.items():
        field = kind.by_json_name.get(name)
        if field is None:
            raise Mismatch(f"{kind.name} has no field {name[:_LONGEST_NAME]}")
        budget.enter(depth)
        if inner is None:
            continue
        if field.number in seen or field.oneof in oneofs:
            raise Mismatch(f"{name} is set under two names, or another field of its oneof is set")
        seen.add(field.number)
        if field.oneof is not None:
            oneofs.add(field.oneof)
        _within(f".{name}", _field, field, inner, budget, depth + 1)
    for number, name in kind.required.items():
        if number not in seen:
            raise Mismatch(f"the required field {name} is missing")


def _within(part: str, check: Callable[..., None], *arguments: Any) -> None:
    try:
        check(*arguments)
    except Mismatch as mismatch:
        mismatch.within(part)
        raise


def _field(field: Field, value: Any, budget: Budget, depth: int) -> None:
    if not field.is_repeated:
        _value(field, value, budget, depth)
    elif field.message is not None and field.message.is_map_entry:
        _map(field.message, value, budget, depth)
    else:
        if not isinstance(value, list):
            _refuse("a list", value)
        for number, item in enumerate(value):
            _within(f"[{number}]", _value, field, item, budget, depth)


def _map(entry: MessageType, value: Any, budget: Budget, depth: int) -> None:
    if not isinstance(value, dict):
        _refuse("a map", value)
    keys, values = entry.by_number[1], entry.by_number[2]
    for key, item in value.items():
        part = f".{key[:_LONGEST_NAME]}"
        if keys.type == "BOOL":
            if key not in ("true", "false"):
                raise Mismatch("a key is neither true nor false")
        else:
            _within(part, _value, keys, key, budget, depth)
        _within(part, _value, values, item, budget, depth)


def _value(field: Field, value: Any, budget: Budget, depth: int) -> None:
    if field.message is not None:
        _message(field.message, value, budget, depth)
        return
    budget.enter(depth)
    if value is None:
        raise Mismatch("a list or map contains null")
    _CHECKS.get(field.type, _integer)(field, value)


def _integer(field: Field, value: Any) -> None:
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(field.type.lower(), value)
    low, high = _RANGES[field.type]
    if not low <= value < high:
        raise Mismatch(f"it is out of range for {field.type.lower()}")


def _number(field: Field, value: Any) -> None:
    if value in _NO_NUMBERS:
        return
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(field.type.lower(), value)
    limit = _MAX_FLOAT if field.type == "FLOAT" else math.inf
    try:
        is_in_range = abs(float(value)) <= limit and math.isfinite(value)
    except OverflowError:
        is_in_range = False
    if not is_in_range:
        raise Mismatch(f"it is out of range for {field.type.lower()}")


def _boolean(field: Field, value: Any) -> None:
    if not isinstance(value, bool):
        _refuse("bool", value)


def _string(field: Field, value: Any) -> None:
    if not isinstance(value, str):
        _refuse("string", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Mismatch("a string has an unpaired surrogate") from None


def _bytes(field: Field, value: Any) -> None:
    if not isinstance(value, str):
        _refuse("bytes", value)
    if not _BASE64.fullmatch(value) or len(value.rstrip("=")) % 4 == 1:
        raise Mismatch("it is not valid base64")


def _enum(field: Field, value: Any) -> None:
    assert field.enum is not None
    if isinstance(value, str):
        if value not in field.enum.names:
            raise Mismatch(f"it is not a value of {field.enum.name}")
        return
    _integer(field, value)
    if field.enum.is_closed and value not in field.enum.numbers:
        raise Mismatch(f"it is not a value of {field.enum.name}")


_CHECKS: dict[str, Callable[[Field, Any], None]] = {
    "DOUBLE": _number,
    "FLOAT": _number,
    "BOOL": _boolean,
    "STRING": _string,
    "BYTES": _bytes,
    "ENUM": _enum,
}
