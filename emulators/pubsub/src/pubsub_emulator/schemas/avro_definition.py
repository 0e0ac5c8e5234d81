"""A schema definition in Avro's JSON, parsed by Apache's library."""

import json
from collections.abc import Callable
from typing import Any

import avro.errors
import avro.schema

from pubsub_emulator.schemas.avro_binary import check_binary
from pubsub_emulator.schemas.avro_changes import check_changes
from pubsub_emulator.schemas.avro_json import check_json
from pubsub_emulator.schemas.mismatch import Budget, Malformed

MAX_NESTING = 64
"""Maximum nesting depth of a definition's JSON.

The library's errors repeat every level, so with deeper nesting, formatting them took seconds.
"""
_CHECKS: dict[str, Callable[[avro.schema.Schema, bytes, Budget], None]] = {
    "JSON": check_json,
    "BINARY": check_binary,
}


class AvroDefinition:
    """A valid definition in Avro's JSON. It is immutable, so threads may share it.

    Raises:
        Malformed: the definition is invalid. Contains the reason.
    """

    kind = "AVRO"

    def __init__(self, definition: str) -> None:
        self._schema = _parsed(definition)

    def check(self, message: bytes, encoding: str, budget: Budget) -> None:
        """Reject a message that does not match, by raising `Mismatch`."""
        _CHECKS[encoding](self._schema, message, budget)

    def check_revises(self, latest: "AvroDefinition") -> None:
        """Reject changes that a revision of `latest` may not make, by raising `Malformed`."""
        check_changes(latest._schema, self._schema)


def _parsed(definition: str) -> avro.schema.Schema:
    try:
        decoded = json.loads(definition)
        _check_nesting(decoded)
        parsed = avro.schema.make_avsc_object(_without_logical_types(decoded))
    except RecursionError:
        raise Malformed(f"it is nested more than {MAX_NESTING} levels deep") from None
    # The library raises its own errors, plus various others if values have the wrong type.
    except (avro.errors.AvroException, ValueError, TypeError, AttributeError, KeyError) as error:
        raise Malformed(str(error)) from None
    if parsed.type in ("error", "error_union", "request"):
        raise Malformed(f"the type {parsed.type} is only allowed in protocols")
    return parsed


def _without_logical_types(value: Any) -> Any:
    """Remove definition parts that don't affect the encoding but trigger library warnings."""
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
