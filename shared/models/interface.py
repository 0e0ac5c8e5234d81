"""A custom model's inputs and output: the contents of `penstock.schema.json`.

`penstock models check FOLDER` writes it next to the class. The API, the console and reports read
it, so none of them needs the model's code. A worker whose code does not match it refuses to start.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import ConfigurationError
from shared.models.blob import FILE_FORMAT
from shared.models.class_files import ClassFile

INTERFACE_FILE = ClassFile(
    "penstock.schema.json", "schema.json", frozenset({"inputs", "cog_version", "sources_sha256"})
)
MAX_BYTES = 64 * 1024
"""Maximum file size. It is passed to model processes along with a catalog entry, as an argument."""
MAX_INPUTS = 100
SECRET_FORMAT = "password"
_UNCOMPARED = {"nullable"}
"""Keywords of inputs that release 0.1.0 omitted, and Cog includes now."""
_FILE = INTERFACE_FILE.name
_COMPARED = ("output", "streams", "concurrency", "batches", "weighs", "compares")


class ModelInterface(BaseModel):
    """The inputs and output of a class, as found by inspecting it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    inputs: dict[str, Any]
    """JSON Schema of the object with all inputs."""
    output: dict[str, Any]
    """JSON Schema of the output, with Cog's `x-cog-array-type` if it is streamed."""
    streams: Literal["", "text", "items"] = ""
    """Form in which the output is returned.

    Empty: as a whole. `text`: in pieces of one text. `items`: as elements of a list.
    """
    concurrency: int = Field(1, ge=1, le=1024)
    """Number of predictions that run concurrently in one process.

    Above 1 only for asynchronous classes.
    """
    batches: bool = False
    """True if it computes batches (`predict_batch`), regardless of `concurrency`."""
    weighs: bool = False
    """True if it determines the weight of an input (`work`)."""
    compares: bool = False
    """True if it determines which outputs are close (`is_close`)."""
    cog_version: str
    sources_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Digest of the inspected files."""

    @cached_property
    def as_json(self) -> str:
        return json.dumps(self.model_dump(), indent=2, sort_keys=True) + "\n"

    def __hash__(self) -> int:
        return hash(self.as_json)

    @property
    def properties(self) -> dict[str, dict[str, Any]]:
        """The JSON Schema of each input."""
        properties: dict[str, dict[str, Any]] = self.inputs.get("properties", {})
        return properties

    @property
    def required(self) -> frozenset[str]:
        return frozenset(self.inputs.get("required", ()))

    def example_inputs(self, text: str) -> dict[str, Any]:
        """Returns the required inputs, each with the simplest value.

        Args:
            text: value of texts, and content of files.
        """
        required = self.inputs.get("required", ())
        return {name: _example(self.properties[name], text) for name in required}

    def difference(self, other: ModelInterface) -> str:
        """Returns the first difference from another interface. Empty: they are equal.

        An input that is optional in the code may be required here, as in files of release 0.1.0.
        """
        for name in sorted({*self.properties, *other.properties}):
            ours, theirs = self.properties.get(name), other.properties.get(name)
            if ours is None or theirs is None:
                return f"inputs.{name}: {_there(ours)} in {_FILE}, {_there(theirs)} in the code"
            for keyword in sorted({*ours, *theirs} - _UNCOMPARED):
                if ours.get(keyword) != theirs.get(keyword):
                    return (
                        f"inputs.{name}.{keyword}: {_short(ours.get(keyword))} in {_FILE}, "
                        f"{_short(theirs.get(keyword))} in the code"
                    )
        if missing := sorted(other.required - self.required):
            return f"inputs.required: {missing[0]} is missing in {_FILE}, but required in the code"
        for field in _COMPARED:
            if (mine := getattr(self, field)) != (its := getattr(other, field)):
                return f"{field}: {_short(mine)} in {_FILE}, {_short(its)} in the code"
        return ""


def _example(shape: Mapping[str, Any], text: str) -> Any:
    """Returns the simplest value for a JSON Schema as written by cog."""
    if "enum" in shape:
        return shape["enum"][0]
    if "anyOf" in shape:
        return _example(shape["anyOf"][0], text)
    if shape.get("format") == FILE_FORMAT:
        return f"data:text/plain;base64,{base64.b64encode(text.encode()).decode()}"
    kind = shape.get("type")
    if kind == "string":
        padded = text.ljust(int(shape.get("minLength", 0)), ".")
        return padded[: int(shape.get("maxLength", len(padded)))]
    if kind in ("integer", "number"):
        return shape.get("minimum", shape.get("maximum", 1))
    plain: dict[str, Any] = {"boolean": False, "array": [], "object": {}}
    return plain.get(str(kind), text)


def _there(value: object) -> str:
    return "missing" if value is None else "there"


def _short(value: object) -> str:
    return json.dumps(value)[:200]


def read_interface(path: Path) -> ModelInterface:
    """Reads a penstock.schema.json.

    Raises:
        ConfigurationError: it is missing or invalid.
    """
    hint = (
        f"write it with: penstock models check {path.parent}; if only the catalog is mounted here, "
        "replace the path by the file's content"
    )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; {hint}", field="source") from error
    if len(data) > MAX_BYTES:
        raise ConfigurationError(
            f"{path}: must be at most {MAX_BYTES} bytes, got {len(data)}", field="source"
        )
    try:
        return ModelInterface.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigurationError(
            f"{path}: {where}: {first['msg']}; {hint}", field="source"
        ) from error
