"""A schema's definition, read and checked: what messages are validated against."""

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import avro.errors
import avro.schema

from infra.emulators.pubsub.errors import InvalidArgument, Unimplemented
from infra.emulators.pubsub.schemas.avro_binary import check_binary
from infra.emulators.pubsub.schemas.avro_json import check_json
from infra.emulators.pubsub.schemas.mismatch import Budget

MAX_DEFINITION_BYTES = 300 * 1024
"""Source: https://cloud.google.com/pubsub/quotas#resource_limits"""

MAX_NESTING = 64
"""How deep the JSON of a definition may be nested. The library's refusals repeat each level, so
deeper ones took it seconds to write."""
_LONGEST_REASON = 500
"""The library repeats what it could not read."""
_KEPT = 32
"""Definitions that were read last. So one that was read in a thread is not read again."""
_CHECKS: dict[str, Callable[[avro.schema.Schema, bytes, Budget], None]] = {
    "JSON": check_json,
    "BINARY": check_binary,
}


class Definition:
    """A valid definition. It does not change, so threads may share it.

    Args:
        schema: a `google.pubsub.v1.Schema` with a type and a definition.

    Raises:
        InvalidArgument: no type, or not a definition of its type, with the reason.
        Unimplemented: a definition in the language of protocol buffers.
    """

    def __init__(self, schema: Any) -> None:
        kinds = schema.Type
        if schema.type_ == kinds.Value("PROTOCOL_BUFFER"):
            raise Unimplemented(
                "The embedded Pub/Sub has no schemas of type PROTOCOL_BUFFER. Use AVRO, or the "
                "service."
            )
        if schema.type_ != kinds.Value("AVRO"):
            raise InvalidArgument(
                "Invalid schema type given. The type of a schema must be AVRO or PROTOCOL_BUFFER."
            )
        size_bytes = len(schema.definition.encode())
        if size_bytes > MAX_DEFINITION_BYTES:
            raise InvalidArgument(
                f"The definition of the schema is too large. You passed {size_bytes} bytes, but "
                f"the maximum is {MAX_DEFINITION_BYTES}."
            )
        self._schema = _parsed(schema.definition)

    def check(self, message: bytes, encoding: str, budget: Budget) -> None:
        """Refuse a message that does not fit.

        Args:
            message: the data of a message.
            encoding: JSON or BINARY.
            budget: of the request that the message is of.

        Raises:
            Mismatch: where it does not fit, and why.
        """
        _CHECKS[encoding](self._schema, message, budget)


@lru_cache(maxsize=_KEPT)
def _parsed(definition: str) -> avro.schema.Schema:
    try:
        decoded = json.loads(definition)
        _check_nesting(decoded)
        parsed = avro.schema.make_avsc_object(_without_logical_types(decoded))
    except RecursionError:
        reason = f"it is nested deeper than {MAX_NESTING} levels"
    # Beside its own errors the library lets through what it meets in values of a wrong type.
    except (avro.errors.AvroException, ValueError, TypeError, AttributeError, KeyError) as error:
        reason = str(error).rstrip(".")
    else:
        if parsed.type not in ("error", "error_union", "request"):
            return parsed
        reason = f"the type {parsed.type} is of protocols only"
    raise InvalidArgument(f"Invalid schema definition given: {reason[:_LONGEST_REASON]}.")


def _without_logical_types(value: Any) -> Any:
    """Return a definition without what changes no encoding, and makes the library warn."""
    if isinstance(value, list):
        return [_without_logical_types(inner) for inner in value]
    if isinstance(value, dict):
        return {
            key: _without_logical_types(inner)
            for key, inner in value.items()
            if key != "logicalType"
        }
    return value


def _check_nesting(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise RecursionError
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
