"""A flow as declared in the catalog: its steps, the references between them, and conditions.

These rules do not need a broker or a store. The API stores a flow's plan with each run, so a run
finishes with the plan it started with.

A reference is `$name` followed by fields: `$input.document`, `$pages`, `$read.text`, `$item`.
Accessing a field on a list yields a list of that field's value in each element. If `for_each` has
several parallel lists, `$item.name` is an element from one of them. Text that begins with `$$`
stands for the same text with a single `$`. A condition compares two operands: `$check.flagged ==
false`.
"""

from __future__ import annotations

import graphlib
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shared.errors import BadInput
from shared.models.blob import FILE_FORMAT

MAX_STEPS = 16
MAX_STEP_ITEMS = 1000
"""Maximum number of items in a step. Item `i` of step `s` has the index s * MAX_STEP_ITEMS + i."""
MAX_RETRIES = 5
INPUT, ITEM = "input", "item"
TYPES: Mapping[str, Mapping[str, Any]] = {
    "file": {"type": "string", "format": FILE_FORMAT},
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "object": {"type": "object"},
    "any": {},
}
"""One-word input types, as JSON Schema."""
_REFERENCE = re.compile(r"\$([a-z][a-z0-9_]*)((?:\.[A-Za-z_][A-Za-z0-9_]*)*)")
_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(
    r"\s*(?P<left>\"(?:[^\"\\]|\\.)*\"|[^\s\"=!<>]+)\s*(?P<operator>==|!=|<=|>=|<|>)\s*"
    r"(?P<right>\"(?:[^\"\\]|\\.)*\"|[^\s\"=!<>]+)\s*"
)

FieldName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Missing:
    """The type of MISSING, which is the value of anything that was skipped."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = Missing()


class Reference(NamedTuple):
    """A reference to an input, a step's output, or the current `for_each` item."""

    name: str
    fields: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join((f"${self.name}", *self.fields))

    def in_scope(self, scope: Mapping[str, Any]) -> Any:
        """Returns the value of the reference in this scope.

        Raises:
            BadInput: the field does not exist.
        """
        value = scope[self.name]
        for field in self.fields:
            value = self._field(value, field)
        return value

    def _field(self, value: Any, field: str) -> Any:
        if value is MISSING or value is None:
            return value
        if isinstance(value, list):
            return [self._field(element, field) for element in value]
        if isinstance(value, Mapping) and field in value:
            return value[field]
        raise NoSuchField(self, field)


class NoSuchField(BadInput):
    """The value does not have this field."""

    def __init__(self, reference: Reference, name: str) -> None:
        super().__init__(f"{reference}: the value has no field {name!r}")
        self.reference = reference


class Condition(NamedTuple):
    """A comparison of two operands. Each is a reference or a literal."""

    left: Any
    operator: str
    right: Any

    def holds(self, scope: Mapping[str, Any]) -> bool:
        """Returns whether the condition is true. A skipped value equals null and can't be ordered.

        Raises:
            BadInput: the two values can't be ordered.
        """
        left, right = (
            operand.in_scope(scope) if isinstance(operand, Reference) else operand
            for operand in (self.left, self.right)
        )
        left, right = (None if operand is MISSING else operand for operand in (left, right))
        if self.operator in ("==", "!="):
            # In Python, True equals 1.
            same_kind = isinstance(left, bool) == isinstance(right, bool)
            return (same_kind and left == right) == (self.operator == "==")
        if left is None or right is None:
            return False
        if not _have_order(left, right):
            raise BadInput(f"{self}: the two values can't be ordered")
        return _OPERATORS[self.operator](left, right)

    def __str__(self) -> str:
        texts = (
            str(operand) if isinstance(operand, Reference) else json.dumps(operand)
            for operand in (self.left, self.right)
        )
        return f" {self.operator} ".join(texts)

    @property
    def references(self) -> list[Reference]:
        return [operand for operand in (self.left, self.right) if isinstance(operand, Reference)]


def _have_order(left: Any, right: Any) -> bool:
    if isinstance(left, bool) or isinstance(right, bool):
        return False
    are_numbers = isinstance(left, int | float) and isinstance(right, int | float)
    return are_numbers or (isinstance(left, str) and isinstance(right, str))


def parse_reference(text: str) -> Reference:
    """Parses a reference.

    Raises:
        ValueError: the text is not a reference.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text[:80]!r} is not a reference (for example, $input.x, $step.field or $item); "
            "to start text with a literal $, write $$"
        )
    return Reference(match[1], tuple(match[2].split(".")[1:]))


@lru_cache(maxsize=1024)
def parse_condition(text: str) -> Condition:
    """Parses a condition.

    Raises:
        ValueError: the text is not a condition.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text[:80]!r} is not a condition, such as $check.flagged == false; write two "
            "operands separated by ==, !=, <, <=, > or >="
        )
    return Condition(_operand(match["left"]), match["operator"], _operand(match["right"]))


def _operand(text: str) -> Any:
    if text.startswith("$"):
        return parse_reference(text)
    try:
        literal = json.loads(text)
    except ValueError:
        literal = MISSING
    if isinstance(literal, str | int | float | bool | None):
        return literal
    raise ValueError(
        f'{text[:80]!r} is neither a reference nor a literal such as 1.5, "text", true, '
        "false or null"
    )


def references_in(value: Any) -> Iterator[Reference]:
    """Yields the references in a value, at any depth.

    Raises:
        ValueError: a string begins with `$` but is not a reference.
    """
    if isinstance(value, str):
        if value.startswith("$") and not value.startswith("$$"):
            yield parse_reference(value)
    elif isinstance(value, Mapping):
        for element in value.values():
            yield from references_in(element)
    elif isinstance(value, list | tuple):
        for element in value:
            yield from references_in(element)


def input_named(references: Sequence[Reference]) -> str | None:
    """Returns the flow input that all of the references refer to.

    Returns `input` if they refer to several, and None if not all of them are flow inputs.
    """
    if not references or any(reference.name != INPUT for reference in references):
        return None
    names = {".".join(reference.fields) for reference in references}
    return (names.pop() if len(names) == 1 else "") or INPUT


def lists_in(for_each: str | Mapping[str, str] | None) -> dict[str, str]:
    """Returns a `for_each`'s references, keyed by list name. A single list is named ""."""
    if for_each is None:
        return {}
    return {"": for_each} if isinstance(for_each, str) else dict(for_each)


def resolve(value: Any, scope: Mapping[str, Any]) -> Any:
    """Returns a value with its references replaced by their values.

    Returns MISSING if any of those values was skipped.

    Raises:
        BadInput: a reference has no value.
    """
    if isinstance(value, str):
        if value.startswith("$$"):
            return value[1:]
        return parse_reference(value).in_scope(scope) if value.startswith("$") else value
    if isinstance(value, Mapping):
        fields = {name: resolve(field, scope) for name, field in value.items()}
        return MISSING if any(field is MISSING for field in fields.values()) else fields
    if isinstance(value, list | tuple):
        elements = [resolve(element, scope) for element in value]
        return MISSING if any(element is MISSING for element in elements) else elements
    return value


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FlowStep(_Part):
    """A step: a model and its input, for one item or for each item of a list."""

    id: str = Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")
    """The name used in references."""
    model: str
    """A model's name in the catalog, or an alias."""
    input: dict[str, Any]
    """The model's input: literals and references, at any depth."""
    for_each: str | Annotated[dict[FieldName, str], Field(min_length=1)] | None = None
    """A reference to a list.

    The step has one item per element, referred to as `$item`. Alternatively, several named lists of
    equal length, in which case `$item.name` is an element from one of them.
    """
    when: str | None = None
    """A condition. If the condition is false, the step or item is skipped."""
    default: Any = None
    """The value to use if the step fails or is skipped. Without a default, the flow fails if the
    step does, and a skipped step is null.
    """
    retries: int = Field(0, ge=0, le=MAX_RETRIES)
    """How many times to retry a failed item."""
    max_items: int = Field(MAX_STEP_ITEMS, ge=1, le=MAX_STEP_ITEMS)
    """Maximum number of elements in the list."""

    @field_validator("id")
    @classmethod
    def _is_no_word_of_ours(cls, value: str) -> str:
        if value in (INPUT, ITEM):
            raise ValueError(f"{value!r} has a special meaning in references; use a different id")
        return value

    @field_validator("when")
    @classmethod
    def _is_a_condition(cls, value: str | None) -> str | None:
        if value is not None:
            parse_condition(value)
        return value

    @field_validator("for_each")
    @classmethod
    def _has_references(cls, value: str | dict[str, str] | None) -> str | dict[str, str] | None:
        for text in lists_in(value).values():
            parse_reference(text)
        return value

    @field_validator("input", "default")
    @classmethod
    def _has_whole_references(cls, value: Any) -> Any:
        list(references_in(value))
        return value

    @model_validator(mode="after")
    def _items_are_of_lists(self) -> Self:
        if self.for_each is None:
            if any(reference.name == ITEM for reference in self.references):
                raise ValueError("$item: is only available in steps with for_each")
            if "max_items" in self.model_fields_set:
                raise ValueError("max_items: requires for_each; omit it otherwise")
        elif any(reference.name == ITEM for reference in self.lists.values()):
            raise ValueError("for_each: can't refer to $item, which is an element of this list")
        elif isinstance(self.for_each, dict):
            for reference in self.references:
                if reference.name == ITEM and reference.fields[:1] not in {
                    (name,) for name in self.for_each
                }:
                    known = ", ".join(f"$item.{name}" for name in self.for_each)
                    raise ValueError(
                        f"{reference}: must name an element of one of the lists: {known}"
                    )
        return self

    @property
    def lists(self) -> dict[str, Reference]:
        """The lists that the step iterates over, keyed by name. A single list is named ""."""
        return {name: parse_reference(text) for name, text in lists_in(self.for_each).items()}

    @property
    def has_default(self) -> bool:
        """Returns whether a default is declared. The default may be null."""
        return "default" in self.model_fields_set

    @property
    def condition(self) -> Condition | None:
        """The step's condition, or None if the step always runs."""
        return None if self.when is None else parse_condition(self.when)

    @property
    def references(self) -> list[Reference]:
        lists = self.lists.values()
        conditions = [] if self.condition is None else self.condition.references
        return [*lists, *conditions, *references_in(self.input), *references_in(self.default)]

    def origins_of(self, name: str, position: int) -> list[Reference]:
        """Returns where a model input's value comes from.

        Args:
            name: input name. `input` means all inputs, unless an input has that name.
            position: the item's position. `$item` is the element at this position in its list:
                `$input.documents.3`.
        """
        value = self.input.get(name, self.input if name == INPUT else None)
        return [self.origin_of(reference, position) for reference in references_in(value)]

    def origin_of(self, reference: Reference, position: int) -> Reference:
        """Returns the list element that `$item` refers to, or the reference itself."""
        if reference.name != ITEM:
            return reference
        name, fields = "", reference.fields
        if isinstance(self.for_each, dict):
            name, fields = fields[0], fields[1:]
        elements = self.lists[name]
        return elements._replace(fields=(*elements.fields, str(position), *fields))

    @property
    def depends_on(self) -> frozenset[str]:
        """IDs of steps that must finish first."""
        return frozenset(reference.name for reference in self.references) - {INPUT, ITEM}


class FlowPlan(_Part):
    """A flow's inputs, steps, and output."""

    input: dict[FieldName, Any] = {}
    """Each input's type: a word from TYPES, a list containing one such word, or JSON Schema."""
    steps: tuple[FlowStep, ...] = Field(min_length=1, max_length=MAX_STEPS)
    output: Any
    """The flow's output: literals and references."""
    gives: Literal["images"] | None = None
    """`images`: the flow was created for an image request, and returns images
    (shared/models/after_image.py).
    """

    @field_validator("input")
    @classmethod
    def _types_are_known(cls, value: dict[str, Any]) -> dict[str, Any]:
        return {name: _type_of(name, written) for name, written in value.items()}

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        ids = [step.id for step in self.steps]
        for number, step in enumerate(self.steps):
            if step.id in ids[:number]:
                raise ValueError(f"steps.{number}.id: {step.id!r} is already used by another step")
            for reference in step.references:
                if reference.name not in (INPUT, ITEM, *ids):
                    raise ValueError(
                        f"steps.{number}: {reference}: step {reference.name!r} does not exist"
                    )
        for reference in references_in(self.output):
            if reference.name not in (INPUT, *ids):
                raise ValueError(f"output: {reference}: step {reference.name!r} does not exist")
        self.order()
        return self

    def order(self) -> list[int]:
        """Returns the step numbers in order, each after the steps it depends on.

        Raises:
            ValueError: the steps have a circular dependency.
        """
        numbers = {step.id: number for number, step in enumerate(self.steps)}
        graph = {step.id: sorted(step.depends_on, key=numbers.__getitem__) for step in self.steps}
        try:
            return [
                numbers[step_id] for step_id in graphlib.TopologicalSorter(graph).static_order()
            ]
        except graphlib.CycleError as error:
            circle = " -> ".join(reversed(error.args[1]))
            raise ValueError(f"steps: circular dependency: {circle}") from error

    @property
    def input_schema(self) -> dict[str, Any]:
        """JSON Schema for the object with all inputs, as in a class's penstock.schema.json."""
        required = [name for name, shape in self.input.items() if "default" not in shape]
        properties = {
            name: {"title": name.replace("_", " ").capitalize(), "x-order": number} | shape
            for number, (name, shape) in enumerate(self.input.items())
        }
        schema = {"type": "object", "title": "Input", "properties": properties}
        return schema | ({"required": required} if required else {})

    def as_json(self) -> dict[str, Any]:
        """The plan in the form stored in a record."""
        return self.model_dump(mode="json", exclude_unset=True)


def _type_of(name: str, written: Any) -> dict[str, Any]:
    """Returns an input's JSON Schema.

    Raises:
        ValueError: the type is invalid.
    """
    if isinstance(written, str) and written in TYPES:
        return dict(TYPES[written])
    if isinstance(written, list) and len(written) == 1:
        element = written[0]
        if isinstance(element, str) and element in TYPES:
            return {"type": "array", "items": dict(TYPES[element])}
    if isinstance(written, Mapping) and ("type" in written or not written):
        return dict(written)  # an empty type means `any` in a plan that has already been read
    raise ValueError(
        f"{name}: {written!r} is not a type; use one of {', '.join(TYPES)}, a list "
        "containing one of them (for a list of values), or a JSON Schema with a type"
    )


def index_of(step: int, position: int) -> int:
    """Returns an item's index in its run.

    Args:
        position: the item's position within the step.
    """
    return step * MAX_STEP_ITEMS + position


def step_of(index: int) -> int:
    """Returns the number of the step that a run's item belongs to."""
    return index // MAX_STEP_ITEMS


def plan_step(step: FlowStep, scope: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Returns a step's item inputs, keyed by position. Missing items are skipped.

    Raises:
        BadInput: a value does not match the step.
    """
    inputs = {}
    for position, own_scope in enumerate(_scopes(step, scope)):
        try:
            item_input = _item_input(step, own_scope)
        except NoSuchField as error:
            if (own := input_named([step.origin_of(error.reference, position)])) is None:
                raise
            raise BadInput(f"{own}: is missing", field=own) from error
        if item_input is not None:
            inputs[position] = item_input
    return inputs


def _scopes(step: FlowStep, scope: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the scope for each of a step's items.

    Raises:
        BadInput: a value of for_each is not a list, or is too long.
    """
    if step.for_each is None:
        return [scope]
    lists = {}
    for name, reference in step.lists.items():
        elements = reference.in_scope(scope)
        if elements is MISSING or elements is None:
            return []
        if not isinstance(elements, list):
            raise BadInput(f"for_each: {reference} must be a list")
        if len(elements) > step.max_items:
            elements_text = (
                f"{len(elements)} elements, which exceeds the maximum of {step.max_items}"
            )
            if (own := input_named([reference])) is not None:
                raise BadInput(f"{own}: {elements_text}", field=own)
            raise BadInput(f"for_each: {reference} has {elements_text}")
        lists[name] = [MISSING if element is None else element for element in elements]
    if len({len(elements) for elements in lists.values()}) > 1:
        raise BadInput("for_each: its lists must all have the same length")
    if isinstance(step.for_each, str):
        return [{**scope, ITEM: element} for element in lists[""]]
    rows = zip(*lists.values(), strict=True)
    return [{**scope, ITEM: dict(zip(lists, row, strict=True))} for row in rows]


def _item_input(step: FlowStep, scope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns one item's input, or None if the item is skipped."""
    if step.condition is not None and not step.condition.holds(scope):
        return None
    values = resolve(step.input, scope)
    return None if values is MISSING else values


def value_of(step: FlowStep, results: Mapping[int, Any], scope: Mapping[str, Any]) -> Any:
    """Returns a finished step's value.

    Args:
        results: values of the step's items, keyed by position. Failed and skipped items are absent.
    """
    values = [
        results[position]
        if position in results
        else resolve(step.default, own_scope)
        if step.has_default
        else MISSING
        for position, own_scope in enumerate(_scopes(step, scope))
    ]
    return values[0] if step.for_each is None else [replace_missing(value) for value in values]


def replace_missing(value: Any) -> Any:
    """Returns a value with skipped parts replaced by null."""
    return None if value is MISSING else value


def output_of(plan: FlowPlan, scope: Mapping[str, Any]) -> Any:
    """Returns a flow's output, with null for skipped parts.

    Raises:
        BadInput: a reference has no value.
    """
    return _with_nulls(plan.output, scope)


def _with_nulls(value: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {name: _with_nulls(field, scope) for name, field in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(element, scope) for element in value]
    return replace_missing(resolve(value, scope))
