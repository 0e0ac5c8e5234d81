"""Checks a flow against its models when the catalog is read, and derives its output type.

Types are JSON Schema, limited to the features of a class's penstock.schema.json. Unknown types (an
object without properties, `Any`) match everything, and whichever process handles the item checks
the actual values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from shared.errors import BadInput
from shared.models.blob import FILE_FORMAT
from shared.models.flow_plan import (
    INPUT,
    ITEM,
    Condition,
    FlowPlan,
    FlowStep,
    Reference,
    parse_reference,
)

Schema = Mapping[str, Any]
Place = tuple[int | str, ...]
_SHOWN = ("type", "format", "enum", "items", "properties", "anyOf")
"""Schema keywords to copy to the output type. Titles and defaults apply only to the step itself."""
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}

_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (Mapping,),
}


class StepSchema(NamedTuple):
    """A model's flow step inputs and output, as JSON Schema."""

    inputs: Mapping[str, Any]
    """Schema for the object with all inputs."""
    output: Mapping[str, Any]


Find = Callable[[str], StepSchema | None]


class FlowError(ValueError):
    """A flow is invalid."""

    def __init__(self, place: Place, reason: str) -> None:
        super().__init__(reason)
        self.place = place


def check_flow(plan: FlowPlan, find: Find) -> dict[str, Any]:
    """Checks a flow's references and types. Returns its output type.

    Raises:
        FlowError: a reference, a type, or a model is invalid.
    """
    scope: dict[str, Schema] = {INPUT: {"type": "object", "properties": plan.input}}
    for number in plan.order():
        step = plan.steps[number]
        scope[step.id] = _check_step(step, ("steps", number), scope, find)
    return dict(_show_type(_type_of(plan.output, ("output",), scope)))


def _check_step(step: FlowStep, place: Place, scope: Mapping[str, Schema], find: Find) -> Schema:
    """Returns the type of the step's value."""
    schema = find(step.model)
    if schema is None:
        raise FlowError((*place, "model"), f"model {step.model!r} is not in the catalog")
    own_scope = dict(scope)
    if step.for_each is not None:
        elements = {
            name: _element(reference, (*place, "for_each", *([name] if name else [])), scope)
            for name, reference in step.lists.items()
        }
        is_one = isinstance(step.for_each, str)
        own_scope[ITEM] = elements[""] if is_one else {"type": "object", "properties": elements}
    if step.condition is not None:
        _check_condition(step.condition, (*place, "when"), own_scope)
    _check_input(step, (*place, "input"), own_scope, schema.inputs)
    if step.default is not None:
        default = _type_of(step.default, (*place, "default"), own_scope)
        if reason := misfit(default, schema.output):
            raise FlowError(
                (*place, "default"), f"{reason}, which is required by the type of the step's value"
            )
    is_nullable = step.default is None and (step.has_default or step.when is not None)
    output = _nullable(schema.output) if is_nullable else schema.output
    return output if step.for_each is None else {"type": "array", "items": output}


def _element(reference: Reference, place: Place, scope: Mapping[str, Schema]) -> Schema:
    elements = _plain(_of_reference(reference, place, scope))
    if _kind(elements) not in ("array", "any"):
        raise FlowError(place, f"{reference} must be a list, got {_noun(elements)}")
    items: Schema = elements.get("items", {})
    return items


def _check_input(step: FlowStep, place: Place, scope: Mapping[str, Schema], inputs: Schema) -> None:
    properties: Mapping[str, Schema] = inputs.get("properties", {})
    for name, value in step.input.items():
        if name not in properties:
            raise FlowError(
                (*place, name),
                f"is not an input of {step.model}; its inputs are "
                f"{', '.join(properties) or 'none'}",
            )
        if reason := misfit(_type_of(value, (*place, name), scope), properties[name]):
            raise FlowError((*place, name), f"{reason}, which is required by {step.model}")
    for name in inputs.get("required", ()):
        if name not in step.input:
            raise FlowError(place, f"{name}: is required by {step.model}")


def _check_condition(condition: Condition, place: Place, scope: Mapping[str, Schema]) -> None:
    left, right = (
        _plain(
            _of_reference(operand, place, scope)
            if isinstance(operand, Reference)
            else _literal(operand)
        )
        for operand in (condition.left, condition.right)
    )
    kinds = {
        "number" if _kind(operand) == "integer" else _kind(operand) for operand in (left, right)
    }
    if condition.operator in ("==", "!="):
        if len(kinds - {"any", "null"}) > 1:
            raise FlowError(place, f"{condition}: {_noun(left)} can never equal {_noun(right)}")
    elif kinds - {"any"} not in (set(), {"number"}, {"string"}):
        raise FlowError(place, f"{condition}: {_noun(left)} and {_noun(right)} can't be ordered")


def _of_reference(reference: Reference, place: Place, scope: Mapping[str, Schema]) -> Schema:
    if reference.name not in scope:
        raise FlowError(place, f"{reference}: step {reference.name!r} does not exist")
    schema = scope[reference.name]
    for field in reference.fields:
        schema = _field(schema, field, reference, place)
    return schema


def _field(schema: Schema, field: str, reference: Reference, place: Place) -> Schema:
    schema = _plain(schema)
    kind = _kind(schema)
    if kind == "array":
        return {"type": "array", "items": _field(schema.get("items", {}), field, reference, place)}
    if kind == "any":
        return {}
    if kind != "object":
        raise FlowError(place, f"{reference}: {_noun(schema)} has no field {field!r}")
    if "properties" not in schema:
        return {}
    if field not in schema["properties"]:
        known = ", ".join(schema["properties"]) or "none"
        raise FlowError(place, f"{reference}: the field {field!r} does not exist; use {known}")
    of_field: Schema = schema["properties"][field]
    return of_field


def _type_of(value: Any, place: Place, scope: Mapping[str, Schema]) -> Schema:
    if isinstance(value, str) and value.startswith("$") and not value.startswith("$$"):
        return _of_reference(parse_reference(value), place, scope)
    if isinstance(value, Mapping):
        fields = {name: _type_of(field, (*place, name), scope) for name, field in value.items()}
        return {"type": "object", "properties": fields}
    if isinstance(value, list | tuple):
        elements = [
            _type_of(element, (*place, number), scope) for number, element in enumerate(value)
        ]
        alike = elements and all(
            _show_type(element) == _show_type(elements[0]) for element in elements
        )
        return {"type": "array", "items": elements[0] if alike else {}}
    return _literal(value)


def _literal(value: Any) -> Schema:
    return {"type": _KINDS.get(type(value), "string"), "const": value}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]} if _kind(schema) != "any" else schema


def _plain(schema: Schema) -> Schema:
    """Returns the type of a value that is not null. Null is never passed on; it is skipped."""
    options = [option for option in schema.get("anyOf", ()) if option.get("type") != "null"]
    return _plain(options[0]) if len(options) == 1 else schema


def _kind(schema: Schema) -> str:
    if schema.get("format") == FILE_FORMAT:
        return "file"
    kind = schema.get("type")
    return kind if isinstance(kind, str) else "any"


def _noun(schema: Schema) -> str:
    if "const" in schema:
        return _show_value(schema["const"])
    kind = _kind(_plain(schema))
    named = {"array": "a list", "object": "an object", "integer": "an integer", "any": "any value"}
    return named.get(kind, f"a {kind}")


def _show_value(value: Any) -> str:
    """Returns the start of a value as JSON. YAML's dates, which JSON lacks, become strings."""
    return json.dumps(value, default=str)[:80]


def check_values(values: Mapping[str, Any], inputs: Schema) -> dict[str, Any]:
    """Checks computed inputs, because a class may return a value that it did not declare.

    Files and the fields of objects are checked where they are used.

    Returns:
        The values that are not null. The model's defaults replace the nulls.

    Raises:
        BadInput: a value has the wrong type or is out of range. The message includes the name of
            the input.
    """
    properties: Mapping[str, Schema] = inputs.get("properties", {})
    present = {name: value for name, value in values.items() if value is not None}
    for name, value in present.items():
        if fault := _find_fault(value, properties.get(name, {})):
            raise BadInput(f"{name}{fault}", field=name)
    return present


def _find_fault(value: Any, wanted: Schema) -> str:
    """Returns the rule that a value breaks, preceded by its position in a list: `[2]: must be ...`.

    Empty if the value matches the type.
    """
    options = [option for option in wanted.get("anyOf", ()) if option.get("type") != "null"]
    if options:
        faults = [_find_fault(value, option) for option in options]
        return "" if "" in faults else faults[0]
    if not _has_type(value, wanted):
        got = "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}"
        return f": must be {_noun(wanted)}, got {got}"
    if rule := next(_broken_rules(value, wanted), ""):
        got = str(len(value)) if isinstance(value, list | tuple) else _show_value(value)
        return f": {rule}, got {got}"
    elements = value if isinstance(value, list | tuple) else ()
    faults = [_find_fault(element, wanted.get("items", {})) for element in elements]
    return next((f"[{number}]{fault}" for number, fault in enumerate(faults) if fault), "")


def _has_type(value: Any, wanted: Schema) -> bool:
    known = _PYTHON_TYPES.get(_kind(wanted))
    if known is None:
        return True
    if isinstance(value, bool) and bool not in known:
        return False
    return isinstance(value, known)


def misfit(value: Schema, wanted: Schema) -> str:
    """Returns the reason a value of one type does not match another type.

    Empty if the types may match.
    """
    value = _plain(value)
    options = [option for option in wanted.get("anyOf", ()) if option.get("type") != "null"]
    if options:
        reasons = [misfit(value, option) for option in options]
        return "" if "" in reasons else reasons[0]
    if "anyOf" in value:
        return next((reason for option in value["anyOf"] if (reason := misfit(option, wanted))), "")
    ours, theirs = _kind(value), _kind(wanted)
    if "any" in (ours, theirs) and not ("const" in value and "enum" in wanted):
        return ""
    if ours != theirs and (ours, theirs) != ("integer", "number") and theirs != "any":
        return f"{_noun(value)} is not {_noun(wanted)}"
    if theirs == "array":
        return misfit(value.get("items", {}), wanted.get("items", {}))
    if "const" not in value:
        return ""
    rule = next(_broken_rules(value["const"], wanted), "")
    return f"{_show_value(value['const'])} {rule}" if rule else ""


def _broken_rules(value: Any, wanted: Schema) -> Iterator[str]:
    """Yields the bounds in a value's type that the value does not meet."""
    if "enum" in wanted and value not in wanted["enum"]:
        known = ", ".join(json.dumps(choice) for choice in wanted["enum"])
        yield f"must be one of {known}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        # NaN is not within any bounds.
        if "minimum" in wanted and not value >= wanted["minimum"]:
            yield f"must be at least {wanted['minimum']}"
        if "maximum" in wanted and not value <= wanted["maximum"]:
            yield f"must be at most {wanted['maximum']}"
    yield from _broken_lengths(value, wanted)


def _broken_lengths(value: Any, wanted: Schema) -> Iterator[str]:
    if isinstance(value, str):
        if len(value) < wanted.get("minLength", 0):
            yield f"must have at least {wanted['minLength']} characters"
        if len(value) > wanted.get("maxLength", len(value)):
            yield f"must be at most {wanted['maxLength']} characters"
    if isinstance(value, list | tuple):
        if len(value) < wanted.get("minItems", 0):
            yield f"must have at least {wanted['minItems']} elements"
        if len(value) > wanted.get("maxItems", len(value)):
            yield f"must have at most {wanted['maxItems']} elements"


def _show_type(schema: Schema) -> Schema:
    """Returns the parts of a type to show to callers."""
    visible = {name: schema[name] for name in _SHOWN if name in schema}
    if "items" in visible:
        visible["items"] = _show_type(visible["items"])
    if "anyOf" in visible:
        visible["anyOf"] = [_show_type(option) for option in visible["anyOf"]]
    if "properties" in visible:
        visible["properties"] = {
            name: _show_type(field) for name, field in visible["properties"].items()
        }
    return visible
