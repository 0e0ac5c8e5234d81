"""insertAll with Google's client: accepted rows, rejected rows, and repeated rows."""

import base64
import datetime as dt
from decimal import Decimal
from typing import Any

import pytest
from google.api_core.exceptions import BadRequest, GoogleAPICallError, NotFound
from google.cloud import bigquery
from google.cloud.bigquery import SchemaField
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.connecting import request, rows_of

SCHEMA = [
    SchemaField("id", "INT64", "REQUIRED"),
    SchemaField("name", "STRING"),
    SchemaField("tags", "STRING", "REPEATED"),
    SchemaField("part", "RECORD", fields=[SchemaField("x", "FLOAT64", "REQUIRED")]),
]


@pytest.fixture
def things(client: bigquery.Client, dataset: str) -> str:
    client.create_table(bigquery.Table(f"{client.project}.{dataset}.things", SCHEMA))
    return f"{dataset}.things"


def error(index: int, location: str, message: str, reason: str = "invalid") -> dict[str, Any]:
    return {
        "index": index,
        "errors": [{"reason": reason, "location": location, "debugInfo": "", "message": message}],
    }


def test_every_row_is_answered_in_the_service_s_words(client: bigquery.Client, things: str) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "one"},
        {"id": 1, "nmae": "typo"},
        {"name": "no id"},
        {"id": 2, "tags": "no array"},
        {"id": 3, "part": {"y": 1}},
        {"id": 4, "part": {}},
        {"id": 5, "name": ["a"]},
        {"id": 6, "name": "good"},
    ]
    missing = "Missing required field: Msg_0_CLOUD_QUERY_TABLE"
    assert client.insert_rows_json(things, rows) == [
        error(0, "id", "Cannot convert value to integer (bad value): one"),
        error(1, "nmae", "no such field: nmae."),
        error(2, "", f"{missing}.id."),
        error(3, "tags", "Repeated field must be imported as a JSON array. Field: tags."),
        error(4, "part.y", "no such field: part.y."),
        error(5, "", f"{missing}.part.x."),
        error(6, "name", "Array specified for non-repeated field: name."),
        error(7, "", "", reason="stopped"),
    ]
    assert rows_of(client, f"SELECT * FROM {things}") == []


def test_bad_rows_can_be_skipped_and_unknown_fields_ignored(
    client: bigquery.Client, things: str
) -> None:
    rows = [{"id": 1, "unknown": 1}, {"id": "x"}, {"id": 2}]
    errors = client.insert_rows_json(
        things, rows, skip_invalid_rows=True, ignore_unknown_values=True
    )
    assert errors == [error(1, "id", "Cannot convert value to integer (bad value): x")]
    assert rows_of(client, f"SELECT id FROM {things} ORDER BY id") == [(1,), (2,)]


def test_a_row_sent_again_with_its_insert_id_is_kept_once(
    client: bigquery.Client, things: str
) -> None:
    for _ in range(2):
        assert client.insert_rows_json(things, [{"id": 1}, {"id": 2}], row_ids=["a", "b"]) == []
    client.insert_rows_json(things, [{"id": 3}, {"id": 3}], row_ids=[None, None])
    assert rows_of(client, f"SELECT id FROM {things} ORDER BY id") == [(1,), (2,), (3,), (3,)]


def test_a_refused_row_may_come_again_under_its_insert_id(
    client: bigquery.Client, things: str
) -> None:
    assert len(client.insert_rows_json(things, [{"id": 1}, {"id": "x"}], row_ids=["a", "b"])) == 2
    assert client.insert_rows_json(things, [{"id": 1}, {"id": 2}], row_ids=["a", "b"]) == []
    assert rows_of(client, f"SELECT COUNT(*) FROM {things}") == [(2,)]


@pytest.mark.parametrize("field", ["ratio", "name"])
@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_a_number_that_json_has_not_is_refused(
    client: bigquery.Client, bigquery_endpoint: str, dataset: str, field: str, number: bytes
) -> None:
    schema = [bigquery.SchemaField("ratio", "FLOAT64"), bigquery.SchemaField("name", "STRING")]
    client.create_table(bigquery.Table(f"{client.project}.{dataset}.n", schema))
    path = f"/bigquery/v2/projects/{client.project}/datasets/{dataset}/tables/n/insertAll"
    body = b'{"rows": [{"json": {"%s": %s}}]}' % (field.encode(), number)
    status, _, answer = request(bigquery_endpoint, "POST", path, body)
    assert (status, answer["error"]["status"]) == (400, "INVALID_ARGUMENT"), answer
    assert rows_of(client, f"SELECT * FROM {dataset}.n") == []


@pytest.mark.parametrize("kind", ["TIMESTAMP", "DATETIME", "TIME"])
def test_a_time_with_more_digits_than_sql_takes_is_refused(
    client: bigquery.Client, dataset: str, kind: str
) -> None:
    place = f"{client.project}.{dataset}.n"
    client.create_table(bigquery.Table(place, [bigquery.SchemaField("at", kind)]))
    day = "" if kind == "TIME" else "2024-01-01 "
    for digits, is_taken in (("123456", True), ("1234567", False), ("123456789", False)):
        errors = client.insert_rows_json(place, [{"at": f"{day}10:00:00.{digits}"}])
        assert (errors == []) is is_taken, errors
    assert rows_of(client, f"SELECT COUNT(*) FROM {dataset}.n") == [(1,)]


def test_json_is_kept_with_its_names_sorted(client: bigquery.Client, dataset: str) -> None:
    place = f"{client.project}.{dataset}.n"
    client.create_table(bigquery.Table(place, [bigquery.SchemaField("j", "JSON")]))
    assert client.insert_rows_json(place, [{"j": '{"b": 1, "a": {"d": 1, "c": 2}, "b": 3}'}]) == []
    assert rows_of(client, f"SELECT TO_JSON_STRING(j) FROM {dataset}.n") == [
        ('{"a":{"c":2,"d":1},"b":1}',)
    ]


def test_limits_are_the_service_s(client: bigquery.Client, things: str) -> None:
    with pytest.raises(BadRequest, match="Too many rows present"):
        client.insert_rows_json(things, [{"id": 1}] * 50_001, row_ids=[None] * 50_001)
    with pytest.raises(GoogleAPICallError, match="payload size exceeds"):
        client.insert_rows_json(things, [{"id": 1, "name": "x" * 10 * 1024 * 1024}])
    (error,) = client.insert_rows_json(things, [{"id": 1}], row_ids=["x" * 129])
    assert "insertId" in error["errors"][0]["message"]
    with pytest.raises(NotFound):
        client.insert_rows_json("d.missing", [{"id": 1}])


def test_names_match_in_any_case(client: bigquery.Client, things: str) -> None:
    assert client.insert_rows_json(things, [{"ID": 1, "Name": "n"}]) == []
    assert rows_of(client, f"SELECT id, name FROM {things}") == [(1, "n")]


@pytest.mark.parametrize(
    ("kind", "given_value", "kept"),
    [
        ("TIMESTAMP", 1.5, dt.datetime(1970, 1, 1, 0, 0, 1, 500_000, dt.UTC)),
        ("TIMESTAMP", "1700000000.25", dt.datetime(2023, 11, 14, 22, 13, 20, 250_000, dt.UTC)),
        ("TIMESTAMP", "2024-01-01 10:00:00+02:00", dt.datetime(2024, 1, 1, 8, tzinfo=dt.UTC)),
        (
            "TIMESTAMP",
            "2024-01-01T10:00:00.123456Z",
            dt.datetime(2024, 1, 1, 10, 0, 0, 123_456, dt.UTC),
        ),
        (
            "TIMESTAMP",
            "2024-01-01 10:00:00 America/New_York",
            dt.datetime(2024, 1, 1, 15, tzinfo=dt.UTC),
        ),
        ("INT64", "12", 12),
        ("INT64", 3.0, 3),
        ("FLOAT64", "1e3", 1000.0),
        ("BOOL", "TRUE", True),
        ("STRING", 12, "12"),
        ("NUMERIC", "0.1234567895", Decimal("0.123456790")),
        ("DATETIME", "2024-01-01T10:00:00", dt.datetime(2024, 1, 1, 10)),
        ("BYTES", base64.b64encode(b"\x00\xff").decode(), b"\x00\xff"),
        ("JSON", '{"a": [1]}', {"a": [1]}),
    ],
)
def test_a_value_is_taken_in_its_other_forms(
    client: bigquery.Client, dataset: str, kind: str, given_value: object, kept: object
) -> None:
    made = client.create_table(
        bigquery.Table(f"{client.project}.{dataset}.t", [SchemaField("v", kind)])
    )
    assert client.insert_rows_json("d.t", [{"v": given_value}]) == []
    assert [row["v"] for row in client.list_rows(made)] == [kept]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("INT64", 2**63),
        ("INT64", 1.5),
        ("INT64", True),
        ("FLOAT64", "one"),
        ("FLOAT64", "1e400"),
        ("BOOL", "maybe"),
        ("NUMERIC", "1e29"),
        ("NUMERIC", "nan"),
        ("TIMESTAMP", "2024-13-01"),
        ("TIMESTAMP", 1e18),
        ("TIMESTAMP", "1e999999"),
        ("TIMESTAMP", "2024-01-01 America/Argentina"),
        ("DATE", "2024-02-30"),
        ("TIME", "25:00:00"),
        ("DATETIME", "yesterday"),
        ("BYTES", "not base64!"),
        ("JSON", "{"),
        ("JSON", {"a": 1}),
        ("STRING", "\ud800"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(
    client: bigquery.Client, dataset: str, kind: str, value: object
) -> None:
    client.create_table(bigquery.Table(f"{client.project}.{dataset}.t", [SchemaField("v", kind)]))
    (error,) = client.insert_rows_json("d.t", [{"v": value}])
    assert error["errors"][0]["reason"] == "invalid"
    assert error["errors"][0]["location"] == "v"


# For years before 1000, Google's client does not write leading zeros.
_MOMENTS = st.datetimes(dt.datetime(1000, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59))
_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=5,
)
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "STRING": _TEXT,
    "BYTES": st.binary(),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "FLOAT64": st.floats(allow_nan=False),
    "BOOL": st.booleans(),
    "TIMESTAMP": _MOMENTS.map(lambda moment: moment.replace(tzinfo=dt.UTC)),
    "DATETIME": _MOMENTS,
    "DATE": st.dates(),
    "TIME": st.times(),
    "NUMERIC": st.decimals(Decimal("-1e28"), Decimal("1e28"), places=9).filter(
        lambda value: abs(value) < 10**28
    ),
    "JSON": _JSON,
}


def _given(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return values.filter(lambda value: value is not None)


_RECORD = st.fixed_dictionaries(
    {kind.lower(): st.none() | values for kind, values in _VALUES.items() if kind != "JSON"}
)
_ROW = st.fixed_dictionaries(
    {
        **{kind.lower(): st.none() | values for kind, values in _VALUES.items()},
        **{
            f"{kind.lower()}s": st.lists(_given(values), max_size=2)
            for kind, values in _VALUES.items()
        },
        "part": _RECORD,
        "parts": st.lists(_RECORD, max_size=2),
    }
)


@pytest.fixture
def everything(client: bigquery.Client, dataset: str) -> bigquery.Table:
    plain = [SchemaField(kind.lower(), kind) for kind in _VALUES]
    inner = [field for field in plain if field.name != "json"]
    repeated = [SchemaField(f"{kind.lower()}s", kind, "REPEATED") for kind in _VALUES]
    records = [
        SchemaField("part", "RECORD", fields=inner),
        SchemaField("parts", "RECORD", "REPEATED", fields=inner),
    ]
    keys = [SchemaField("batch", "INT64", "REQUIRED"), SchemaField("place", "INT64", "REQUIRED")]
    name = f"{client.project}.{dataset}.everything"
    return client.create_table(bigquery.Table(name, [*keys, *plain, *repeated, *records]))


def test_values_of_every_type_come_back_as_they_went(
    client: bigquery.Client, everything: bigquery.Table
) -> None:
    batches: list[int] = []

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(_ROW, min_size=1, max_size=3))
    def check(rows: list[dict[str, Any]]) -> None:
        batches.append(len(rows))
        sent = [{**row, "batch": len(batches), "place": place} for place, row in enumerate(rows)]
        assert client.insert_rows(everything, sent, row_ids=[None] * len(sent)) == []
        query = (
            "SELECT * EXCEPT (batch, place) FROM d.everything"
            f" WHERE batch = {len(batches)} ORDER BY place"
        )
        assert [dict(row) for row in client.query_and_wait(query)] == rows

    check()
    assert sum(1 for _ in client.list_rows(everything)) == sum(batches)
