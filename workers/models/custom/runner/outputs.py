"""What a class returned, checked against its type and put into JSON, with its files as bytes."""

from __future__ import annotations

import dataclasses
import enum
import io
import math
import mimetypes
import os
from collections.abc import Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any

from workers.models.custom.runner.cog_import import adt, cog

MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_FILES = 512
"""Of one output: windows of hours of sound, sentences that are said."""
MAX_FILES_BYTES = 192 * 1024 * 1024
"""Of all files of an output together."""
MAX_OUTPUT_BYTES = 1024 * 1024
"""Of an output as JSON, without its files."""
ANY_BYTES = "application/octet-stream"


class WrongOutput(Exception):
    """What a class returned is not of its type, too large, or can't be sent."""


class OutputEncoder:
    """Encodes the output of one prediction. `files` and `blobs` collect its files.

    Each of `files` has the path to its place in the output, its media type and its name.
    """

    def __init__(self, output: adt.OutputType) -> None:
        self._output = output
        self.files: list[dict[str, Any]] = []
        self.blobs: list[bytes] = []
        self._count = 0
        self._size_bytes = 0

    def take_files(self) -> tuple[list[dict[str, Any]], list[bytes]]:
        """Returns the files and blobs of what was encoded since the last call."""
        taken = self.files, self.blobs
        self.files, self.blobs = [], []
        return taken

    def encode(self, value: Any, at: tuple[str | int, ...] = ()) -> Any:
        """An output, or one piece of a streamed one, ready for JSON.

        Args:
            value: as the class returned it.
            at: the place of the piece in the whole output.

        Raises:
            WrongOutput: it is not of the type that the class declares, or can't be sent.
        """
        if value is None and not at:
            return None  # as in Cog: it has no output, whatever its type
        try:
            checked = self._checked(value)
        except WrongOutput:
            raise
        except Exception as error:
            # The boundary to cog's types, which report a wrong value in many ways.
            raise WrongOutput(f"output: {_named(value)} is not {self._declared}") from error
        return self._plain(checked, at)

    @property
    def _declared(self) -> str:
        if self._output.kind is adt.OutputKind.OBJECT:
            return "an object with the declared fields"
        kind = "a list of " if self._output.kind is adt.OutputKind.LIST else ""
        return f"{kind}{getattr(self._output.type, 'name', 'any').lower()}, as it declares"

    def _checked(self, value: Any) -> Any:
        output = self._output
        if output.coder is not None:
            return output.json_encode(value)
        if output.kind is adt.OutputKind.OBJECT:
            return self._checked_object(value)
        if output.kind is adt.OutputKind.LIST:
            if not isinstance(value, list | tuple):
                raise WrongOutput(f"output: {_named(value)} is not {self._declared}")
            return [self._checked_one(one) for one in value]
        return self._checked_one(value)

    def _checked_one(self, value: Any) -> Any:
        kind: Any = self._output.type
        if isinstance(value, float) and not math.isfinite(value):
            raise WrongOutput("output: JSON has no NaN and no infinite numbers")
        if value is None and kind not in (adt.PrimitiveType.ANY, None):
            raise WrongOutput(f"output: None is not {self._declared}")
        is_file = kind in (adt.PrimitiveType.PATH, adt.PrimitiveType.FILE)
        if is_file and isinstance(value, io.IOBase | os.PathLike):
            return value
        if kind is adt.PrimitiveType.PATH:
            return Path(value)
        return kind.normalize(value)

    def _checked_object(self, value: Any) -> dict[str, Any]:
        checked = {}
        for name, kind in (self._output.fields or {}).items():
            if not hasattr(value, name):
                raise WrongOutput(f"output: the field {name} is missing")
            field_value = getattr(value, name)
            optional = (adt.Repetition.OPTIONAL, adt.Repetition.OPTIONAL_REPEATED)
            if field_value is None and kind.repetition not in optional:
                raise WrongOutput(f"output: the field {name} has no value")
            is_file = isinstance(field_value, io.IOBase | os.PathLike)
            checked[name] = (
                field_value if field_value is None or is_file else kind.normalize(field_value)
            )
        return checked

    def _plain(self, value: Any, at: tuple[str | int, ...]) -> Any:
        if isinstance(value, enum.Enum):
            return self._plain(value.value, at)
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return float(value)
        if isinstance(value, Mapping):
            return {str(name): self._plain(one, (*at, str(name))) for name, one in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._plain(one, (*at, number)) for number, one in enumerate(value)]
        if isinstance(value, io.IOBase | os.PathLike):
            self._add_file(value, at)
            return None
        return self._plain(_simpler(value), at)

    def _add_file(self, value: io.IOBase | os.PathLike[str], at: tuple[str | int, ...]) -> None:
        if self._count >= MAX_FILES:
            raise WrongOutput(f"output: at most {MAX_FILES} files are allowed")
        if isinstance(value, io.IOBase):
            name, data = str(getattr(value, "name", "file")), value.read(MAX_FILE_BYTES + 1)
            data = data.encode() if isinstance(data, str) else data
        else:
            name, data = os.fspath(value), _read(Path(value))
        if len(data) > MAX_FILE_BYTES:
            raise WrongOutput(
                f"output: the file {Path(name).name} is too large; at most {MAX_FILE_BYTES} bytes "
                "are allowed"
            )
        self._count += 1
        self._size_bytes += len(data)
        if self._size_bytes > MAX_FILES_BYTES:
            raise WrongOutput(
                f"output: its files together have more than the {MAX_FILES_BYTES} bytes allowed"
            )
        media_type = mimetypes.guess_type(name)[0] or ANY_BYTES
        self.files.append({"at": list(at), "media_type": media_type, "name": Path(name).name})
        self.blobs.append(data)


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise WrongOutput(f"output: there is no file {path.name}")
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


def _simpler(value: Any) -> Any:
    """A value of another type in a simpler one.

    Raises:
        WrongOutput: there is none.
    """
    if isinstance(value, cog.Secret):
        raise WrongOutput("output: a Secret can't be an output")
    if isinstance(value, datetime | date):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    fields = getattr(type(value), "model_fields", None)  # pydantic, if the class uses it
    if isinstance(fields, Mapping):
        return {name: getattr(value, name) for name in fields}
    for method in ("tolist", "item"):  # numpy's arrays and scalars
        if callable(convert := getattr(value, method, None)):
            return convert()
    raise WrongOutput(f"output: {_named(value)} can't be sent as JSON; return plain values")


def _named(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
