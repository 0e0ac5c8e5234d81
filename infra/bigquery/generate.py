"""`python -m infra.bigquery.generate` writes the files derived from the fields of row types.

These files are the schemas of the `rows` and `worker_starts` tables, and the tenants' view of
`rows`. The files are committed because Terraform reads them. A test checks that they are up to
date.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from types import NoneType
from typing import Annotated, get_args, get_origin

import msgspec

from shared.usage.row import Row
from shared.usage.worker_start import WorkerStart

FOLDER = Path(__file__).parent
TABLES: dict[str, type[msgspec.Struct]] = {"rows": Row, "worker_starts": WorkerStart}
"""The tables whose schemas are generated, and their row types."""
_TYPES = {str: "STRING", int: "INTEGER", float: "FLOAT", bool: "BOOLEAN"}
_TENANT_VIEW = """\
-- A tenant's own rows, without duplicates and without data about workers and other tenants.
{about}
SELECT
{columns}
FROM `${{project}}.${{dataset}}.rows`
WHERE ${{only}}
QUALIFY ROW_NUMBER() OVER (PARTITION BY received_at, row_id \
ORDER BY status = 'succeeded', attempt DESC, replied_at DESC) = 1
"""


def columns(table: str = "rows") -> list[dict[str, str]]:
    kind = TABLES[table]
    about = _texts_below_fields(kind)
    return [_column(field, about[field.name]) for field in msgspec.structs.fields(kind)]


def schema_json(table: str) -> str:
    """Returns the schema of a table, with one column per line."""
    lines = [json.dumps(column, ensure_ascii=False) for column in columns(table)]
    return "[\n  " + ",\n  ".join(lines) + "\n]\n"


def tenant_columns() -> dict[str, str]:
    """Returns the columns that tenants see, with their descriptions."""
    visible = (get_origin(field.type) is Annotated for field in msgspec.structs.fields(Row))
    return {
        column["name"]: column["description"]
        for column, is_visible in zip(columns(), visible, strict=True)
        if is_visible
    }


def tenant_view_sql() -> str:
    """Returns the query for the usage table's tenant view."""
    visible = tenant_columns()
    about = "\n".join(f"-- column {name}: {text}" for name, text in visible.items())
    selected = ",\n".join(f"  {name}" for name in visible)
    return _TENANT_VIEW.format(about=about, columns=selected)


def _column(field: msgspec.structs.FieldInfo, about: str) -> dict[str, str]:
    declared = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
    kinds = [kind for kind in get_args(declared) or (declared,) if kind is not NoneType]
    is_time = field.name.endswith("_at_s")
    return {
        "name": field.encode_name,
        "type": "TIMESTAMP" if is_time else _TYPES[kinds[0]],
        "mode": "REQUIRED" if field.required else "NULLABLE",
        "description": about,
    }


def _texts_below_fields(kind: type) -> dict[str, str]:
    """Returns the text below each field in a class's source, joined into one line."""
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
    for table in TABLES:
        (FOLDER / f"{table}.schema.json").write_text(schema_json(table), encoding="utf-8")
    (FOLDER / "tenant_views" / "rows.sql").write_text(tenant_view_sql(), encoding="utf-8")


if __name__ == "__main__":
    main()
