"""pandas-gbq: data frames written to BigQuery and read back, as Parquet and as CSV."""

from __future__ import annotations

import datetime
import decimal
import os
from typing import Any
from uuid import uuid4

from tests.clients.python.checks import bigquery_url, check, main, raises

# pandas-gbq creates its own clients, which read this variable.
os.environ["BIGQUERY_EMULATOR_HOST"] = os.environ["PENSTOCK_CLIENTS_BIGQUERY"]

import pandas as pd
import pandas_gbq
from google.auth.credentials import AnonymousCredentials

PROJECT = f"clients-{uuid4().hex[:12]}"
FRAME = pd.DataFrame(
    {
        "number": [1, 2],
        "share": [0.5, None],
        "name": ["x", "y"],
        "moment": pd.to_datetime(["2026-01-31 01:02:03", "2026-02-01 00:00:00"], utc=True),
        "local": pd.to_datetime(["2026-01-31 01:02:03", "2026-02-01 00:00:00"]),
        "is_new": [True, False],
        "day": [datetime.date(2026, 1, 31)] * 2,
        "price": [decimal.Decimal("1.5"), decimal.Decimal("-2.25")],
    }
)


def at() -> dict[str, Any]:
    bigquery_url()
    credentials = AnonymousCredentials()
    return {"project_id": PROJECT, "credentials": credentials}


def wrote_and_read(method: str) -> None:
    table, options = f"frames.{method}", {"api_method": method, "progress_bar": False}
    pandas_gbq.to_gbq(FRAME, table, if_exists="replace", **options, **at())
    pandas_gbq.to_gbq(FRAME, table, if_exists="append", **options, **at())
    query = f"SELECT * FROM {table} ORDER BY number"
    found = pandas_gbq.read_gbq(query, progress_bar_type=None, **at())
    assert list(found.columns) == list(FRAME.columns)
    assert found["number"].tolist() == [1, 1, 2, 2]
    assert found["moment"].tolist() == [moment for moment in FRAME["moment"] for _ in range(2)]
    assert found["local"].tolist() == [moment for moment in FRAME["local"] for _ in range(2)]
    assert [float(price) for price in found["price"]] == [1.5, 1.5, -2.25, -2.25]
    assert found["share"].isna().tolist() == [False, False, True, True]


@check
def a_frame_goes_and_comes_as_parquet() -> None:
    wrote_and_read("load_parquet")


@check
def a_frame_goes_and_comes_as_csv() -> None:
    wrote_and_read("load_csv")


@check
def a_table_is_read_by_its_name() -> None:
    found = pandas_gbq.read_gbq("frames.load_parquet", progress_bar_type=None, **at())
    assert found.shape == (4, len(FRAME.columns))


@check
def a_missing_table_is_said() -> None:
    query = "SELECT * FROM frames.missing"
    with raises(pandas_gbq.gbq.GenericGBQException) as raised:
        pandas_gbq.read_gbq(query, progress_bar_type=None, **at())
    assert "Not found" in str(raised.error), raised.error


if __name__ == "__main__":
    main()
