"""Predictions of models of one's own: inputs as the schema.json of the model says."""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from pydantic_core import SchemaError

from api.bodies import Body
from api.inputs.source_images import ImageCaller, SourceImages, is_elsewhere
from api.inputs.url_fetcher import FetchedInput
from api.tasks.base import ApiTask, Inputs, StreamKind
from shared.blob import Blob
from shared.catalog import Model
from shared.errors import BadInput, InputTooLarge
from shared.model_interface import FILE_FORMAT, SECRET_FORMAT, ModelInterface
from shared.tasks.custom import CustomInput, FilePlace, interface_of

MAX_FILES = 32
"""Of one prediction. Each may be in the message."""
MAX_VALUES_BYTES = 1024 * 1024
"""Of all inputs but files, as JSON: a prediction is one message."""
SHOWN_SECRET = "**********"
ANY_BYTES = "application/octet-stream"


class AnyInput(Body):
    """The input of a model of one's own. Each model has other fields."""

    model_config = ConfigDict(extra="allow", frozen=True)


class CustomApi(ApiTask):
    """The output is what the class returns."""

    input_schema = AnyInput
    output_schema: ClassVar = {}

    def input_schema_of(self, model: Model) -> dict[str, Any]:
        """As the class declares it."""
        return interface_of(model).inputs

    def output_schema_of(self, model: Model) -> dict[str, Any]:
        """As the class declares it."""
        return interface_of(model).output

    def streams(self, model: Model) -> StreamKind:
        """Piece by piece, if the class yields."""
        return interface_of(model).streams

    async def read(
        self, raw_input: dict[str, Any], model: Model, caller: ImageCaller, images: SourceImages
    ) -> Inputs:
        """Returns one item: a class computes one prediction at a time."""
        interface = interface_of(model)
        # Null is the same as left out, as Replicate's clients send it.
        present = {name: value for name, value in raw_input.items() if value is not None}
        validator_of(interface).model_validate(present, strict=True)
        values: dict[str, Any] = json.loads(json.dumps(_without_files(present, interface)))
        if len(json.dumps(values)) > MAX_VALUES_BYTES:
            raise InputTooLarge(
                f"input: longer than {MAX_VALUES_BYTES} bytes without its files", field="input"
            )
        shown = dict(raw_input)
        custom_input = CustomInput(values, is_streamed=bool(interface.streams))
        files = list(_files(present, interface))
        _check_count(files)
        elsewhere = [(url, str(at[0])) for at, url in files if is_elsewhere(url, caller)]
        fetched = await images.fetch_elsewhere(elsewhere, caller)
        for at, url in files:
            if (found := fetched.get(url)) is not None:
                custom_input.files.append(found.blob)
                custom_input.places.append(FilePlace(at, _name_of(found)))
            else:
                await self._add_file(custom_input, at, url, shown, caller, images)
        for name, shape in interface.properties.items():
            if shape.get("format") == SECRET_FORMAT and shown.get(name) is not None:
                shown[name] = SHOWN_SECRET
        return Inputs([custom_input], shown, is_list=False, is_repeatable=bool(model.cache.ttl_s))

    async def _add_file(
        self,
        custom_input: CustomInput,
        at: list[str | int],
        url: str,
        shown: dict[str, Any],
        caller: ImageCaller,
        images: SourceImages,
    ) -> None:
        field = str(at[0])
        file = await images.fetch(url, caller, field)
        media_type = file.media_type or ANY_BYTES
        blob = await images.stored(Blob(media_type, data=file.data))
        custom_input.files.append(blob)
        custom_input.places.append(FilePlace(at, file.name or "file" + _suffix(blob)))
        if url.startswith("data:"):
            link = await images.keep(file._replace(media_type=media_type), caller, field)
            if len(at) > 1:
                shown[field] = [*shown[field][: at[1]], link, *shown[field][int(at[1]) + 1 :]]
            else:
                shown[field] = link


def _suffix(file: Blob) -> str:
    """The usual end of the names of such files. Many decide by it what a file is."""
    return mimetypes.guess_extension(file.media_type) or ""


def _name_of(fetched: FetchedInput) -> str:
    name = fetched.name or "file"
    is_plain = "." not in name and fetched.blob.media_type != ANY_BYTES
    return name + _suffix(fetched.blob) if is_plain else name


def _check_count(files: list[tuple[list[str | int], str]]) -> None:
    if len(files) > MAX_FILES:
        field = str(files[MAX_FILES][0][0])
        raise BadInput(
            f"{field}: at most {MAX_FILES} files are allowed in a prediction", field=field
        )


def _is_file(shape: dict[str, Any]) -> bool:
    return shape.get("format") == FILE_FORMAT


def _files(
    values: dict[str, Any], interface: ModelInterface
) -> Iterator[tuple[list[str | int], str]]:
    """Yields place and URL of each file in an input."""
    for name, shape in interface.properties.items():
        if name not in values:
            continue
        if _is_file(shape):
            yield [name], values[name]
        elif _is_file(shape.get("items", {})):
            for number, one in enumerate(values[name]):
                yield [name, number], one


def _without_files(values: dict[str, Any], interface: ModelInterface) -> dict[str, Any]:
    """The input with null in place of each file."""
    kept = dict(values)
    for at, _ in _files(values, interface):
        name = str(at[0])
        kept[name] = None if len(at) == 1 else [None] * len(values[name])
    return kept


@lru_cache(maxsize=256)
def validator_of(interface: ModelInterface) -> type[BaseModel]:
    """Returns the pydantic model that checks the inputs of a model."""
    required = interface.inputs.get("required", ())
    fields: dict[str, Any] = {}
    for number, (name, shape) in enumerate(interface.properties.items()):
        default = ... if name in required else None
        # By alias, because a name of an input may be one that pydantic uses itself.
        fields[f"input_{number}"] = (_type_of(shape), Field(default, alias=name))
    return create_model("Input", __config__=ConfigDict(extra="forbid"), **fields)


_PLAIN: dict[str, Any] = {"string": str, "integer": int, "number": float, "boolean": bool}


def _type_of(shape: dict[str, Any]) -> Any:
    """The type that takes what a JSON Schema, as cog writes it, describes."""
    if "enum" in shape:
        return Literal[tuple(shape["enum"])]
    if "anyOf" in shape:
        union: Any = _type_of(shape["anyOf"][0])
        for one in shape["anyOf"][1:]:
            union = union | _type_of(one)
        return union
    kind = shape.get("type")
    if kind == "array":
        return list[_type_of(shape.get("items", {}))]  # type: ignore[misc]
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
    """A regular expression that is matched from the beginning, as cog does.

    Empty: it needs the engine of Python, whose time has no bound. The class's process checks it.
    """
    pattern = f"^(?:{regex})"
    try:
        TypeAdapter(Annotated[str, Field(pattern=pattern)])
    except SchemaError:
        return ""
    return pattern


TASK = CustomApi()
