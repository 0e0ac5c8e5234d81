"""A confirmed change survives a SIGKILL sent right after the confirming response.

The kill comes as soon as the response has been read, before the server does anything else.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from google.cloud import bigquery

from tests.connecting import connected, rows_of
from tests.limits import KILLS, START_LIMIT_S, WAIT_LIMIT_S
from tests.process import free_port, listens
from tests.test_process import process

ROWS = 25
SCHEMA = [bigquery.SchemaField("id", "INT64")]
Change = Callable[[bigquery.Client, int, set[int]], set[int]]
"""Makes the change to the table for kill number `kill`.

Takes the table's current IDs and returns the new ones.
"""


def by_insert_all(client: bigquery.Client, kill: int, ids: set[int]) -> set[int]:
    added = fresh(kill)
    assert client.insert_rows_json("p.d.t", [{"id": number} for number in added]) == []
    return {*ids, *added}


def by_load(client: bigquery.Client, kill: int, ids: set[int]) -> set[int]:
    added = fresh(kill)
    config = bigquery.LoadJobConfig(
        source_format="CSV", write_disposition="WRITE_APPEND", schema=SCHEMA
    )
    lines = io.BytesIO("".join(f"{number}\n" for number in added).encode())
    client.load_table_from_file(lines, "p.d.t", job_config=config).result(timeout=WAIT_LIMIT_S)
    return {*ids, *added}


def by_statement(client: bigquery.Client, kill: int, ids: set[int]) -> set[int]:
    added = fresh(kill)
    if kill % 4 == 0:
        rows_of(
            client, f"INSERT INTO d.t (id) VALUES {', '.join(f'({number})' for number in added)}"
        )
        return {*ids, *added}
    if kill % 4 == 1:
        rows_of(client, "UPDATE d.t SET id = -id WHERE MOD(id, 2) = 0")
        return {-number if number % 2 == 0 else number for number in ids}
    if kill % 4 == 2:
        rows_of(
            client,
            f"MERGE d.t USING UNNEST(GENERATE_ARRAY({added[0]}, {added[-1]})) AS one ON id = -one"
            " WHEN NOT MATCHED BY TARGET THEN INSERT (id) VALUES (one)"
            " WHEN NOT MATCHED BY SOURCE AND id < 0 THEN DELETE",
        )
        return {*(number for number in ids if number >= 0), *added}
    rows_of(client, "DELETE FROM d.t WHERE MOD(id, 3) = 1")
    return {number for number in ids if number % 3 != 1}


def fresh(kill: int) -> range:
    """Returns numbers that have not been used by any earlier kill."""
    return range(1 + kill * ROWS, 1 + (kill + 1) * ROWS)


@pytest.mark.parametrize("change", [by_insert_all, by_load, by_statement])
def test_what_an_answer_confirmed_is_so_after_a_kill(tmp_path: Path, change: Change) -> None:
    port, data_dir = free_port(), tmp_path / "data"
    ids: set[int] = set()
    for kill in range(KILLS + 1):
        with process(port, tmp_path, data_dir) as running:
            running.wait_ready(lambda: listens(port), START_LIMIT_S)
            with connected(f"http://127.0.0.1:{port}", "p") as client:
                if kill == 0:
                    client.create_dataset("d")
                    client.create_table(bigquery.Table("p.d.t", SCHEMA))
                stored = [row.id for row in client.list_rows("p.d.t")]
                assert sorted(stored) == sorted(ids)
                if kill < KILLS:
                    ids = change(client, kill, ids)
                    running.kill()
