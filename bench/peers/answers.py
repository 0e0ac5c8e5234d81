"""The request bodies that contenders accept, and the vectors in their responses."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

PLACE = "$TEXT"
"""The placeholder for the text in a body."""


def bodies_of(body: Any, texts: Iterable[str]) -> list[str]:
    """Returns one body per text, with the text in place of PLACE."""
    before, after = msgspec.json.encode(body).split(msgspec.json.encode(PLACE))
    return [(before + msgspec.json.encode(text) + after).decode() for text in texts]


def vector_of(body: bytes | str, answer: Sequence[str | int]) -> list[float]:
    """Returns the vector in a response, found by following keys and indices.

    Base64-encoded little-endian float32 is unpacked.

    Raises:
        ValueError: the response is not JSON, or has no list of numbers in that place.
        LookupError: the key or index doesn't exist.
        TypeError: a key is used on a list or an index on an object.
    """
    value = msgspec.json.decode(body)
    for step in answer:
        value = value[step]
    if isinstance(value, str):
        value = np.frombuffer(base64.b64decode(value), "<f4").tolist()
    return msgspec.convert(value, list[float])
