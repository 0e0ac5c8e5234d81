"""Converts between JSON over HTTP and the services' protobuf requests and responses.

Source: https://github.com/googleapis/googleapis/blob/master/google/api/http.proto and
https://protobuf.dev/programming-guides/json/.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from google.protobuf import json_format

from pubsub_emulator.errors import InvalidArgument
from pubsub_emulator.protocols.rest_rules import Rule

_SYSTEM_PARAMETERS = frozenset(
    {"access_token", "alt", "callback", "fields", "key", "oauth_token", "prettyPrint", "quotaUser"}
)
"""Source: https://cloud.google.com/apis/docs/system-parameters

Parameters that start with `$` are handled separately.
"""
_MASKS = frozenset({"updateMask", "update_mask"})
_BOOLEANS = {"true": True, "false": False}
_CPP_BOOL = 7
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def to_request(
    kind: Any,
    rule: Rule,
    path_fields: Mapping[str, str],
    parameters: Sequence[tuple[str, str]],
    body: bytes,
) -> Any:
    """Convert an HTTP request to the corresponding protobuf request.

    Args:
        path_fields: fields from the path, keyed by name.
        body: the raw body. It is ignored if the rule has no body.

    Raises:
        InvalidArgument: a field is invalid. The message states the field and the problem.
    """
    fields: dict[str, Any] = {}
    if rule.body == "*":
        fields = _decoded(body)
    elif rule.body:
        fields[rule.body] = _decoded(body)
    for name, value in parameters:
        if name not in _SYSTEM_PARAMETERS and not name.startswith("$"):
            _put(fields, kind.DESCRIPTOR, name, value)
    request = kind()
    try:
        json_format.ParseDict(_with_camel_masks(fields), request)
        for name, value in path_fields.items():
            _set(request, name, value)
    # The parser raises its own errors, plus various others if values have the wrong type.
    except (json_format.Error, ValueError, TypeError, AttributeError, KeyError) as error:
        raise InvalidArgument(f"Invalid JSON payload received. {_first_sentence(error)}") from None
    except RecursionError:
        raise InvalidArgument("Invalid JSON payload received. It is nested too deeply.") from None
    return request


def to_json(kind: Any, response: bytes) -> bytes:
    """Return a serialized response of class `kind` as JSON."""
    fields = json_format.MessageToDict(kind.FromString(response))
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        # Otherwise, `json` would guess the encoding of bytes that are not UTF-8.
        decoded = json.loads(body.decode() or "{}", parse_constant=_refuse_constant)
        if _ESCAPED_SURROGATE.search(body):
            # An unpaired surrogate breaks the protobuf library and sometimes crashes the process.
            json.dumps(decoded, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidArgument("Invalid JSON payload received. It is nested too deeply.") from None
    except ValueError as error:
        raise InvalidArgument(f"Invalid JSON payload received. {error}") from None
    if not isinstance(decoded, dict):
        raise InvalidArgument("Invalid JSON payload received. The body must be an object.")
    return decoded


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON.")


def _put(fields: dict[str, Any], descriptor: Any, name: str, value: str) -> None:
    """Insert a parameter such as `a.b=1` as if it were part of the body."""
    *parents, last = name.split(".")
    for parent in parents:
        field = _field(descriptor, parent)
        descriptor = field.message_type if field is not None else None
        inside = fields.setdefault(parent, {})
        if descriptor is None or not isinstance(inside, dict):
            raise InvalidArgument(f'Invalid value or name of the query parameter "{name}".')
        fields = inside
    field = _field(descriptor, last)
    if field is None:
        raise InvalidArgument(
            f'Invalid JSON payload received. Unknown name "{name}": Cannot bind query parameter.'
        )
    if field.is_repeated and isinstance(fields.setdefault(last, []), list):
        fields[last].append(value)
    elif last in fields:
        raise InvalidArgument(f'The query parameter "{name}" is specified twice.')
    else:
        is_bool = field.cpp_type == _CPP_BOOL
        fields[last] = _BOOLEANS.get(value, value) if is_bool else value


def _field(descriptor: Any, name: str) -> Any:
    by_name = descriptor.fields_by_camelcase_name, descriptor.fields_by_name
    return next((fields[name] for fields in by_name if name in fields), None)


def _with_camel_masks(fields: dict[str, Any]) -> dict[str, Any]:
    # The service accepts `ack_deadline_seconds` in masks, but the parser rejects it.
    return {
        name: re.sub(r"_([a-z])", lambda letter: letter[1].upper(), value)
        if name in _MASKS and isinstance(value, str)
        else value
        for name, value in fields.items()
    }


def _set(request: Any, name: str, value: str) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        request = getattr(request, parent)
    setattr(request, last, value)


def _first_sentence(error: Exception) -> str:
    # The rest of the message just lists the existing fields.
    return str(error).split("\n")[0].strip()
