"""`python -m tests.api.endpoint_page` writes docs/reference/endpoints.md."""

import asyncio
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.api.harness import running_api, settings_for

PAGE = Path("docs/reference/endpoints.md")
HEAD = """# Endpoints

For client developers: each endpoint with a request, a reply and its errors. This page is generated
from the OpenAPI document, which also describes all fields: view it at `/docs`. [api.md](api.md)
explains headers, limits and formats.

Each request needs a key, except for `/livez`, `/readyz`, `/health`, `/healthz` and signed links. An
endpoint that needs a key can also return a 401, 403, 431, or 503. For a text/event-stream, one of
its events is shown.
"""
USUAL_ERRORS = {"401", "403", "431", "503"}
MAX_CHARS = 100
_JSON = "application/json"


def write_page(page: dict[str, Any]) -> str:
    """The Markdown page for an OpenAPI document."""
    parts = [HEAD]
    for group in page["tags"]:
        parts.append(f"\n## {group['name'].capitalize()}\n")
        for path, operations in page["paths"].items():
            for method, operation in operations.items():
                if group["name"] in operation["tags"]:
                    parts += _endpoint(method.upper(), path, operation, page)
    text = "\n".join([*parts, *_errors(page)])
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _endpoint(
    method: str, path: str, operation: dict[str, Any], page: dict[str, Any]
) -> Iterator[str]:
    yield f"\n### {operation['summary']}\n"
    yield f"`{method} {_address(path, operation)}`\n"
    for media_type, body in operation.get("requestBody", {}).get("content", {}).items():
        yield from _block("Request", media_type, example_of(body, page))
    statuses = operation["responses"]
    for status, response in statuses.items():
        if status < "300":
            yield from _reply(status, response, page)
    errors = {status for status in statuses if status >= "400"}
    if errors >= USUAL_ERRORS:
        errors -= USUAL_ERRORS
    if errors:
        yield f"Errors: {', '.join(sorted(errors))}."


def _address(path: str, operation: dict[str, Any]) -> str:
    query = {}
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", str(parameter["example"]))
        elif parameter["in"] == "query" and parameter.get("required"):
            query[parameter["name"]] = parameter["example"]
    return f"{path}?{urlencode(query)}" if query else path


def _reply(status: str, response: dict[str, Any], page: dict[str, Any]) -> Iterator[str]:
    contents = response.get("content", {})
    binary = [kind for kind, body in contents.items() if body["schema"].get("format") == "binary"]
    texts = {kind: body for kind, body in contents.items() if kind not in binary}
    if not contents:
        yield f"Reply {status}: no body.\n"
    if binary:
        yield f"Reply {status}: the bytes ({', '.join(binary)}).\n"
    for media_type, body in texts.items():
        yield from _block(f"Reply {status}", media_type, example_of(body, page))


def _block(title: str, media_type: str, example: Any) -> Iterator[str]:
    kind = "" if media_type == _JSON else f" ({media_type})"
    yield f"{title}{kind}:\n\n```json\n{_dump(example)}\n```\n"


def _dump(value: Any, indent: int = 0) -> str:
    """JSON with each short value on one line."""
    text = json.dumps(value)
    if len(text) + indent <= MAX_CHARS or not value or not isinstance(value, dict | list):
        return text
    inner = " " * (indent + 2)
    if isinstance(value, dict):
        parts = [
            f"{inner}{json.dumps(key)}: {_dump(part, indent + 2)}" for key, part in value.items()
        ]
    else:
        parts = [f"{inner}{_dump(part, indent + 2)}" for part in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return "\n".join((first, ",\n".join(parts), " " * indent + last))


def _errors(page: dict[str, Any]) -> list[str]:
    lines = ["\n## Errors\n", "| status | |", "|---|---|"]
    abouts: dict[str, str] = {}
    for operations in page["paths"].values():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if status >= "400" and "description" in response:
                    abouts.setdefault(status, response["description"])
    too_large = page["components"]["responses"]["HeadTooLarge"]["description"]
    lines += [
        f"| {status} | {text} |" for status, text in sorted((abouts | {"431": too_large}).items())
    ]
    schemas = page["components"]["schemas"]
    for name, api in (
        ("ErrorReply", "OpenAI's endpoints and ours"),
        ("Problem", "Replicate's endpoints"),
        ("AnthropicErrorReply", "`/v1/messages`"),
        ("OcrErrorReply", "`/v1/ocr`"),
    ):
        lines.append("\n".join(_block(f"\nAn error from {api}", _JSON, schemas[name]["example"])))
    return lines


def example_of(body: dict[str, Any], page: dict[str, Any]) -> Any:
    """The example for a body or its schema. None: there is no example."""
    if "example" in body:
        return body["example"]
    schema = body.get("schema", body)
    if "$ref" in schema:
        return example_of(page["components"]["schemas"][schema["$ref"].rpartition("/")[2]], page)
    for option in (*schema.get("oneOf", ()), *schema.get("anyOf", ())):
        return example_of({"schema": option}, page)
    return None


async def read_document() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        async with running_api(settings_for(Path(folder))) as api:
            document: dict[str, Any] = (await api.http.get("/openapi.json")).json()
            return document


if __name__ == "__main__":
    PAGE.write_text(write_page(asyncio.run(read_document())), encoding="utf-8")
