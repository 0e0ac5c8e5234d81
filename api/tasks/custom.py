"""Predictions with custom models. A model's penstock.schema.json defines its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from pydantic_core import SchemaError

from api.bodies import Body
from api.inputs.source_images import FetchedFile, ImageCaller, SourceImages, is_elsewhere
from api.inputs.url_fetcher import FetchedInput
from api.tasks.base import ApiTask, Inputs, StreamKind
from shared.errors import BadInput, InputTooLarge, PenstockError
from shared.models.blob import FILE_FORMAT, Blob
from shared.models.catalog import Flow, Model
from shared.models.entry import WORK_UNITS
from shared.models.interface import SECRET_FORMAT, ModelInterface
from shared.models.tasks.custom import (
    JSON_TYPE,
    MAX_FILES,
    MAX_MESSAGE_JSON_BYTES,
    CustomInput,
    FilePlace,
    find_unsendable,
    interface_of,
    usual_suffix,
)

MAX_VALUES_BYTES = 16 * 1024 * 1024
"""Maximum size of the inputs as JSON, in bytes, excluding files. Values that don't fit in a message
are stored separately.
"""
SHOWN_SECRET = "**********"
ANY_BYTES = "application/octet-stream"

FileInput = tuple[list[str | int], str]
"""A file's position in an input, and its URL."""

_PLAIN: dict[str, Any] = {"string": str, "integer": int, "number": float, "boolean": bool}


class AnyInput(Body):
    """A custom model's input. The fields differ from model to model."""

    model_config = ConfigDict(extra="allow", frozen=True)


class CustomApi(ApiTask):
    """The output is the class's return value."""

    input_schema = AnyInput
    output_schema: ClassVar = {}

    def input_schema_of(self, model: Model) -> dict[str, Any]:
        return interface_of(model).inputs

    def output_schema_of(self, model: Model) -> dict[str, Any]:
        return interface_of(model).output

    def streams(self, model: Model) -> StreamKind:
        """Output is streamed piece by piece if the class yields."""
        return interface_of(model).streams

    async def read(
        self, raw_input: dict[str, Any], model: Model, caller: ImageCaller, images: SourceImages
    ) -> Inputs:
        """Returns one item, because a class computes one prediction at a time."""
        custom_input, files = validate_input(raw_input, model, max_values_bytes(model))
        shown_input = dict(raw_input)
        if files:
            await add_files(custom_input, files, caller, images, shown_input)
        await store_large_values(custom_input, model, images, caller, shown_input)
        for name, shape in interface_of(model).properties.items():
            if shape.get("format") == SECRET_FORMAT and shown_input.get(name) is not None:
                shown_input[name] = SHOWN_SECRET
        return Inputs([custom_input], shown_input, is_list=False, is_repeatable=model.deterministic)


def validate_input(
    raw_input: dict[str, Any], model: Model, max_bytes: int = MAX_MESSAGE_JSON_BYTES
) -> tuple[CustomInput, list[FileInput]]:
    """Validates an input against its model's interface.

    Args:
        raw_input: the body's `input`.
        max_bytes: maximum size of the values as JSON, excluding files.

    Returns:
        The input without its files, and the files.

    Raises:
        pydantic.ValidationError: a field is invalid.
        BadInput: the input is too large, or has too many files.
    """
    interface = interface_of(model)
    # Null means the same as a missing value, because Replicate's clients send null.
    present = {name: value for name, value in raw_input.items() if value is not None}
    validator_of(interface).model_validate(present, strict=True)
    files = list(_files(present, interface))
    values = _without_files(present, files)
    if len(msgspec.json.encode(values)) > max_bytes:
        raise InputTooLarge(
            f"input: must be at most {max_bytes} bytes, not counting its files", field="input"
        )
    _check_integers(values)
    if len(files) > MAX_FILES:
        field = str(files[MAX_FILES][0][0])
        raise BadInput(f"{field}: a prediction may have at most {MAX_FILES} files", field=field)
    return CustomInput(values, is_streamed=bool(interface.streams)), files


def _check_integers(values: Mapping[str, Any]) -> None:
    """Rejects integers that messages can't represent.

    Raises:
        BadInput: an integer is too large. The error message names the input that contains it.
    """
    try:
        msgspec.msgpack.encode(values)
    except OverflowError:
        for name, value in values.items():
            if reason := find_unsendable(value):
                raise BadInput(f"{name}: {reason}", field=name) from None


def max_values_bytes(model: Model) -> int:
    """Returns the maximum JSON size, in bytes, of an input passed to `store_large_values`."""
    is_flow = isinstance(model, Flow)  # a flow's engine reads the values
    return MAX_MESSAGE_JSON_BYTES if is_flow else MAX_VALUES_BYTES


async def store_large_values(
    custom_input: CustomInput,
    model: Model,
    images: SourceImages,
    caller: ImageCaller,
    raw_input: dict[str, Any] | None = None,
) -> None:
    """Stores the largest values as JSON files until the rest fits in a message.

    A worker reads them back (workers/models/custom/preparation.py).

    Args:
        caller: owner of the files in `raw_input`.
        raw_input: the input as shown to its caller; each stored value in it is replaced by a link.
            None if callers can't read the input.

    Raises:
        InputTooLarge: a secret does not fit in a message. Secrets are never stored.
        StorageFull: the tenant's storage quota is used up.
        Unavailable: the object store is unreachable.
    """
    properties = interface_of(model).properties
    written = {name: msgspec.json.encode(value) for name, value in custom_input.values.items()}
    left_bytes = sum(map(len, written.values()))
    for name in sorted(written, key=lambda name: len(written[name]), reverse=True):
        if left_bytes <= MAX_MESSAGE_JSON_BYTES:
            return
        if properties[name].get("format") == SECRET_FORMAT:
            raise InputTooLarge(
                f"{name}: must be at most {MAX_MESSAGE_JSON_BYTES} bytes", field=name
            )
        data = written[name]
        left_bytes -= len(data)
        custom_input.values[name] = None
        custom_input.files.append(await images.store_large_source(Blob(JSON_TYPE, data=data)))
        custom_input.places.append(FilePlace([name], f"{name}.json"))
        if raw_input is not None:
            raw_input[name] = await images.keep(FetchedFile(data, JSON_TYPE, name), caller, name)


def input_of_fields(
    values: Mapping[str, Any], model: Model, names: Mapping[str, str]
) -> tuple[CustomInput, list[FileInput]]:
    """Validates the fields for an endpoint that a class serves. None values are omitted.

    Args:
        values: values, keyed by the class's input names.
        names: the endpoint's field names, keyed by input name, where the two differ.

    Returns:
        The input without its files, and the files.

    Raises:
        pydantic.ValidationError: the class does not accept a value.
        BadInput: the class does not accept a field.
    """
    filled = {name: value for name, value in values.items() if value is not None}
    for name in filled.keys() - interface_of(model).properties.keys():
        named = names.get(name, name)
        raise BadInput(f"{named}: is not supported by {model.name}; omit it", field=named)
    return validate_input(filled, model)


class FieldNames(NamedTuple):
    """The names that an endpoint uses for the inputs of its class or flow.

    Args:
        names: the endpoint's field names, keyed by input name, where the two differ.
    """

    model: Model
    field: str
    names: Mapping[str, str] = {}

    def error(self, error: PenstockError) -> PenstockError:
        """Returns the error with input names replaced by the endpoint's field names."""
        if not isinstance(error, BadInput):
            return error
        is_weight = isinstance(error, InputTooLarge) and error.field == "input"
        is_whole = error.field == "input" and "input" not in self.names
        named = self.field if is_weight or is_whole else self.names.get(error.field or "")
        if named is None:
            return error
        reason = error.message.removeprefix(f"{error.field}: ")
        if is_weight and self.model.work.max is not None and self.model.api:
            limit = f"{self.model.work.max} {WORK_UNITS[self.model.api]}"
            reason = f"exceeds the maximum of {limit} for {self.model.name}"
        return type(error)(f"{named}: {reason}", field=named)

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Replaces input names with the endpoint's field names in errors raised in the block."""
        try:
            yield
        except BadInput as error:
            if (named := self.error(error)) is error:
                raise
            raise named from error


async def add_files(
    custom_input: CustomInput,
    files: Sequence[FileInput],
    caller: ImageCaller,
    images: SourceImages,
    raw_input: dict[str, Any] | None = None,
) -> None:
    """Loads the files an input refers to.

    Args:
        files: the files returned by `validate_input`.
        caller: owner of the files that the input may refer to.
        raw_input: the input as shown to its caller. Each `data:` URI in it is stored and replaced
            by a link. None if the input is not shown.

    Raises:
        BadInput: the file does not exist, or fetching it is not allowed.
        Overloaded: too many files are being fetched.
        Unavailable: the object store is unreachable.
    """
    elsewhere = [(url, str(at[0])) for at, url in files if is_elsewhere(url, caller)]
    fetched = await images.fetch_elsewhere(elsewhere, caller)
    for at, url in files:
        if (loaded := fetched.get(url)) is not None:
            blob, name = loaded.blob, _name_of(loaded)
        else:
            file = await images.fetch(url, caller, str(at[0]))
            file = file._replace(media_type=file.media_type or ANY_BYTES)
            blob = await images.store_large_source(Blob(file.media_type, data=file.data))
            name = file.name or "file" + usual_suffix(blob)
            if url.startswith("data:") and raw_input is not None:
                _show(raw_input, at, await images.keep(file, caller, str(at[0])))
        custom_input.files.append(blob)
        custom_input.places.append(FilePlace(at, name))


def _show(raw_input: dict[str, Any], at: list[str | int], link: str) -> None:
    """Puts a link into an input, without changing the lists in the body."""
    field = str(at[0])
    if len(at) > 1:
        number = int(at[1])
        raw_input[field] = [*raw_input[field][:number], link, *raw_input[field][number + 1 :]]
    else:
        raw_input[field] = link


def _name_of(fetched: FetchedInput) -> str:
    name = fetched.name or "file"
    is_plain = "." not in name and fetched.blob.media_type != ANY_BYTES
    return name + usual_suffix(fetched.blob) if is_plain else name


def _is_file(shape: dict[str, Any]) -> bool:
    return shape.get("format") == FILE_FORMAT


def _files(values: dict[str, Any], interface: ModelInterface) -> Iterator[FileInput]:
    """Yields the position and URL of each file in an input."""
    for name, shape in interface.properties.items():
        if name not in values:
            continue
        if _is_file(shape):
            yield [name], values[name]
        elif _is_file(shape.get("items", {})):
            for number, value in enumerate(values[name]):
                yield [name, number], value


def _without_files(values: dict[str, Any], files: Sequence[FileInput]) -> dict[str, Any]:
    """Returns the input with each file replaced by null."""
    stripped_values = dict(values)
    for at, _ in files:
        name = str(at[0])
        stripped_values[name] = None if len(at) == 1 else [None] * len(values[name])
    return stripped_values


@lru_cache(maxsize=256)
def validator_of(interface: ModelInterface) -> type[BaseModel]:
    """Returns the pydantic model that validates a model's inputs."""
    required = interface.inputs.get("required", ())
    fields: dict[str, Any] = {}
    for number, (name, shape) in enumerate(interface.properties.items()):
        default = ... if name in required else None
        # By alias, because an input may have a name that pydantic itself uses.
        fields[f"input_{number}"] = (_type_of(shape), Field(default, alias=name))
    return create_model("Input", __config__=ConfigDict(extra="forbid"), **fields)


def _type_of(shape: dict[str, Any]) -> Any:
    """Returns the type for a JSON Schema generated by Cog."""
    if "enum" in shape:
        return Literal[tuple(shape["enum"])]
    if "anyOf" in shape:
        union: Any = _type_of(shape["anyOf"][0])
        for alternative in shape["anyOf"][1:]:
            union = union | _type_of(alternative)
        return union
    kind = shape.get("type")
    if kind == "array":
        return Annotated[list[_type_of(shape.get("items", {}))], Field(fail_fast=True)]  # type: ignore[misc]
    if kind == "object":
        return dict[str, Any]
    plain = _PLAIN.get(str(kind), Any)
    bounds: dict[str, Any] = {
        name: shape[keyword]
        for name, keyword in (
            ("ge", "minimum"),
            ("le", "maximum"),
            ("min_length", "minLength"),
            ("max_length", "maxLength"),
        )
        if keyword in shape
    }
    if kind == "number":
        bounds["allow_inf_nan"] = False
    if "pattern" in shape and (pattern := _pattern_of(shape["pattern"])):
        bounds["pattern"] = pattern
    return Annotated[plain, Field(**bounds)] if bounds else plain


def _pattern_of(regex: str) -> str:
    """Returns a regular expression anchored at the start, as Cog does.

    Empty if the pattern requires Python's engine, whose running time is unbounded. In that case,
    the class's process checks the value.
    """
    pattern = f"^(?:{regex})"
    try:
        TypeAdapter(Annotated[str, Field(pattern=pattern)])
    except SchemaError:
        return ""
    return pattern


TASK = CustomApi()
