"""SIGKILL right behind each answer that confirms something: it is so after a start.

The kill comes as soon as the answer is read, so it is before whatever the server does later on.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from google.cloud import bigquery

from tests.connecting import connected, rows_of
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S
from tests.process import free_port, listens
from tests.test_process import process

KILLS = 20
ROWS = 25
Change = Callable[[bigquery.Client, range], None]


def by_insert_all(client: bigquery.Client, ids: range) -> None:
    assert client.insert_rows_json("p.d.t", [{"id": one} for one in ids]) == []


def by_load(client: bigquery.Client, ids: range) -> None:
    job = client.load_table_from_file(
        io.BytesIO("".join(f"{one}\n" for one in ids).encode()),
        "p.d.t",
        job_config=bigquery.LoadJobConfig(
            source_format="CSV", write_disposition="WRITE_APPEND", schema=SCHEMA
        ),
    )
    job.result(timeout=WAIT_LIMIT_S)


def by_insert(client: bigquery.Client, ids: range) -> None:
    values = ", ".join(f"({one})" for one in ids)
    rows_of(client, f"INSERT INTO d.t (id) VALUES {values}")


def by_merge(client: bigquery.Client, ids: range) -> None:
    rows_of(
        client,
        f"MERGE d.t USING UNNEST(GENERATE_ARRAY({ids[0]}, {ids[-1]})) AS one ON id = one"
        " WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT (id) VALUES (one)",
    )


SCHEMA = [bigquery.SchemaField("id", "INT64")]


@pytest.mark.parametrize("change", [by_insert_all, by_load, by_insert, by_merge])
def test_what_an_answer_confirmed_is_there_once(tmp_path: Path, change: Change) -> None:
    port, data_dir = free_port(), tmp_path / "data"
    endpoint = f"http://127.0.0.1:{port}"
    for kill in range(KILLS + 1):
        with process(port, tmp_path, data_dir) as running:
            running.wait_ready(lambda: listens(port), START_LIMIT_S)
            with connected(endpoint, "p") as client:
                if kill == 0:
                    client.create_dataset("d")
                    client.create_table(bigquery.Table("p.d.t", SCHEMA))
                found = sorted(one for (one,) in rows_of(client, "SELECT id FROM d.t"))
                assert found == list(range(kill * ROWS))
                if kill < KILLS:
                    change(client, range(kill * ROWS, (kill + 1) * ROWS))
                    running.kill()


def test_what_an_update_and_a_delete_confirmed_is_so(tmp_path: Path) -> None:
    port, data_dir = free_port(), tmp_path / "data"
    endpoint = f"http://127.0.0.1:{port}"
    for kill in range(KILLS + 1):
        with process(port, tmp_path, data_dir) as running:
            running.wait_ready(lambda: listens(port), START_LIMIT_S)
            with connected(endpoint, "p") as client:
                if kill == 0:
                    client.create_dataset("d")
                    client.create_table(bigquery.Table("p.d.t", SCHEMA))
                    by_insert(client, range(KILLS))
                found = sorted(one for (one,) in rows_of(client, "SELECT id FROM d.t"))
                # Odd ones are removed, the others get another number.
                changed = [-one - 1 for one in range(0, kill, 2)]
                assert found == sorted([*changed, *range(kill, KILLS)])
                if kill < KILLS:
                    sql = "DELETE FROM d.t" if kill % 2 else "UPDATE d.t SET id = -id - 1"
                    rows_of(client, f"{sql} WHERE id = {kill}")
                    running.kill()
