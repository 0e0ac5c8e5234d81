"""The usage table's schema and the tenants' view of it follow from a row's fields."""

from infra.bigquery import generate
from shared.usage.row import Row


def test_files_are_what_the_fields_of_a_row_give() -> None:
    advice = "run python -m infra.bigquery.generate"
    for table in generate.TABLES:
        schema = generate.FOLDER / f"{table}.schema.json"
        assert schema.read_text(encoding="utf-8") == generate.schema_json(table), advice
    view = generate.FOLDER / "tenant_views" / "rows.sql"
    assert view.read_text(encoding="utf-8") == generate.tenant_view_sql(), advice


def test_field_becomes_a_column() -> None:
    columns = {column["name"]: column for column in generate.columns()}
    assert len(columns) == len(Row.__struct_fields__)
    kinds = {name: (one["type"], one["mode"]) for name, one in columns.items()}
    assert kinds["item"] == ("INTEGER", "REQUIRED")
    assert kinds["received_at"] == ("TIMESTAMP", "REQUIRED")
    assert kinds["cost_usd"] == ("FLOAT", "NULLABLE")
    assert kinds["spot"] == ("BOOLEAN", "NULLABLE")
    assert columns["row_id"]["description"].endswith("written twice has the same row_id.")


def test_tenants_see_only_what_is_shown_to_them() -> None:
    columns = {column["name"] for column in generate.columns()}
    hidden = columns - generate.tenant_columns().keys()
    assert {"tenant", "worker", "api_instance", "region", "gpu_type", "batch_size"} <= hidden
    assert {"request_id", "received_at", "cost_usd", "adapter"} <= columns - hidden
