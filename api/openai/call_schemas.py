"""The JSON schema of a forced call, from those of the tools' parameters.

Each tool's schema is embedded as a resource of its own (JSON Schema 2020-12, section 9.3), with an
`$id`. So its references and anchors mean what they meant, and nothing in it is rewritten.

Models make up arguments until their tokens end if a schema lets them. So an object that lists its
properties has no others, unless its schema says so, or other parts of it may add some.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from shared.errors import BadInput

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_JOINED = ("allOf", "anyOf", "oneOf")
_OF_PARTS = (
    *("items", "prefixItems", "contains", "additionalProperties", "unevaluatedItems"),
    *("not", "if", "then", "else"),
)
"""The keywords whose values are schemas. Anything else, such as `const`, only looks like one."""
_MIXED = frozenset({"allOf", "dependentSchemas", "dependencies", "if", "not", "$dynamicRef"})
"""With one of these the properties of an object may be listed in several places."""
_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
_BRANCHES = frozenset({"anyOf", "oneOf", "$ref"})
_SAYS_NOTHING = frozenset({"type", "title", "description", "$schema", "$comment"})
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def call_schema(tools: Sequence[tuple[str, dict[str, Any] | None]]) -> str:
    """Returns the JSON schema, as JSON, of a call of one of these tools.

    Args:
        tools: the name of each, and the schema of its arguments. None: it takes none.

    Raises:
        BadInput: two schemas have the same name.
    """
    forms, parts, named = [], {}, dict[str, Any]()
    for number, (name, given) in enumerate(tools):
        part = _closed(given)
        part.setdefault("$id", f"urn:penstock:tool:{number}")
        for schema, _ in _schemas_in(part):
            place = schema.get("$id")
            if isinstance(place, str) and named.setdefault(place, schema) != schema:
                raise BadInput(f"tools: two schemas have the $id {place[:80]!r}", field="tools")
        parts[name] = part
        forms.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": part["$id"]}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    whole = forms[0] if len(forms) == 1 else {"anyOf": forms}
    return json.dumps({**whole, "$defs": parts})


def _closed(given: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of the arguments of a tool, without room for others."""
    if not given or not given.keys() - _SAYS_NOTHING:
        return dict(_NO_PARAMETERS)
    schema: dict[str, Any] = json.loads(json.dumps(given))
    if "properties" in schema:
        schema.setdefault("type", "object")
    found = list(_schemas_in(schema))
    if not any(_is_mixed(one, is_branch=is_branch) for one, is_branch in found):
        for one, is_branch in found:
            if "properties" in one and not is_branch and not one.keys() & (_OPEN | _BRANCHES):
                one["additionalProperties"] = False
    return schema


def _is_mixed(schema: dict[str, Any], *, is_branch: bool) -> bool:
    """Whether other schemas may add to the properties that this one, or one it names, lists."""
    refers = "$ref" in schema and (is_branch or "properties" in schema)
    return refers or not _MIXED.isdisjoint(schema)


def _schemas_in(schema: Any) -> Iterator[tuple[dict[str, Any], bool]]:
    """All schemas within a schema, and of each whether it is a branch of one with properties."""
    waiting = [(schema, False)]
    while waiting:
        one, is_branch = waiting.pop()
        if not isinstance(one, dict):
            continue
        yield one, is_branch
        for keyword in _BY_NAME:
            if isinstance(named := one.get(keyword), dict):
                waiting += [(part, False) for part in named.values()]
        for keyword in _JOINED:
            if isinstance(joined := one.get(keyword), list):
                waiting += [(part, is_branch or "properties" in one) for part in joined]
        for keyword in _OF_PARTS:
            parts = one.get(keyword)
            waiting += [(part, False) for part in (parts if isinstance(parts, list) else [parts])]
