"""Converts a class's return value to JSON, with its files as bytes.

Values are converted according to their actual types, as in Cog's server, regardless of the types
the class declares.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import json
import math
import mimetypes
import os
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from types import GeneratorType
from typing import Any

from workers.models.custom.runner.cog_import import cog
from workers.models.custom.runner.output_types import Output, is_file

MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_FILES = 512
"""Maximum number of files in one output, for example the windows of an hour-long recording."""
MAX_FILES_BYTES = 192 * 1024 * 1024
"""Maximum total size of an output's files."""
MAX_STREAMED_BYTES = 1024 * 1024
"""Maximum size of a streamed output as JSON. Readers receive the output through Redis."""
MAX_DEPTH = 120
"""Maximum nesting depth. Cog's server rejects JSON nested 128 levels deep."""
MAX_SHOWN_LEVELS = 10
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1
"""Larger integers lose digits in most JSON readers, and our messages can't represent them."""
ANY_BYTES = "application/octet-stream"
Place = tuple[str | int, ...]
"""The path to a value in an output: field names and element indices."""


class WrongOutput(Exception):
    """An output that is too large or can't be sent.

    The message names the place in the output.
    """


class OutputEncoder:
    """Encodes one prediction's output. `files` and `blobs` collect the output's files.

    Each entry in `files` contains the path to the file's place in the output, along with the file's
    media type and name.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self.files: list[dict[str, Any]] = []
        self.blobs: list[bytes] = []
        self._count = 0
        self._size_bytes = 0

    def take_files(self) -> tuple[list[dict[str, Any]], list[bytes]]:
        """Returns the files and blobs encoded since the last call."""
        files_and_blobs = self.files, self.blobs
        self.files, self.blobs = [], []
        return files_and_blobs

    def encode(self, value: Any, at: Place = ()) -> Any:
        """Encodes an output, or one piece of a streamed output, for JSON.

        Args:
            value: the value returned by the class.
            at: the piece's place in the whole output.

        Raises:
            WrongOutput: the value can't be sent.
        """
        count = self._count
        try:
            plain = self._plain(_find_paths(value, self._output.piece), at)
        except RecursionError as error:
            raise WrongOutput(f"{_name_place(at)}: must not contain itself") from error
        if self._output.streams == "text" and self._count > count:
            raise WrongOutput(f"{_name_place(at)}: a file can't be embedded in text")
        return plain

    def format_for_stream(self, piece: Any) -> Any:
        """Returns an encoded piece in the form shown in its stream.

        In text, None becomes an empty string and other values become JSON.

        `format_piece` in shared/models/tasks/custom.py does the same for the whole output.
        """
        if self._output.streams != "text" or isinstance(piece, str):
            return piece
        return "" if piece is None else json.dumps(piece, ensure_ascii=False)

    def _plain(self, value: Any, at: Place) -> Any:
        if len(at) > MAX_DEPTH:
            raise WrongOutput(
                f"{_name_place(at)}: must not be nested more than {MAX_DEPTH} levels deep"
            )
        if isinstance(value, enum.Enum):
            return self._plain(value.value, at)
        if isinstance(value, str):
            return _check_text(value, at)
        if value is None or isinstance(value, bool | int | float):
            return _check_number(value, at)
        if isinstance(value, Mapping):
            return {
                (key := _write_key(name, at)): self._plain(element, (*at, key))
                for name, element in value.items()
            }
        if isinstance(value, list | tuple | set | frozenset | GeneratorType):
            return [self._plain(element, (*at, number)) for number, element in enumerate(value)]
        if isinstance(value, io.IOBase | os.PathLike):
            self._add_file(value, at)
            return None
        try:
            simpler = _simplify(value)
        except Exception as error:
            # The boundary with the class's code, whose types may fail in any way.
            reason = f"{_describe(value)} can't be sent as JSON"
            raise WrongOutput(f"{_name_place(at)}: {reason}: {error}") from error
        return self._plain(simpler, at)

    def _add_file(self, value: io.IOBase | os.PathLike[str], at: Place) -> None:
        if self._count >= MAX_FILES:
            raise WrongOutput(f"output: must have at most {MAX_FILES} files")
        if isinstance(value, io.IOBase):
            name, data = str(getattr(value, "name", "file")), _read_open(value)
        else:
            name, data = os.fspath(value), _read(Path(value), at)
        if len(data) > MAX_FILE_BYTES:
            raise WrongOutput(
                f"{_name_place(at)}: the file {Path(name).name} exceeds the maximum of "
                f"{MAX_FILE_BYTES} bytes"
            )
        self._count += 1
        self._size_bytes += len(data)
        if self._size_bytes > MAX_FILES_BYTES:
            raise WrongOutput(
                f"output: total file size exceeds the maximum of {MAX_FILES_BYTES} bytes"
            )
        media_type = mimetypes.guess_type(name)[0] or ANY_BYTES
        shown_name = Path(name).name.encode(errors="replace").decode()  # the name may not be UTF-8
        self.files.append({"at": list(at), "media_type": media_type, "name": shown_name})
        self.blobs.append(data)


def _find_paths(value: Any, shape: Mapping[str, Any]) -> Any:
    """Returns the value, with a path in place of each string that names an existing file.

    Only strings that the class declares as files are replaced. Cog returns them unchanged, but
    readers can't open paths on this machine.
    """
    if is_file(shape):
        return Path(value) if isinstance(value, str) and _is_existing(value) else value
    if "items" in shape and isinstance(value, list | tuple | set | frozenset):
        return [_find_paths(element, shape["items"]) for element in value]
    if shapes := shape.get("properties"):
        fields = value
        if not isinstance(value, Mapping):
            with contextlib.suppress(Exception):  # `encode` then reports why it can't be sent
                fields = _simplify(value)
        if isinstance(fields, Mapping):
            return {
                name: _find_paths(element, shapes.get(name, {})) for name, element in fields.items()
            }
    return value


def _is_existing(path: str) -> bool:
    try:
        return os.path.isfile(path)
    except ValueError:  # the path contains a null character
        return False


def _read(path: Path, at: Place) -> bytes:
    if not path.is_file():
        raise WrongOutput(f"{_name_place(at)}: file {path.name} does not exist")
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


def _read_open(file: io.IOBase) -> bytes:
    """Reads the entire contents of an open file, from the start if it is seekable, as Cog does."""
    if file.seekable():
        file.seek(0)
    data: str | bytes = file.read(MAX_FILE_BYTES + 1)
    return data.encode() if isinstance(data, str) else data


def _check_text(text: str, at: Place) -> str:
    """Returns the text if JSON in UTF-8 can represent it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WrongOutput(
            f"{_name_place(at)}: lone surrogate at character {error.start}, which JSON can't "
            "represent"
        ) from None
    return text


def _check_number(value: Any, at: Place) -> Any:
    """Returns a number, True, False, or None if JSON and msgpack can represent it."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise WrongOutput(
                f"{_name_place(at)}: NaN and infinite numbers can't be represented in JSON"
            )
        return float(value)
    if isinstance(value, int) and not MIN_INTEGER <= value <= MAX_INTEGER:
        raise WrongOutput(f"{_name_place(at)}: integers must be at most 64 bits")
    return value


def _write_key(name: Any, at: Place) -> str:
    """Returns a field's name. Numbers used as names are written the way JSON writes numbers."""
    if isinstance(name, str):
        return _check_text(name, at)
    if name is None or isinstance(name, bool | int | float):
        return json.dumps(_check_number(name, at))
    raise WrongOutput(f"{_name_place(at)}: {_describe(name)} can't be a field name in JSON")


def _simplify(value: Any) -> Any:
    """Converts a value of another type to a simpler one.

    Raises:
        TypeError: the value has no JSON representation.
    """
    if isinstance(value, cog.Secret):
        raise TypeError("a Secret can't be part of an output")
    coder = cog.coder.Coder.lookup(type(value))
    if coder is not None:
        return coder.encode(value)
    for method in ("model_dump", "dict"):  # from pydantic, which the class may use
        if callable(dump := getattr(value, method, None)):
            return dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, date):
        return value.isoformat()
    for method in ("tolist", "item"):  # from numpy's arrays and scalars
        if callable(convert := getattr(value, method, None)):
            return convert()
    raise TypeError("return plain values")


def _describe(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _name_place(at: Place) -> str:
    """Returns a place in an output in the form readers see: `output[0].words`."""
    levels = [
        f"[{level}]" if isinstance(level, int) else f".{level}" for level in at[:MAX_SHOWN_LEVELS]
    ]
    return "output" + "".join(levels) + ("…" if len(at) > MAX_SHOWN_LEVELS else "")
