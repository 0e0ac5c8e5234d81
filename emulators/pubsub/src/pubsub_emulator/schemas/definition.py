"""A parsed and checked schema definition, against which messages are validated."""

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
"""Maximum length of a reason. Compilers quote any text that they can't parse."""
_QUICKLY_READ_LENGTH = 8 * 1024
_PROTOCOL_BUFFER = 1

Definition = AvroDefinition | ProtoDefinition
_READERS: dict[int, type[AvroDefinition] | type[ProtoDefinition]] = {
    2: AvroDefinition,
    _PROTOCOL_BUFFER: ProtoDefinition,
}

# A definition stays parsed while it is in use and for a while afterward, because callers that
# validate messages send the definition every time.
_in_use: "WeakValueDictionary[tuple[int, str], Definition]" = WeakValueDictionary()
_read_last: "deque[Definition]" = deque(maxlen=8)


def read_definition(schema: Any) -> Definition:
    """Return a schema's checked definition.

    Args:
        schema: a `google.pubsub.v1.Schema` with a type and a definition.

    Raises:
        InvalidArgument: the type is missing, or the definition is invalid. The message states the
            reason.
    """
    key = (schema.type_, schema.definition)
    definition = _in_use.get(key)
    if definition is None:
        definition = _in_use[key] = _read(*key)
        _read_last.append(definition)
    return definition


def kind_of(schema: Any) -> str:
    """Return AVRO or PROTO, the schema type to name in errors about messages."""
    return _READERS[schema.type_].kind


def is_read_slowly(schema: Any) -> bool:
    """True if parsing is slow enough to need a thread, so that other calls are not delayed."""
    is_compiled: bool = schema.type_ == _PROTOCOL_BUFFER
    return is_compiled or len(schema.definition) > _QUICKLY_READ_LENGTH


def check_revision(definition: Definition, latest: Definition) -> None:
    """Reject a revision that makes forbidden changes.

    Raises:
        InvalidArgument: the revision has a different type, or a field differs. The message names
            the field.
    """
    if definition.kind != latest.kind:
        raise InvalidArgument("A revision can't change the type of a schema.")
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
