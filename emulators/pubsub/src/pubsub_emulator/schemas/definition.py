"""A schema's definition, read and checked: what messages are validated against."""

from collections import deque
from typing import Any
from weakref import WeakValueDictionary

from pubsub_emulator.errors import InvalidArgument
from pubsub_emulator.schemas.avro_definition import AvroDefinition
from pubsub_emulator.schemas.mismatch import Malformed
from pubsub_emulator.schemas.proto_definition import ProtoDefinition

MAX_DEFINITION_BYTES = 300 * 1024
"""Source: https://cloud.google.com/pubsub/quotas#resource_limits"""

_LONGEST_REASON = 500
"""Compilers repeat what they could not read."""
_QUICKLY_READ_LENGTH = 8 * 1024
_PROTOCOL_BUFFER = 1

Definition = AvroDefinition | ProtoDefinition
_READERS: dict[int, type[AvroDefinition] | type[ProtoDefinition]] = {
    2: AvroDefinition,
    _PROTOCOL_BUFFER: ProtoDefinition,
}

# A definition is read once as long as somebody has it, and a while longer: who validates messages
# sends the definition with each.
_in_use: "WeakValueDictionary[tuple[int, str], Definition]" = WeakValueDictionary()
_read_last: "deque[Definition]" = deque(maxlen=8)


def read_definition(schema: Any) -> Definition:
    """Return the definition of a schema, checked.

    Args:
        schema: a `google.pubsub.v1.Schema` with a type and a definition.

    Raises:
        InvalidArgument: no type, or not a definition of its type, with the reason.
    """
    key = (schema.type_, schema.definition)
    definition = _in_use.get(key)
    if definition is None:
        definition = _in_use[key] = _read(*key)
        _read_last.append(definition)
    return definition


def kind_of(schema: Any) -> str:
    """Return AVRO or PROTO, the type of a schema in refusals of messages."""
    return _READERS[schema.type_].kind


def is_read_slowly(schema: Any) -> bool:
    """Say whether to read this definition in a thread, so that others are answered meanwhile."""
    is_compiled: bool = schema.type_ == _PROTOCOL_BUFFER
    return is_compiled or len(schema.definition) > _QUICKLY_READ_LENGTH


def check_revision(definition: Definition, latest: Definition) -> None:
    """Refuse a revision that changes more than a revision may.

    Raises:
        InvalidArgument: it is of another type, or with the field that differs.
    """
    if definition.kind != latest.kind:
        raise InvalidArgument("The type of a schema can't be changed by a revision.")
    try:
        if isinstance(definition, AvroDefinition) and isinstance(latest, AvroDefinition):
            definition.check_revises(latest)
        if isinstance(definition, ProtoDefinition) and isinstance(latest, ProtoDefinition):
            definition.check_revises(latest)
    except Malformed as error:
        raise _invalid(error) from None


def _read(kind: int, definition: str) -> Definition:
    if kind not in _READERS:
        raise InvalidArgument(
            "Invalid schema type given. The type of a schema must be AVRO or PROTOCOL_BUFFER."
        )
    size_bytes = len(definition.encode())
    if size_bytes > MAX_DEFINITION_BYTES:
        raise InvalidArgument(
            f"The definition of the schema is too large. You passed {size_bytes} bytes, but "
            f"the maximum is {MAX_DEFINITION_BYTES}."
        )
    try:
        return _READERS[kind](definition)
    except Malformed as error:
        raise _invalid(error) from None


def _invalid(error: Malformed) -> InvalidArgument:
    reason = str(error)[:_LONGEST_REASON].rstrip(".")
    return InvalidArgument(f"Invalid schema definition given: {reason}.")
