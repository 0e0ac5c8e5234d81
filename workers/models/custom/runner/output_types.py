"""Converts a class's return type to JSON Schema, as Cog's schema generator does.

Cog's runtime inspector, which reads the inputs, rejects most nested types. Cog still serves such
types, because its schema is generated from source code and its server passes outputs on without
checking them. Any part of a type that isn't recognized here matches any value, so no return type
prevents a class from being served.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import enum
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from workers.models.custom.runner.cog_import import adt, cog

FILE_FORMAT = "uri"
_OBJECT = {"type": "object"}
"""The schema for a dict, and for `Any` nested in another type, as Cog writes it."""
_TEXTS = (cog.ConcatenateIterator, cog.AsyncConcatenateIterator)
_ITERATORS = (
    collections.abc.Iterator,
    collections.abc.AsyncIterator,
    collections.abc.Generator,
    collections.abc.AsyncGenerator,
)
_ITERABLES = (
    collections.abc.Iterable,
    collections.abc.AsyncIterable,
    collections.abc.Collection,
)
"""Types that are streamed only if a generator produces them, because a list is also iterable."""
_ARRAYS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Set)
_PLAIN_TYPES: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}


class Output(NamedTuple):
    """One prediction's output."""

    schema: dict[str, Any]
    """JSON Schema, with Cog's `x-cog-array-type` if it is streamed."""
    streams: str = ""
    """Empty: all at once. `text`: pieces of a single text. `items`: elements of a list."""

    @property
    def piece(self) -> dict[str, Any]:
        """The schema of a single value that the class returns or yields."""
        shape: dict[str, Any] = self.schema["items"] if self.streams else self.schema
        return shape


def read_output(hint: Any, *, yields: bool) -> Output:
    """Reads a return type.

    Args:
        hint: the annotation, already evaluated to a type.
        yields: True if the function is a generator, so its output is streamed regardless of `hint`.

    Raises:
        ValueError: the class declares a concatenation of something other than text.
    """
    hint = _strip(hint)
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in _TEXTS:
        if arguments not in ((str,), ()):
            raise ValueError(f"{origin.__name__} must have str elements")
        shape = _stream_schema({"type": "string"}) | {"x-cog-array-display": "concatenate"}
        return Output(shape, "text")
    is_list = isinstance(origin, type) and issubclass(origin, _ARRAYS)
    if origin in _ITERATORS or yields:
        has_element = arguments and (is_list or origin in (*_ITERATORS, *_ITERABLES))
        element = _schema(arguments[0], ()) if has_element else dict(_OBJECT)
        return Output(_stream_schema(element), "items")
    return Output({"title": "Output"} | ({} if hint is Any else _schema(hint, ())))


def is_file(schema: Mapping[str, Any]) -> bool:
    """True if the schema describes a file."""
    return schema.get("format") == FILE_FORMAT


def _stream_schema(element: dict[str, Any]) -> dict[str, Any]:
    return {
        "title": "Output",
        "type": "array",
        "items": element,
        "x-cog-array-type": "iterator",
    }


def _schema(hint: Any, inside: tuple[type, ...]) -> dict[str, Any]:
    """Returns a type's schema. `inside`: the enclosing models, used to stop recursion."""
    hint = _strip(hint)
    if adt._unwrap_opaque(hint)[1]:
        field = adt.FieldType.from_type(hint)
        is_optional = field.repetition.name.startswith("OPTIONAL")
        return {**field.json_type(), **({"nullable": True} if is_optional else {})}
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _union_schema(arguments, inside)
    if origin is typing.Literal:
        return _enum_schema(arguments)
    if not isinstance(origin, type):
        return {}
    if adt._is_dict_like(origin) or issubclass(origin, collections.abc.Mapping):
        return dict(_OBJECT)
    is_text = issubclass(origin, str | bytes)
    if origin in _ITERABLES or (issubclass(origin, _ARRAYS) and not is_text):
        return {"type": "array", "items": _items_schema(origin, arguments, inside)}
    return _class_schema(origin, inside)


def _items_schema(
    origin: type, arguments: tuple[Any, ...], inside: tuple[type, ...]
) -> dict[str, Any]:
    is_mixed = issubclass(origin, tuple) and arguments[1:] != (...,)
    if is_mixed or not arguments:
        return dict(_OBJECT) if origin is list else {}
    return _schema(arguments[0], inside)


def _union_schema(arguments: tuple[Any, ...], inside: tuple[type, ...]) -> dict[str, Any]:
    variants = [argument for argument in arguments if argument is not types.NoneType]
    if len(variants) == 1:
        schema = _schema(variants[0], inside)
    else:
        schema = {"anyOf": [_schema(variant, inside) for variant in variants]}
    return schema | {"nullable": True} if len(variants) < len(arguments) else schema


def _enum_schema(values: tuple[Any, ...]) -> dict[str, Any]:
    kinds = {_PLAIN_TYPES.get(type(value)) for value in values}
    kind = kinds.pop() if len(kinds) == 1 else None
    return {"enum": list(values)} | ({"type": kind} if kind else {})


def _class_schema(kind: type, inside: tuple[type, ...]) -> dict[str, Any]:
    primitive = adt.PrimitiveType.from_type(kind)
    if primitive is not adt.PrimitiveType.CUSTOM:
        return {**primitive.json_type()}
    if cog.coder.Coder.lookup(kind) is not None:
        return dict(_OBJECT)
    if issubclass(kind, enum.Enum):
        values = tuple(member.value for member in kind)
        is_plain = all(type(value) in _PLAIN_TYPES for value in values)
        return _enum_schema(values) if is_plain else {}
    if issubclass(kind, datetime.date):
        is_time = issubclass(kind, datetime.datetime)
        return {"type": "string", "format": "date-time" if is_time else "date"}
    if kind in inside:
        return dict(_OBJECT)
    fields = _fields(kind)
    return {} if fields is None else _model_schema(fields, (*inside, kind))


def _model_schema(fields: dict[str, Any], inside: tuple[type, ...]) -> dict[str, Any]:
    properties: dict[str, dict[str, Any]] = {}
    for name, hint in fields.items():
        title = name.replace("_", " ").title()
        properties[name] = {**_schema(hint, inside), "title": title}
    required = [name for name, shape in properties.items() if not shape.get("nullable")]
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
    }


def _fields(kind: type) -> dict[str, Any] | None:
    """Returns the type of each field in a model or dataclass, by name. None if it has no fields."""
    known = getattr(kind, "model_fields", None)  # from pydantic, if the class uses pydantic
    if not isinstance(known, Mapping):
        known = getattr(kind, "__fields__", None)  # from pydantic 1
    if isinstance(known, Mapping):
        names = list(known)
    elif dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif issubclass(kind, cog.BaseModel):
        names = list(inspect.get_annotations(kind))
    else:
        return None
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except Exception:
        # The boundary with the class's code, because a name used in a type may not exist at
        # runtime.
        hints = {}
    return {name: hints.get(name, Any) for name in names}


def _strip(hint: Any) -> Any:
    """Returns a type without any aliases or annotations that wrap it."""
    while True:
        if typing.get_origin(hint) is typing.Annotated:
            if adt._unwrap_opaque(hint)[1]:
                return hint
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":  # Python 3.12
            hint = hint.__value__
        else:
            return hint
