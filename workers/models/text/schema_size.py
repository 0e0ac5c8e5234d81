"""How large a JSON schema may be. What it costs is paid by all texts of a batch, at each token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MOST_BYTES = 32 * 1024
"""Of the schema as JSON. One of this size takes up to about 0.2 s to read."""
MOST_CHARACTERS = 4096
"""Of a constant, a pattern or a name, as JSON has it: a control character is six of them. One of
this length takes 2 ms at each token, and one of 60,000 takes 35 ms."""
_NOT_MATCHED = frozenset({"description", "title", "$comment", "$id", "$schema"})


def check_size(json_schema: str) -> None:
    """Checks the size of a schema.

    Raises:
        ValueError: the schema, or a text in it, is too large, or it is no JSON.
    """
    size_bytes = len(json_schema.encode())
    if size_bytes > MOST_BYTES:
        raise ValueError(f"it has {size_bytes} bytes, and at most {MOST_BYTES} are supported")
    try:
        longest = max(map(_json_length, _matched_texts(json.loads(json_schema))), default=0)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if longest > MOST_CHARACTERS:
        raise ValueError(
            f"a constant, pattern or name in it has {longest} characters as JSON, and "
            f"at most {MOST_CHARACTERS} are supported"
        )


def _json_length(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False)) - len('""')


def _matched_texts(schema: Any) -> Iterator[str]:
    """All texts of a schema but those that only explain it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            yield from part
            waiting += [
                value
                for name, value in part.items()
                if not (name in _NOT_MATCHED and isinstance(value, str))
            ]
