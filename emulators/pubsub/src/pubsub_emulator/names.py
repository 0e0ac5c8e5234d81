"""Rejects invalid resource names and out-of-range numbers, with the service's wording.

Rules: https://cloud.google.com/pubsub/docs/pubsub-basics#resource_names
"""

import re
from typing import Any

from pubsub_emulator.errors import InvalidArgument

_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799
"""The years 1 to 9999. Source: google/protobuf/timestamp.proto."""
_LONGEST_S = 315_576_000_000
"""Source: google/protobuf/duration.proto."""
_RESOURCE_ID = re.compile(r"(?!goog)[A-Za-z][A-Za-z0-9._~+%-]{2,254}")
_PROJECT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,254}")


def check_name(path: str, kind: str) -> None:
    """Reject a path that is not `projects/<project>/<kind>/<id>`.

    `kind` is topics, subscriptions, snapshots, or schemas.

    Raises:
        InvalidArgument: the path is invalid. The message contains the path.
    """
    parts = path.split("/")
    if (
        len(parts) != 4
        or parts[0] != "projects"
        or parts[2] != kind
        or not _PROJECT_ID.fullmatch(parts[1])
        or not _RESOURCE_ID.fullmatch(parts[3])
    ):
        raise InvalidArgument(
            f"Invalid resource name given (name={path}). Refer to "
            "https://cloud.google.com/pubsub/docs/pubsub-basics#resource_names for more "
            "information."
        )


def check_project(path: str) -> None:
    """Reject a path that is not `projects/<project>`.

    Raises:
        InvalidArgument: the path is invalid. The message contains the path.
    """
    prefix, _, project = path.partition("/")
    if prefix != "projects" or not _PROJECT_ID.fullmatch(project):
        raise InvalidArgument(f"Invalid project name given (name={path}).")


def check_range(field: str, value: float, minimum: float, maximum: float) -> None:
    """Reject a value outside `minimum`..`maximum`, naming the field as the service does.

    Raises:
        InvalidArgument: it is out of range; the message has the field, the value and the bound.
    """
    if value < minimum:
        raise InvalidArgument(
            f"The value for {field} is too small. You passed {plain_number(value)} in the request, "
            f"but the minimum value is {plain_number(minimum)}."
        )
    if value > maximum:
        raise InvalidArgument(
            f"The value for {field} is too large. You passed {plain_number(value)} in the request, "
            f"but the maximum value is {plain_number(maximum)}."
        )


def check_time(field: str, timestamp: Any) -> None:
    """Reject a protobuf Timestamp that is not a valid time.

    Raises:
        InvalidArgument: the time is outside the years 1 to 9999, or its nanos are not in range.
    """
    check_range(f"{field}.seconds", timestamp.seconds, _FIRST_S, _LAST_S)
    check_range(f"{field}.nanos", timestamp.nanos, 0, 999_999_999)


def check_duration(field: str, duration: Any) -> None:
    """Reject a protobuf Duration that is invalid or negative.

    Raises:
        InvalidArgument: the duration is negative or over 10,000 years, or its nanos are not in
            range.
    """
    check_range(f"{field}.seconds", duration.seconds, 0, _LONGEST_S)
    check_range(f"{field}.nanos", duration.nanos, 0, 999_999_999)


def plain_number(value: float) -> str:
    """Format a number for a message, without a trailing ".0"."""
    return str(int(value)) if value == int(value) else str(value)
