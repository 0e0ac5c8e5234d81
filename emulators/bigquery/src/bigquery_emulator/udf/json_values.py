"""JSON as GoogleSQL stores it: an object's names are sorted, and the first of any duplicates wins.

Source: https://cloud.google.com/bigquery/docs/reference/standard-sql/data-types#json_type
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

_STEP = re.compile(r'\.([A-Za-z_]\w*)|\."([^"\\]+)"|\[(\d{1,6})\]', re.ASCII)
_ODD_NAME = re.compile(r'[."\\]')
_MOST_ELEMENTS = 100_000
"""Maximum length to which an array is padded to reach an index."""

Step = str | int


def read_json(text: str) -> Any:
    """Parses a JSON text. If an object has duplicate names, the first one wins.

    Raises:
        ValueError: the text is not valid JSON (NaN is not), or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_firsts, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def _firsts(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    firsts: dict[str, Any] = {}
    for name, value in pairs:
        firsts.setdefault(name, value)
    return firsts


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def write_json(value: Any) -> str:
    """Returns a value in the format that GoogleSQL uses.

    Code points sort in the same order as UTF-8 bytes.
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def canonical(text: str) -> str:
    """Returns JSON text in the format that GoogleSQL uses.

    Raises:
        ValueError: the text is not valid JSON.
    """
    return write_json(read_json(text))


def pretty(text: str) -> str:
    """Returns a JSON text with one value per line, as TO_JSON_STRING pretty-prints it."""
    return json.dumps(read_json(text), ensure_ascii=False, indent=2, sort_keys=True)


def keys(text: str, depth: int, mode: str) -> list[str]:
    """Returns the sorted, unique key paths in a JSON string (implements JSON_KEYS).

    Args:
        depth: maximum number of names in a path.
        mode: `strict` for objects nested in objects, `lax` to include objects in an array, and `lax
            recursive` to include objects in nested arrays.

    Raises:
        ValueError: the depth is not positive, or there is no such mode.
    """
    if depth < 1:
        raise ValueError("bq: max_depth must be positive.")
    if mode.lower() not in ("strict", "lax", "lax recursive"):
        raise ValueError(f"bq: Invalid JSON mode specified: {mode}")
    return sorted(set(_paths(read_json(text), "", depth, mode.lower(), is_in_array=False)))


def _paths(value: Any, before: str, depth: int, mode: str, *, is_in_array: bool) -> Iterator[str]:
    if isinstance(value, list) and mode != "strict":
        if not is_in_array or mode == "lax recursive":
            for item in value:
                yield from _paths(item, before, depth, mode, is_in_array=True)
    elif isinstance(value, dict) and depth:
        for name, inner in value.items():
            path = before + (
                json.dumps(name, ensure_ascii=False) if _ODD_NAME.search(name) else name
            )
            yield path
            yield from _paths(inner, f"{path}.", depth - 1, mode, is_in_array=False)


def is_path(path: str) -> bool:
    """True if a path consists of names and indexes, such as `$.a."b c"[0]`."""
    return path.startswith("$") and not _STEP.sub("", path[1:])


def _steps(path: str) -> list[Step]:
    return [
        int(match[3]) if match[3] is not None else match[1] or match[2]
        for match in _STEP.finditer(path)
    ]


def changed(text: str, path: str, value: str, creates: bool) -> str:
    """Implements JSON_SET: returns a JSON text with the value at a path replaced.

    Args:
        path: see `is_path`.
        value: the value as JSON text.
        creates: True to create missing parents.
    """
    root = [read_json(text)]
    _put(root, [0, *_steps(path)], read_json(value), creates)
    return write_json(root[0])


def _put(place: Any, steps: list[Step], value: Any, creates: bool) -> None:
    """Sets a value at the end of a path. Does nothing if a value of a different kind blocks it."""
    step, *rest = steps
    if isinstance(step, int):
        if not isinstance(place, list) or (step >= len(place) and not creates):
            return
        if step >= _MOST_ELEMENTS:
            raise ValueError(f"bq: Exceeded maximum JSON array size of {_MOST_ELEMENTS}")
        place.extend([None] * (step + 1 - len(place)))
    elif not isinstance(place, dict) or (step not in place and not creates):
        return
    if not rest:
        place[step] = value
        return
    inner = place[step] if isinstance(step, int) else place.get(step)
    if inner is None and creates:
        inner = [] if isinstance(rest[0], int) else {}
        place[step] = inner
    _put(inner, rest, value, creates)


def removed(text: str, path: str) -> str:
    """Implements JSON_REMOVE: returns a JSON text without the value at a path."""
    root = read_json(text)
    *steps, last = _steps(path)
    place = root
    for step in steps:
        place = _inner(place, step)
    if isinstance(last, int) and isinstance(place, list) and last < len(place):
        del place[last]
    elif isinstance(last, str) and isinstance(place, dict):
        place.pop(last, None)
    return write_json(root)


def _inner(place: Any, step: Step) -> Any:
    if isinstance(step, int):
        return place[step] if isinstance(place, list) and step < len(place) else None
    return place.get(step) if isinstance(place, dict) else None
