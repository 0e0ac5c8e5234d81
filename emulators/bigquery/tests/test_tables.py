"""Creating, reading, changing, and deleting tables and views with Google's client."""

import pytest
from google.api_core.exceptions import (
    BadRequest,
    Conflict,
    MethodNotImplemented,
    NotFound,
    PreconditionFailed,
)
from google.cloud import bigquery
from google.cloud.bigquery import SchemaField

from tests.connecting import rows_of

SCHEMA = [
    SchemaField("id", "INTEGER", "REQUIRED", description="who"),
    SchemaField("at", "TIMESTAMP"),
    SchemaField("tags", "STRING", "REPEATED"),
    SchemaField(
        "part",
        "RECORD",
        fields=[SchemaField("x", "FLOAT"), SchemaField("ys", "INTEGER", "REPEATED")],
    ),
]


def table(client: bigquery.Client, name: str = "t") -> bigquery.Table:
    return bigquery.Table(f"{client.project}.d.{name}", SCHEMA)


@pytest.mark.usefixtures("dataset")
def test_a_table_keeps_what_it_was_made_with(client: bigquery.Client) -> None:
    made = table(client)
    made.time_partitioning = bigquery.TimePartitioning(field="at", expiration_ms=86_400_000)
    made.clustering_fields, made.require_partition_filter = ["id"], True
    made.description, made.labels = "things", {"kind": "test"}
    client.create_table(made)
    stored = client.get_table(made)
    assert stored.schema == SCHEMA
    assert (stored.time_partitioning.type_, stored.time_partitioning.field) == ("DAY", "at")
    assert stored.time_partitioning.expiration_ms == 86_400_000
    assert (stored.clustering_fields, stored.require_partition_filter) == (["id"], True)
    assert (stored.description, stored.labels) == ("things", {"kind": "test"})
    assert (stored.num_rows, stored.num_bytes, stored.table_type) == (0, 0, "TABLE")


@pytest.mark.usefixtures("dataset")
def test_rows_and_bytes_are_counted(client: bigquery.Client) -> None:
    client.create_table(table(client))
    client.insert_rows_json("d.t", [{"id": 1, "at": 0, "tags": ["ab"]}, {"id": 2}])
    stored = client.get_table("d.t")
    assert stored.num_rows == 2
    assert stored.num_bytes is not None
    assert stored.num_bytes >= 2 * 8 + 8


@pytest.mark.usefixtures("dataset")
def test_tables_are_listed_and_removed(client: bigquery.Client) -> None:
    for name in ("b", "a", "c"):
        client.create_table(table(client, name))
    pages = [
        [item.table_id for item in page] for page in client.list_tables("d", page_size=2).pages
    ]
    assert pages == [["a", "b"], ["c"]]
    client.delete_table("d.b")
    client.delete_table("d.b", not_found_ok=True)
    with pytest.raises(NotFound, match=rf"Not found: Table {client.project}:d\.b"):
        client.delete_table("d.b")
    with pytest.raises(NotFound, match="Dataset"):
        client.get_table("nowhere.t")
    with pytest.raises(Conflict, match="Already Exists: Table"):
        client.create_table(table(client, "a"))


@pytest.mark.usefixtures("dataset")
def test_names_tell_upper_from_lower_case(client: bigquery.Client) -> None:
    client.create_table(table(client, "Rows"))
    client.create_table(table(client, "rows"))
    client.insert_rows_json("d.Rows", [{"id": 1}])
    assert rows_of(client, "SELECT COUNT(*) FROM d.Rows") == [(1,)]
    assert rows_of(client, "SELECT COUNT(*) FROM d.rows") == [(0,)]


@pytest.mark.usefixtures("dataset")
def test_a_schema_may_widen_while_rows_are_there(client: bigquery.Client) -> None:
    client.create_table(table(client))
    client.insert_rows_json("d.t", [{"id": 1, "part": {"x": 1.5}}])
    stored = client.get_table("d.t")
    part = SchemaField("part", "RECORD", fields=[*SCHEMA[3].fields, SchemaField("note", "STRING")])
    relaxed = SchemaField("id", "INT64", "NULLABLE")
    stored.schema = [relaxed, *SCHEMA[1:3], part, SchemaField("more", "STRING", "REPEATED")]
    client.update_table(stored, ["schema"])
    assert client.insert_rows_json("d.t", [{"part": {"note": "n"}, "more": ["m"]}]) == []
    rows = rows_of(client, "SELECT id, part.x, part.note, more FROM d.t ORDER BY id DESC")
    assert rows == [(1, 1.5, None, []), (None, None, "n", ["m"])]


@pytest.mark.usefixtures("dataset")
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (SCHEMA[1:], "Field id is missing in new schema"),
        (
            [SchemaField("id", "STRING", "REQUIRED"), *SCHEMA[1:]],
            "changed type from INTEGER to STRING",
        ),
        ([*SCHEMA, SchemaField("more", "STRING", "REQUIRED")], "Cannot add required field more"),
        ([SCHEMA[0], SchemaField("at", "TIMESTAMP", "REQUIRED"), *SCHEMA[2:]], "changed mode"),
    ],
)
def test_a_schema_may_not_narrow(
    client: bigquery.Client, schema: list[SchemaField], message: str
) -> None:
    created = client.create_table(table(client))
    created.schema = schema
    with pytest.raises(BadRequest, match=message):
        client.update_table(created, ["schema"])


@pytest.mark.usefixtures("dataset")
def test_settings_change_alone(client: bigquery.Client) -> None:
    created = client.create_table(table(client))
    created.description, created.labels = "new", {"a": "b"}
    client.update_table(created, ["description", "labels"])
    changed = client.get_table("d.t")
    assert (changed.description, changed.labels, changed.schema) == ("new", {"a": "b"}, SCHEMA)
    with pytest.raises(PreconditionFailed):
        client.update_table(created, ["description"])


@pytest.mark.usefixtures("dataset")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"time_partitioning": bigquery.TimePartitioning(field="id")},
            "can only be of type DATE, TIMESTAMP",
        ),
        (
            {"time_partitioning": bigquery.TimePartitioning(field="none")},
            "cannot be found in the schema",
        ),
        ({"clustering_fields": ["part"]}, "clustering cannot be found"),
        ({"clustering_fields": ["id"] * 5}, "requires one to four"),
        ({"schema": [SchemaField("a b", "STRING")]}, "Invalid field name"),
        (
            {"schema": [SchemaField("a", "STRING"), SchemaField("A", "STRING")]},
            "already exists in schema",
        ),
        ({"schema": [SchemaField("a", "RECORD")]}, "has no schema"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(
    client: bigquery.Client, changes: dict[str, object], message: str
) -> None:
    wanted = table(client)
    for name, value in changes.items():
        setattr(wanted, name, value)
    with pytest.raises(BadRequest, match=message):
        client.create_table(wanted)


@pytest.mark.usefixtures("dataset")
@pytest.mark.parametrize("kind", ["GEOGRAPHY", "BIGNUMERIC", "INTERVAL"])
def test_a_type_that_is_not_kept_is_said_so(client: bigquery.Client, kind: str) -> None:
    with pytest.raises(MethodNotImplemented, match=f"type {kind} is not supported"):
        client.create_table(bigquery.Table(f"{client.project}.d.t", [SchemaField("a", kind)]))


@pytest.mark.usefixtures("dataset")
def test_a_view_is_read_through_and_follows_its_table(client: bigquery.Client) -> None:
    client.create_table(table(client))
    view = bigquery.Table(f"{client.project}.d.v")
    view.view_query = "SELECT id, ARRAY_LENGTH(tags) AS tags FROM `d.t` WHERE id > 1"
    client.create_table(view)
    client.insert_rows_json("d.t", [{"id": 1}, {"id": 2, "tags": ["a", "b"]}])
    stored = client.get_table("d.v")
    assert (stored.table_type, [(field.name, field.field_type) for field in stored.schema]) == (
        "VIEW",
        [("id", "INTEGER"), ("tags", "INTEGER")],
    )
    assert rows_of(client, "SELECT * FROM d.v") == [(2, 2)]
    stored.view_query = "SELECT id FROM d.t"
    client.update_table(stored, ["view_query"])
    assert rows_of(client, "SELECT v.id FROM d.v ORDER BY id") == [(1,), (2,)]
    with pytest.raises(BadRequest, match="view"):
        client.insert_rows_json("d.v", [{"id": 1}])


@pytest.mark.usefixtures("dataset")
def test_a_view_of_nothing_is_refused(client: bigquery.Client) -> None:
    view = bigquery.Table(f"{client.project}.d.v")
    view.view_query = "SELECT a FROM d.missing"
    with pytest.raises(NotFound, match="missing"):
        client.create_table(view)


@pytest.mark.usefixtures("dataset")
def test_pages_of_rows_come_in_order_from_anywhere(client: bigquery.Client) -> None:
    created = client.create_table(table(client))
    client.insert_rows_json("d.t", [{"id": number, "tags": ["x"]} for number in range(25)])
    assert [row["id"] for row in client.list_rows(created, page_size=10)] == list(range(25))
    assert [row["id"] for row in client.list_rows(created, start_index=20, max_results=3)] == [
        20,
        21,
        22,
    ]
    (row,) = client.list_rows(created, selected_fields=[SCHEMA[2]], max_results=1)
    assert row.values() == (["x"],)


@pytest.mark.usefixtures("dataset")
def test_a_table_without_fields_takes_its_first_ones_later(client: bigquery.Client) -> None:
    name = f"{client.project}.d.bare"
    client.create_table(bigquery.Table(name))
    table = client.get_table(name)
    assert (table.schema, table.num_rows, list(client.list_rows(table))) == ([], 0, [])
    with pytest.raises(BadRequest, match="does not have a schema"):
        client.query("SELECT * FROM d.bare").result()
    table.schema = [SchemaField("a", "INT64", "REQUIRED")]
    client.update_table(table, ["schema"])
    assert client.insert_rows_json(name, [{"a": 1}]) == []
    assert [row["a"] for row in client.list_rows(name)] == [1]
    client.create_table(bigquery.Table(f"{name}2"))
    config = bigquery.QueryJobConfig(destination=f"{name}2", write_disposition="WRITE_APPEND")
    client.query("SELECT 1 AS b", job_config=config).result()
    assert [row["b"] for row in client.list_rows(f"{name}2")] == [1]


@pytest.mark.usefixtures("dataset")
def test_a_table_stays_a_table(client: bigquery.Client) -> None:
    table = bigquery.Table(f"{client.project}.d.t", [SchemaField("a", "INT64")])
    table = client.create_table(table)
    table.view_query = "SELECT 1 AS a"
    with pytest.raises(BadRequest, match="Invalid value for view"):
        client.update_table(table, ["view_query"])
    assert [item.table_type for item in client.list_tables("d")] == ["TABLE"]
