r"""Checks incoming values against a field's type and converts them for DuckDB.

Used by insertAll, load jobs, and query parameters. DuckDB's `from_json` converts a canonical value
to the column's type: it is a string for most types, `\xNN` sequences for BYTES, and lists and
objects for REPEATED and RECORD. Source:
https://docs.cloud.google.com/bigquery/docs/loading-data-cloud-storage-json#details_of_loading_json_data
"""

import base64
import json
import math
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from bigquery_emulator.udf.json_values import read_json, write_json

_INT64 = range(-(2**63), 2**63)
_WIDE = Context(prec=100)
_NUMERIC_STEP = Decimal("1e-9")
_NUMERIC_LIMIT = Decimal(10) ** 29
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DATE = re.compile(r"(\d{4})[-/](\d{1,2})[-/](\d{1,2})")
_TIME = re.compile(r"(\d{1,2}):(\d{1,2})(?::(\d{1,2})(?:\.(\d{1,6}))?)?")
_TIMESTAMP = re.compile(
    rf"(?P<date>{_DATE.pattern})(?:[ Tt](?P<time>{_TIME.pattern}))?"
    r"\s*(?P<zone>[Zz]|UTC|[-+]\d{1,2}(?::?\d{2})?|[A-Za-z]+(?:/[A-Za-z_+-]+)+)?"
)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class BadValueError(Exception):
    """A value does not match its field. The message is worded as in the service."""

    def __init__(self, location: str, message: str) -> None:
        # It may quote an unpaired surrogate, which a response can't contain.
        self.location, self.message = (
            text.encode("utf-8", "replace").decode() for text in (location, message)
        )
        super().__init__(self.message)


def canonical_scalar(kind: str, value: Any, path: str = "") -> Any:
    """Returns a scalar as a canonical value.

    Args:
        kind: the type's name in a schema, such as INTEGER.
        value: a string or another JSON scalar. None stays None.
        path: the field's name, for the error.

    Raises:
        BadValueError: the value does not match.
    """
    return None if value is None else _SCALARS[kind](value, path)


def read_row(text: str | bytes) -> Any:
    """Parses the JSON in an incoming row or in a request that contains rows.

    Raises:
        ValueError: the text is not valid JSON, is nested too deeply, or contains NaN, Infinity, or
            a number beyond FLOAT64's range.
    """
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text} is too large")
    return number


def shown(value: Any) -> str:
    """Formats a JSON value for messages."""
    return value if isinstance(value, str) else json.dumps(value)


def _string(value: Any, path: str) -> str:
    text = value if isinstance(value, str) else shown(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadValueError(path, "Invalid UTF-8 in string value") from None
    return text


def _integer(value: Any, path: str) -> int:
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif (isinstance(value, float) and value.is_integer()) or (
        isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d{1,20}\s*", value, re.ASCII)
    ):
        number = int(value)
    if number is None or number not in _INT64:
        raise BadValueError(path, f"Cannot convert value to integer (bad value): {shown(value)}")
    return number


def _float(value: Any, path: str) -> str:
    if isinstance(value, float):
        return repr(value)
    text = value.strip() if isinstance(value, str) else shown(value)
    if isinstance(value, bool) or not (
        _NUMBER.fullmatch(text) or text.lower().lstrip("+-") in ("nan", "inf", "infinity")
    ):
        raise BadValueError(path, f"Cannot convert value to double (bad value): {shown(value)}")
    number = float(text)
    if math.isinf(number) and "inf" not in text.lower():
        raise BadValueError(path, f"Cannot convert value to double (bad value): {shown(value)}")
    return repr(number)


def _boolean(value: Any, path: str) -> bool:
    boolean = _BOOLEANS.get(value.strip().lower() if isinstance(value, str) else shown(value))
    if boolean is None:
        raise BadValueError(path, f"Cannot convert value to boolean (bad value): {shown(value)}")
    return boolean


_BOOLEANS = {
    **dict.fromkeys(("true", "t", "yes", "y", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "0"), False),
}


def _numeric(value: Any, path: str) -> str:
    text = value.strip() if isinstance(value, str) else shown(value)
    if isinstance(value, bool) or not _NUMBER.fullmatch(text):
        raise BadValueError(path, f"Invalid NUMERIC value: {shown(value)}")
    try:
        number = Decimal(text).quantize(_NUMERIC_STEP, ROUND_HALF_UP, _WIDE)
    except InvalidOperation:
        raise BadValueError(path, f"Invalid NUMERIC value: {shown(value)}") from None
    if abs(number) >= _NUMERIC_LIMIT:
        raise BadValueError(path, f"Invalid NUMERIC value: {shown(value)}")
    return f"{number:f}"


def _bytes(value: Any, path: str) -> str:
    try:
        if not isinstance(value, str):
            raise ValueError
        raw = decode_base64(value)
    except ValueError:
        raise BadValueError(path, "Could not decode base64 string to bytes.") from None
    return "".join(f"\\x{byte:02X}" for byte in raw)


def decode_base64(text: str) -> bytes:
    """Decodes base64 in either of its alphabets.

    Raises:
        ValueError: the text is not valid base64.
    """
    return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)


def _json(value: Any, path: str) -> msgspec.Raw:
    try:
        document = read_json(value) if isinstance(value, str) else value
    except ValueError:
        raise BadValueError(path, f"Invalid JSON value: {value}") from None
    return canonical_json(document)


def canonical_json(value: Any) -> msgspec.Raw:
    """Returns a JSON column's value in the format that GoogleSQL uses."""
    # Encoded here, because JSON integers may have any size but the row encoder rejects large ones.
    text = write_json(value)
    # An unpaired surrogate is written as an escape sequence, which DuckDB rejects.
    return msgspec.Raw(text.encode("utf-8", "backslashreplace"))


def _timestamp(value: Any, path: str) -> str:
    try:
        moment = _moment(value)
    # ArithmeticError: the number is too large. OSError: the zone names a folder.
    except (ValueError, ArithmeticError, OSError, ZoneInfoNotFoundError):
        message = (
            f"Could not parse '{shown(value)}' as a timestamp. Required format is YYYY-MM-DD"
            " HH:MM[:SS[.SSSSSS]] or YYYY/MM/DD HH:MM[:SS[.SSSSSS]]"
        )
        raise BadValueError(path, message) from None
    return moment.isoformat(" ")


def _moment(value: Any) -> datetime:
    if isinstance(value, float):
        return _EPOCH + timedelta(microseconds=round(value * 1_000_000))
    text = value.strip() if isinstance(value, str) else shown(value)
    if _NUMBER.fullmatch(text):
        return _EPOCH + timedelta(microseconds=int((Decimal(text) * 1_000_000).to_integral_value()))
    return _read_zoned(text)


def _read_zoned(text: str) -> datetime:
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise ValueError(text)
    clock = _clock(match["time"]) if match["time"] else time()
    return datetime.combine(_day(match["date"]), clock, _zone(match["zone"])).astimezone(UTC)


def _zone(name: str | None) -> timezone | ZoneInfo:
    if name is None or name in ("Z", "z", "UTC"):
        return UTC
    if name[0] in "+-":
        hours, minutes = re.fullmatch(r".(\d{1,2}):?(\d{2})?", name).groups()  # type: ignore[union-attr]
        offset = timedelta(hours=int(hours), minutes=int(minutes or 0))
        return timezone(-offset if name[0] == "-" else offset)
    return ZoneInfo(name)


def _day(text: str) -> date:
    match = _DATE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return date(*(int(part) for part in match.groups()))


def _clock(text: str) -> time:
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(text)
    hour, minute, second, fraction = match.groups()
    return time(int(hour), int(minute), int(second or 0), int((fraction or "").ljust(6, "0")[:6]))


def _datetime(value: Any, path: str) -> str:
    try:
        match = _TIMESTAMP.fullmatch(value.strip() if isinstance(value, str) else "")
        if match is None or match["zone"] not in (None, "Z", "z"):
            raise ValueError
        clock = _clock(match["time"]) if match["time"] else time()
        return datetime.combine(_day(match["date"]), clock).isoformat(" ")
    except ValueError:
        raise BadValueError(path, f'Invalid datetime string "{shown(value)}"') from None


def _date(value: Any, path: str) -> str:
    try:
        return _day(value.strip() if isinstance(value, str) else "").isoformat()
    except ValueError:
        raise BadValueError(path, f"Invalid date: '{shown(value)}'") from None


def _time(value: Any, path: str) -> str:
    try:
        return _clock(value.strip() if isinstance(value, str) else "").isoformat()
    except ValueError:
        raise BadValueError(path, f'Invalid time string "{shown(value)}"') from None


_SCALARS: dict[str, Callable[[Any, str], Any]] = {
    "STRING": _string,
    "BYTES": _bytes,
    "INTEGER": _integer,
    "FLOAT": _float,
    "BOOLEAN": _boolean,
    "NUMERIC": _numeric,
    "JSON": _json,
    "TIMESTAMP": _timestamp,
    "DATETIME": _datetime,
    "DATE": _date,
    "TIME": _time,
}
