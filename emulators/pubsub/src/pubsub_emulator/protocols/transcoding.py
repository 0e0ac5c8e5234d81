"""Between HTTP with JSON and the protobuf requests and responses of the services.

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
"""Source: https://cloud.google.com/apis/docs/system-parameters. Those with a `$` are others."""
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
    """Return the protobuf request of an HTTP request.

    Args:
        kind: the class of the request.
        path_fields: what the path fills, by the names of the fields.
        parameters: of the query, decoded.
        body: as it came. Without a body in the rule it is ignored.

    Raises:
        InvalidArgument: with the field and what is wrong with it.
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
    # Beside its own error the parser lets through what it meets in values of a wrong type.
    except (json_format.Error, ValueError, TypeError, AttributeError, KeyError) as error:
        raise InvalidArgument(f"Invalid JSON payload received. {_first_sentence(error)}") from None
    except RecursionError:
        raise InvalidArgument("Invalid JSON payload received. It is nested too deep.") from None
    return request


def to_json(kind: Any, response: bytes) -> bytes:
    """Return a serialized response of class `kind` as JSON."""
    shown = json_format.MessageToDict(kind.FromString(response))
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode()


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        # Bytes that are not UTF-8 would be guessed at.
        decoded = json.loads(body.decode() or "{}", parse_constant=_refuse_constant)
        if _ESCAPED_SURROGATE.search(body):
            # Half a pair breaks the protobuf library, which ends the process at times.
            json.dumps(decoded, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidArgument("Invalid JSON payload received. It is nested too deep.") from None
    except ValueError as error:
        raise InvalidArgument(f"Invalid JSON payload received. {error}") from None
    if not isinstance(decoded, dict):
        raise InvalidArgument("Invalid JSON payload received. The body must be an object.")
    return decoded


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON.")


def _put(fields: dict[str, Any], descriptor: Any, name: str, value: str) -> None:
    """Put a parameter like `a.b=1` where a body would have it."""
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
    if field.is_repeated:
        fields.setdefault(last, []).append(value)
    elif last in fields:
        raise InvalidArgument(f'The query parameter "{name}" is given twice.')
    else:
        is_bool = field.cpp_type == _CPP_BOOL
        fields[last] = _BOOLEANS.get(value, value) if is_bool else value


def _field(descriptor: Any, name: str) -> Any:
    by_name = descriptor.fields_by_camelcase_name, descriptor.fields_by_name
    return next((fields[name] for fields in by_name if name in fields), None)


def _with_camel_masks(fields: dict[str, Any]) -> dict[str, Any]:
    # The service takes `ack_deadline_seconds` in masks, which the parser refuses.
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
    # What follows lists all fields that there are.
    return str(error).split("\n")[0].strip()
