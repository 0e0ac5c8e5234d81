"""Examples of requests and responses in the OpenAPI document.

The keys in examples.json are schema names, methods with a path (such as `GET /v1/hardware`), and
required parameters (such as `{file_id}`). If the media type is not JSON, it follows the path. If a
parameter has a special value on one path, that path precedes the parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources

from api.http.openapi import Described

_JSON = "application/json"


def add_examples(page: Described) -> None:
    """Adds the examples to an OpenAPI document. A schema that already has an example keeps it."""
    text = resources.files("api.http").joinpath("examples.json").read_text(encoding="utf-8")
    examples: Described = json.loads(text)
    schemas = page["components"]["schemas"]
    for name in schemas.keys() & examples.keys():
        schemas[name] = {"example": examples[name]} | schemas[name]
    for path, operations in page["paths"].items():
        for method, operation in operations.items():
            for media_type, body in _bodies(operation):
                key = f"{method.upper()} {path}"
                key += "" if media_type == _JSON else f" {media_type}"
                if key in examples:
                    body["example"] = examples[key]
            for parameter in operation.get("parameters", []):
                name = f"{{{parameter['name']}}}"
                if parameter["in"] == "path" or parameter.get("required"):
                    parameter["example"] = examples.get(f"{path} {name}") or examples[name]


def _bodies(operation: Described) -> Iterator[tuple[str, Described]]:
    yield from operation.get("requestBody", {}).get("content", {}).items()
    for status, reply in operation["responses"].items():
        if status.startswith("2"):
            yield from reply.get("content", {}).items()
