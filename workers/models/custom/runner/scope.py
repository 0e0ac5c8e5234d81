"""`cog.current_scope()`: the metrics that a class records for the running prediction.

The rules are Cog's (see the docs of `BaseRunner.record_metric`): names have at most four segments
and 128 characters; the modes are `replace`, `incr`, and `append`; and types can't change without
`delete`.
"""

from __future__ import annotations

import contextvars
import copy
import json
import re
from typing import Any

import coglet

MAX_NAME_CHARS = 128
MAX_BYTES = 16 * 1024
"""Maximum JSON size of a prediction's metrics."""
MAX_SEGMENTS = 4
_PLAIN = (bool, int, float, str, list, dict)
_current: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("scope", default=None)


class RecordedMetrics:
    """One prediction's metrics, keyed by full name."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def record(self, key: str, value: Any, mode: str | None = None) -> None:
        """Records a metric. `mode` is replace (the default), incr, or append.

        A value of None deletes the metric.

        Raises:
            ValueError: the name or the mode is not valid, or all metrics together are too large.
            TypeError: the value has a different type than before, or one that JSON doesn't support.
        """
        _check_name(key)
        if value is None:
            self.delete(key)
            return
        if not isinstance(value, _PLAIN):
            raise TypeError(f"metric {key}: {type(value).__name__} is not a JSON type")
        new = self._combine(key, value, mode or "replace")
        values = self._values | {key: new}
        try:
            written = json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            raise ValueError(f"metric {key}: contains a lone surrogate") from None
        except ValueError:
            raise ValueError(f"metric {key}: numbers must be finite") from None
        if len(written) > MAX_BYTES:
            raise ValueError(
                f"metric {key}: all metrics together must be at most {MAX_BYTES} bytes"
            )
        self._values[key] = new

    def _combine(self, key: str, value: Any, mode: str) -> Any:
        before = self._values.get(key)
        if mode == "append":
            return [*(before if isinstance(before, list) else []), value]
        if before is not None and type(before) is not type(value):
            raise TypeError(
                f"metric {key}: already has type {type(before).__name__}; delete it first"
            )
        if mode == "incr":
            return value if before is None else before + value
        if mode != "replace":
            raise ValueError(f"metric {key}: mode must be replace, incr or append, got {mode!r}")
        return value

    def delete(self, key: str) -> None:
        self._values.pop(key, None)

    __setitem__ = record
    __delitem__ = delete

    def nest(self) -> dict[str, Any]:
        """Returns all metrics. Each dot in a name creates a nested object.

        As in Cog, an object replaces a metric of another type with the same name.
        """
        whole: dict[str, Any] = {}
        for key, value in self._values.items():
            *folders, name = key.split(".")
            place = whole
            for folder in folders:
                if not isinstance(place.get(folder), dict):
                    place[folder] = {}
                place = place[folder]
            place[name] = copy.deepcopy(value)  # a later name may add to this object
        return whole


class Scope:
    """The return value of `current_scope()`."""

    def __init__(self) -> None:
        self.metrics = RecordedMetrics()
        self.context: dict[str, str] = {}

    def record_metric(self, key: str, value: Any, mode: str | None = None) -> None:
        self.metrics.record(key, value, mode)


def enter_scope() -> Scope:
    """Starts a prediction's scope in this context."""
    scope = Scope()
    _current.set(scope)
    return scope


def install() -> None:
    """Makes `cog.current_scope()` return our scope.

    Outside of a prediction, its records are discarded.
    """
    sdk: Any = coglet._sdk
    sdk.current_scope = lambda: _current.get() or Scope()


def _check_name(key: str) -> None:
    if reason := _mistake(key):
        raise ValueError(f"metric {key[:MAX_NAME_CHARS]!r}: the name {reason}")


def _mistake(key: str) -> str:
    """Returns the reason a name is invalid, in Cog's own words. Empty if it is valid."""
    segments = key.split(".")
    checks = (
        (len(key) > MAX_NAME_CHARS, f"must be at most {MAX_NAME_CHARS} characters"),
        (key.startswith("."), "must not start with a dot"),
        (key.endswith("."), "must not end with a dot"),
        (not all(segments), "must not have empty segments"),
        (len(segments) > MAX_SEGMENTS, f"must have at most {MAX_SEGMENTS} dot-separated segments"),
        ("__" in key, "must not contain consecutive underscores"),
        (key == "predict_time", "is reserved"),
        (segments[0] == "cog", "is reserved because it starts with cog."),
    )
    first = next((reason for is_wrong, reason in checks if is_wrong), "")
    return first or next(filter(None, map(_mistake_of_segment, segments)), "")


def _mistake_of_segment(segment: str) -> str:
    if not re.fullmatch("[A-Za-z0-9_]*", segment):
        return "may contain only letters, digits, underscores, and dots between segments"
    if not segment[0].isalpha():
        return "must start each segment with a letter"
    return "must end each segment with a letter or digit" if segment.endswith("_") else ""
