"""The outcome of one prediction, in the same form for each way of running a class."""

from __future__ import annotations

import base64
import hashlib
import mimetypes
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

DIGEST_CHARS = 16
_DATA_URI = re.compile(r"data:[\w.+-]+/[\w.+-]+(?:;[\w=.-]+)*;base64,")


class RequestFile(NamedTuple):
    """A file in an input: its location, its name, and its bytes."""

    at: list[str | int]
    name: str
    data: bytes

    @property
    def data_uri(self) -> str:
        """The file as Cog's command sends it."""
        kind = mimetypes.guess_type(self.name)[0] or "application/octet-stream"
        return f"data:{kind};base64,{base64.b64encode(self.data).decode()}"


class Request(NamedTuple):
    """A prediction's input. `values` has null in place of each file."""

    values: dict[str, Any]
    files: Sequence[RequestFile] = ()
    must_fail: bool = False
    """True if the fixture expects Cog to reject this input."""
    context: Mapping[str, str] = MappingProxyType({})
    """The `context` in Cog's request."""
    cancel_after_s: float | None = None


class Outcome(NamedTuple):
    """A prediction's outcome. Files in outputs are `{"file": DIGEST, "bytes": N, "name": NAME}`."""

    status: str
    """succeeded, failed, canceled, refused (invalid input), not loaded, died or too late."""
    output: Any = None
    pieces: Sequence[Any] = ()
    logs: str = ""
    error: str = ""
    metrics: Mapping[str, Any] = MappingProxyType({})


class ClassRunner(Protocol):
    """A way to run a folder's class."""

    async def start(self) -> str:
        """Loads and sets up the class. Returns the reason for a failure, or an empty string."""

    async def predict(self, request: Request) -> Outcome:
        """Computes one prediction, and cancels it after `cancel_after_s` seconds if that is set."""

    async def stop(self) -> None:
        """Stops the processes. May be called at any time."""


def describe_file(data: bytes, name: str | None = None) -> dict[str, Any]:
    """Returns an output file in the common form."""
    digest = hashlib.sha256(data).hexdigest()[:DIGEST_CHARS]
    return {"file": digest, "bytes": len(data), "name": name}


def is_data_uri(value: object) -> bool:
    """Returns whether a value is a file in a data URI."""
    return isinstance(value, str) and _DATA_URI.match(value) is not None


def data_of(uri: str) -> bytes:
    """Returns the bytes of a base64 data URI."""
    return base64.b64decode(uri.partition(",")[2])


def with_described_files(value: Any) -> Any:
    """Returns one of Cog's outputs with each data URI replaced by the common form."""
    if is_data_uri(value):
        return describe_file(data_of(value))
    if isinstance(value, dict):
        return {name: with_described_files(one) for name, one in value.items()}
    if isinstance(value, list):
        return [with_described_files(one) for one in value]
    return value


def put(values: Any, at: list[str | int], value: Any) -> None:
    """Sets a value at its location in an input or an output."""
    for part in at[:-1]:
        values = values[part]
    values[at[-1]] = value


def container_environment(python: str) -> dict[str, str]:
    """Returns the environment of a process in a Cog container: its Python is first in PATH."""
    return {
        **os.environ,
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
