"""`python -m infra.bigquery.generate` writes the files derived from the columns of `Row`.

They are the schema of the table `rows` and the tenants' view of it. The files are committed because
Terraform reads them. A test checks that they are up to date.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from types import NoneType
from typing import get_args

import msgspec

from shared.usage.row import Row

FOLDER = Path(__file__).parent
_TYPES = {str: "STRING", int: "INTEGER", float: "FLOAT", bool: "BOOLEAN"}
TENANT_COLUMNS = {
    "row_id": "identifies the row",
    "request_id": "one id from HTTP to reply",
    "client_request_id": "the caller's x-request-id",
    "item": "the item's index in the request, from 0",
    "batch_id": "the batch that the item is a line of",
    "flow": "the flow that asked for the item",
    "step": "the id of the flow's step",
    "key_id": "the public part of the API key",
    "plan": "the tenant's plan when the request came",
    "model": "its name in the catalog",
    "revision": "the model's revision",
    "received_at": "when the API received the request; have a filter on it in each query",
    "replied_at": "when the answer was given",
    "status": "succeeded, failed, expired, canceled or refused",
    "error_code": "why the item has no result",
    "cache": "miss, memory, redis, joined or none",
    "priority": "interactive or batch",
    "queue_ms": "from publishing to pulling",
    "batch_wait_ms": "from pulling to the start of the batch",
    "inference_ms": "how long the item's batch ran",
    "total_ms": "from receiving to replying",
    "tokens": "of a text",
    "input_tokens": "tokens that were read",
    "output_tokens": "tokens that were written",
    "cached_tokens": "the part of input_tokens that was not computed again",
    "pixel_steps": "width x height x steps of an image",
    "adapter": "the adapter that an image was drawn with",
    "work": "what an item of a custom model weighs",
    "price_version": "which price of the catalog",
    "list_price_usd": "what the work costs before any share",
    "charged_share": "the part of the price that is charged",
    "cost_usd": "what was charged",
    "user_agent_family": "the kind of client",
}
"""Columns that tenants see, in this order and with these descriptions.

Nothing reveals workers, or other requests in the same batch.
"""
_TENANT_VIEW = """\
-- A tenant's own rows, each once, without what tells of workers and of others in the same batch.
{about}
SELECT
{columns}
FROM `${{project}}.${{dataset}}.rows`
WHERE ${{only}}
QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id \
ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
"""


def columns() -> list[dict[str, str]]:
    about = _texts_below_fields(Row)
    return [_column(field, about[field.name]) for field in msgspec.structs.fields(Row)]


def schema_json() -> str:
    """Returns the schema of the usage table, with one column per line."""
    lines = [json.dumps(column, ensure_ascii=False) for column in columns()]
    return "[\n  " + ",\n  ".join(lines) + "\n]\n"


def tenant_view_sql() -> str:
    """Returns the query of the tenant view of the usage table."""
    known = {column["name"] for column in columns()}
    if unknown := set(TENANT_COLUMNS) - known:
        raise KeyError(f"not columns of rows: {', '.join(sorted(unknown))}")
    about = "\n".join(f"-- column {name}: {text}" for name, text in TENANT_COLUMNS.items())
    selected = ",\n".join(f"  {name}" for name in TENANT_COLUMNS)
    return _TENANT_VIEW.format(about=about, columns=selected)


def _column(field: msgspec.structs.FieldInfo, about: str) -> dict[str, str]:
    kinds = [kind for kind in get_args(field.type) or (field.type,) if kind is not NoneType]
    is_time = field.name.endswith("_at_s")
    return {
        "name": field.name.removesuffix("_s") if is_time else field.name,
        "type": "TIMESTAMP" if is_time else _TYPES[kinds[0]],
        "mode": "REQUIRED" if field.required else "NULLABLE",
        "description": about,
    }


def _texts_below_fields(kind: type) -> dict[str, str]:
    """Returns the text below each field of a class in its source, joined into one line."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef), "the source of a class is a class; this is a bug"
    texts = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(below, ast.Expr), f"{field.target.id} has no text below it"
            assert isinstance(below.value, ast.Constant), f"{field.target.id} has no text below it"
            texts[field.target.id] = " ".join(str(below.value.value).split())
    return texts


def main() -> None:
    (FOLDER / "rows.schema.json").write_text(schema_json(), encoding="utf-8")
    (FOLDER / "tenant_views" / "rows.sql").write_text(tenant_view_sql(), encoding="utf-8")


if __name__ == "__main__":
    main()
