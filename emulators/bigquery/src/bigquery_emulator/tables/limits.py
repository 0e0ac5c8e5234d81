"""Limits in a column type: STRING(n), BYTES(n), NUMERIC(p), and NUMERIC(p, s).

Rows that arrive through the API are checked in Python. For all other writes, the DuckDB table has a
CHECK constraint. Source:
https://docs.cloud.google.com/bigquery/docs/reference/standard-sql/data-types#parameterized_data_types
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Annotated, Any

import msgspec

from bigquery_emulator.errors import InvalidError, UnsupportedError
from bigquery_emulator.tables.values import BadValueError

_WIDE = Context(prec=100)
_MOST_DIGITS, _MOST_SCALE = 29, 9
_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@dataclass(frozen=True)
class TypeLimits:
    """A type's limits, in addition to its name. `max_length` is in characters or bytes."""

    max_length: int | None = None
    precision: int | None = None
    scale: int | None = None

    def resource(self) -> dict[str, str]:
        """Returns the keys for the API's TableFieldSchema, with numbers as strings."""
        named = {"maxLength": self.max_length, "precision": self.precision, "scale": self.scale}
        return {name: str(value) for name, value in named.items() if value is not None}

    @property
    def sql(self) -> str:
        """The limits as written in GoogleSQL, to append to the type's name."""
        numbers = [n for n in (self.max_length, self.precision, self.scale) if n is not None]
        return f"({', '.join(str(n) for n in numbers)})" if numbers else ""

    def holds(self, other: TypeLimits) -> bool:
        """True if every value within `other` is also within these limits."""
        if self.max_length is not None:
            return other.max_length is not None and other.max_length <= self.max_length
        if self.precision is None:
            return True
        if other.precision is None:
            return False
        scale, old_scale = self.scale or 0, other.scale or 0
        return old_scale <= scale and other.precision - old_scale <= self.precision - scale

    def check_sql(self, kind: str, value: str) -> str | None:
        """Returns the condition that a column's values must meet. None if there is no limit.

        Args:
            kind: the type's name in a schema.
            value: DuckDB SQL for the value.
        """
        if self.max_length is not None:
            length = "octet_length" if kind == "BYTES" else "length"
            return f"{length}({value}) <= {self.max_length}"
        if self.precision is not None:
            scale = self.scale or 0
            most = 10 ** (self.precision - scale)
            return f"{value} = round({value}, {scale}) AND abs({value}) < {most}"
        return None

    def stored_sql(self, value: str) -> str:
        """Returns the DuckDB SQL for a value as it is stored, with a NUMERIC rounded."""
        return value if self.precision is None else f"round({value}, {self.scale or 0})"

    def fitted(self, kind: str, value: Any, path: str) -> Any:
        """Returns a canonical value as it is stored, with a NUMERIC rounded.

        Args:
            kind: the type's name in a schema.
            value: a canonical value that is not None.
            path: the field name to use in the error.

        Raises:
            BadValueError: the value is too long or too large.
        """
        if self.max_length is not None:
            # A canonical byte takes four characters, such as \x0A.
            length = len(value) // 4 if kind == "BYTES" else len(value)
            if length > self.max_length:
                message = (
                    f"Field {path}: {kind}({self.max_length}) has maximum length"
                    f" {self.max_length} but got a value with length {length}"
                )
                raise BadValueError(path, message)
        if self.precision is not None:
            scale = self.scale or 0
            number = Decimal(value).quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP, _WIDE)
            if abs(number) >= 10 ** (self.precision - scale):
                raise BadValueError(
                    path, f"Field {path}: {kind}{self.sql} has value {value}, which is out of range"
                )
            return f"{number:f}"
        return value


NO_LIMITS = TypeLimits()


class _Keys(msgspec.Struct, rename="camel"):
    max_length: _Natural | None = None
    precision: _Natural | None = None
    scale: _Natural | None = None


def parse_limits(field: dict[str, Any], name: str, kind: str, is_repeated: bool) -> TypeLimits:
    """Parses the limits in a TableFieldSchema.

    Args:
        kind: the type's name in a schema.
        is_repeated: True if the field is an array.

    Raises:
        InvalidError: the type does not accept limits, or a limit is invalid.
        UnsupportedError: an array has limits, which DuckDB can't check.
    """
    set_keys = {key: field[key] for key in ("maxLength", "precision", "scale") if field.get(key)}
    if not set_keys:
        return NO_LIMITS
    try:
        keys = msgspec.convert(set_keys, _Keys, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidError(f"Field {name}: invalid type parameter: {error}") from None
    limits = TypeLimits(keys.max_length, keys.precision, keys.scale)
    if keys.max_length is not None and kind not in ("STRING", "BYTES"):
        raise InvalidError(f"Field {name}: maxLength is only allowed for STRING and BYTES")
    if (keys.precision, keys.scale) != (None, None):
        _check_digits(limits, name, kind)
    if is_repeated:
        raise UnsupportedError(
            f"Field {name}: {kind}{limits.sql} in an array is not supported by the embedded"
            " BigQuery"
        )
    return limits


def _check_digits(found: TypeLimits, name: str, kind: str) -> None:
    if kind != "NUMERIC":
        raise InvalidError(f"Field {name}: precision and scale are only allowed for NUMERIC")
    scale = found.scale or 0
    if found.precision is None or scale > _MOST_SCALE:
        raise InvalidError(
            f"Field {name}: scale must be from 0 to {_MOST_SCALE}, and requires a precision"
        )
    if not max(1, scale) <= found.precision <= scale + _MOST_DIGITS:
        raise InvalidError(
            f"Field {name}: precision must be from {max(1, scale)} to {scale + _MOST_DIGITS}"
        )
