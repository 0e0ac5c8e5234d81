"""`predict_batch(self, inputs: list[Input]) -> list[Output]`: our addition to Cog's interface.

It may be asynchronous (`async def`), but it still computes one batch at a time.

`Input` is a pydantic model, a `cog.BaseModel`, or a dataclass. Its fields are the inputs of one
prediction, with the same types and constraints as in `predict`. Other pydantic constraints are
checked when an `Input` is created.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from types import UnionType
from typing import Any, NamedTuple

from workers.models.custom.runner.cog_import import FieldInfo, cog, inspector
from workers.models.custom.runner.output_types import read_output
from workers.models.custom.runner.signatures import Signature, read_inputs

METHOD = "predict_batch"
_CONSTRAINTS = {
    "ge": "ge",
    "le": "le",
    "min_length": "min_length",
    "max_length": "max_length",
    "pattern": "regex",
}
"""Constraints of pydantic's `Field`, mapped to their names in Cog's `Input`."""


class BatchForm(NamedTuple):
    """The element type of `predict_batch`'s list, and the signature of one prediction."""

    element: Callable[..., Any]
    signature: Signature


def has_batches(target: object) -> bool:
    return inspect.isclass(target) and callable(getattr(target, METHOD, None))


def read_batch_form(target: Any) -> BatchForm:
    """Inspects a class's `predict_batch`.

    Raises:
        ValueError: the method's signature does not have this form. The message explains what is
            wrong.
    """
    method = getattr(target, METHOD)
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise ValueError(f"{METHOD} must return a list with one output per input, not yield")
    spec = inspect.getfullargspec(method)
    if len(spec.args) != 2 or spec.varargs or spec.varkw or spec.kwonlyargs:
        raise ValueError(f"{METHOD} must take only self and one list of inputs")
    hints = _read_hints(method)
    element = _element_of(hints.get(spec.args[1]), f"the argument {spec.args[1]}")
    output = _without_errors(_element_of(hints.get("return"), "the return value"))
    inputs = read_inputs(_fields_of(element))
    form = read_output(output, yields=False)
    if form.streams:
        raise ValueError(f"{METHOD}: the outputs of a batch can't be iterators")
    return BatchForm(element, Signature(inputs, form))


def _read_hints(annotated: Any) -> dict[str, Any]:
    """Returns the annotations of a method or class, with names in quotes resolved.

    Raises:
        ValueError: an annotation can't be evaluated.
    """
    try:
        return typing.get_type_hints(annotated, include_extras=True)
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise ValueError(f"{METHOD}: its annotations can't be read: {error}") from error


def _element_of(hint: Any, part: str) -> Any:
    if typing.get_origin(hint) is not list:
        raise ValueError(f"{METHOD}: {part} must have the type list[...]")
    return typing.get_args(hint)[0]


def _without_errors(output: Any) -> Any:
    """Returns an output type with exception types removed.

    Methods that return errors for individual items use `Output | Exception`.
    """
    if typing.get_origin(output) not in (typing.Union, UnionType):
        return output
    types = [
        member
        for member in typing.get_args(output)
        if not (inspect.isclass(member) and issubclass(member, BaseException))
    ]
    return reduce(or_, types) if types else output


def _fields_of(element: Any) -> dict[str, tuple[Any, FieldInfo]]:
    """Returns each field's type, default, and constraints, keyed by field name."""
    if inspect.isclass(element):
        hints = _read_hints(element)
        model_fields = getattr(element, "model_fields", None)
        if isinstance(model_fields, Mapping):
            return {name: _of_pydantic(hints[name], field) for name, field in model_fields.items()}
        if dataclasses.is_dataclass(element):
            return {
                field.name: (hints[field.name], _of_dataclass(field))
                for field in dataclasses.fields(element)
            }
    raise ValueError(
        f"{METHOD}: the elements of its argument must be a pydantic model, a "
        "cog.BaseModel or a dataclass whose fields are the inputs"
    )


def _of_pydantic(hint: Any, field: Any) -> tuple[Any, FieldInfo]:
    known = {
        name: getattr(constraint, theirs)
        for constraint in field.metadata
        for theirs, name in _CONSTRAINTS.items()
        if getattr(constraint, theirs, None) is not None
    }
    hint = inspector()._strip_non_opaque_annotated(hint)
    if typing.get_origin(hint) is typing.Literal:
        choices = list(typing.get_args(hint))
        hint = type(choices[0])
        known["choices"] = choices
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    about = {"description": field.description, "deprecated": bool(field.deprecated) or None}
    return hint, cog.Input(default, **known, **about)


def _of_dataclass(field: dataclasses.Field[Any]) -> FieldInfo:
    if isinstance(field.default, FieldInfo):
        return field.default
    if field.default is not dataclasses.MISSING:
        return typing.cast(FieldInfo, cog.Input(field.default))
    if field.default_factory is not dataclasses.MISSING:
        return typing.cast(FieldInfo, cog.Input(field.default_factory()))
    return typing.cast(FieldInfo, cog.Input())
