"""Parses requests: checks each field in a JSON body or query string against its type.

Fields that a struct does not define are ignored, as in most of the service's resources. Null means
that a field is not set. Numbers may be sent as strings, because JSON has no 64-bit integers.
Source: https://cloud.google.com/bigquery/docs/reference/rest/v2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from bigquery_emulator.errors import InvalidError
from bigquery_emulator.tables.schema import Json

NOT_SET = msgspec.UNSET
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Milliseconds = Natural
LAST_MS = 253_402_300_799_999
"""The end of the year 9999, after which there are no timestamps."""


class Fields(msgspec.Struct, rename="camel", omit_defaults=True):
    """A resource's fields. Unset fields are omitted from the result."""


def read_fields(body: Mapping[str, Any], fields: type[msgspec.Struct]) -> Json:
    """Returns a resource's known fields, after checking their types. Integers become strings.

    Raises:
        InvalidError: a field has a value of the wrong type. The message names the field.
    """
    checked = _checked(body, "")
    try:
        read = msgspec.convert(checked, fields, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidError(_refusal(str(error))) from None
    plain: Json = _with_text(msgspec.to_builtins(read))
    return plain


def _refusal(text: str) -> str:
    reason, _, where = text.partition(" - at `$")
    where = where.rstrip("`").removeprefix(".")
    if reason.startswith("Object missing required field"):
        name = reason.rpartition("field ")[2].strip("`")
        return f"Required parameter is missing: {where}.{name}".replace(": .", ": ")
    return f"Invalid value for {where or 'the request'}: {reason}"


def _checked(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {
            _encodable(name, where): _checked(element, f"{where}.{name}")
            for name, element in value.items()
            if element is not None
        }
    if isinstance(value, list):
        return [_checked(element, f"{where}[{at}]") for at, element in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        # Python's parser accepts such numbers, but they are not valid JSON.
        raise InvalidError(f"Invalid value for {where.removeprefix('.')}: {value} is not JSON")
    return _encodable(value, where) if isinstance(value, str) else value


def _encodable(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        name = where.removeprefix(".") or "a name"
        raise InvalidError(f"Invalid value for {name}: contains a lone surrogate") from None
    return text


def _with_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_text(element) for name, element in value.items()}
    if isinstance(value, list):
        return [_with_text(element) for element in value]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number else value
