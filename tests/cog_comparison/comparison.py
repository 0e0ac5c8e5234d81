"""Compares the outcomes of two ways to run a class."""

from __future__ import annotations

import re
from typing import Any

from tests.cog_comparison.outcome import Outcome, Request

_SHOWN_CHARS = 110
_FILE_KEYS = {"file", "bytes", "name"}
_TRACEBACK = "Traceback (most recent call last)"
_PREFIX = re.compile(r"^(?:(?:Async )?[Pp]rediction failed: |Generator iteration error: )+")
_TYPE = re.compile(r"^\w+(?:Error|Exception|Exit|Input): ")
_OWN_LINES = re.compile(r"WARNING unknown input field|DeprecationWarning|^\s+\w.*deprecat")
_NUMBER = re.compile(r"\d+")
"""Numbers in logs are process IDs and times, which differ between runs."""
_ENDED_BADLY = ("failed", "refused", "died")


def differences(oracle: Outcome, ours: Outcome, request: Request) -> list[str]:
    """Returns each difference as `what: oracle / ours`. An empty list means there are none."""
    if request.must_fail:
        if ours.status in (*_ENDED_BADLY, "not loaded"):
            return []
        return [f"status: its test says that it fails / {ours.status}"]
    if _status(oracle) != _status(ours):
        shown = [
            f"{one.status} {_shown(_plain_error(one.error) or one.output)}"
            for one in (oracle, ours)
        ]
        return [f"status: {shown[0]} / {shown[1]}"]
    if oracle.status == ours.status == "not loaded":
        return []
    differing = []
    if not are_equal(oracle.output, ours.output):
        differing.append(f"output: {_shown(oracle.output)} / {_shown(ours.output)}")
    if oracle.pieces and not are_equal(list(oracle.pieces), list(ours.pieces)):
        differing.append(f"pieces: {_shown(oracle.pieces)} / {_shown(ours.pieces)}")
    if not _is_same_error(oracle.error, ours.error):
        differing.append(f"error: {_shown(oracle.error)} / {_shown(ours.error)}")
    missing = _lines(oracle.logs) - _lines(ours.logs)
    if missing:
        differing.append(f"logs: {_shown(sorted(missing))} / missing")
    if dict(oracle.metrics) != dict(ours.metrics):
        differing.append(f"metrics: {_shown(oracle.metrics)} / {_shown(ours.metrics)}")
    return differing


def _status(outcome: Outcome) -> str:
    return "failed" if outcome.status in _ENDED_BADLY else outcome.status


def are_equal(one: Any, other: Any) -> bool:
    """Compares outputs. Ignores file names, because data URIs do not have them."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() == other.keys() == _FILE_KEYS:
            return bool(one["file"] == other["file"])
        return one.keys() == other.keys() and all(are_equal(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return type(one) is type(other) and bool(one == other)


def have_equal_shape(one: Any, other: Any) -> bool:
    """Compares only the types of outputs that differ between runs."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(have_equal_shape(one[k], other[k]) for k in one)
    return type(one) is type(other)


def _is_same_error(theirs: str, ours: str) -> bool:
    theirs, ours = _plain_error(theirs), _plain_error(ours)
    return theirs == ours or bool(theirs and ours and (ours in theirs or theirs in ours))


def _plain_error(error: str) -> str:
    """An error without Cog's prefix and without its type."""
    return _TYPE.sub("", _PREFIX.sub("", error)).strip()


def _lines(logs: str) -> set[str]:
    """Lines printed by the class, without Cog's tracebacks and warnings."""
    kept = logs.partition(_TRACEBACK)[0].splitlines()
    lines = (_NUMBER.sub("0", line.strip()) for line in kept if not _OWN_LINES.search(line))
    return {line for line in lines if line}


def _shown(value: Any) -> str:
    words = value if isinstance(value, str) else repr(value)
    return " ".join(words.split())[:_SHOWN_CHARS]
