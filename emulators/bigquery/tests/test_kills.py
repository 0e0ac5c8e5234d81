"""Ten SIGKILLs during inserts: no confirmed row is lost."""

import threading
from pathlib import Path

import httpx
from google.cloud import bigquery

from tests.connecting import connected, rows_of
from tests.process import free_port, listens
from tests.test_process import process

KILLS = 10
ANSWERED_BEFORE_A_KILL = 20
START_LIMIT_S = 60.0


def insert(url: str, first: int, answered: set[int], is_enough: threading.Event) -> None:
    """Inserts rows until the server dies."""
    with httpx.Client(timeout=START_LIMIT_S) as http:
        for number in range(first, first + 100_000):
            rows = {"rows": [{"insertId": str(number), "json": {"id": number}}]}
            try:
                response = http.post(url, json=rows)
            except httpx.TransportError:
                return
            assert response.status_code == 200, response.text
            assert "insertErrors" not in response.json()
            answered.add(number)
            if number - first == ANSWERED_BEFORE_A_KILL:
                is_enough.set()


def test_rows_whose_insert_was_answered_outlive_ten_kills(tmp_path: Path) -> None:
    port, data_dir = free_port(), tmp_path / "data"
    endpoint = f"http://127.0.0.1:{port}"
    url = f"{endpoint}/bigquery/v2/projects/p/datasets/d/tables/t/insertAll"
    answered: set[int] = set()
    for kill in range(KILLS + 1):
        with process(port, tmp_path, data_dir) as running:
            running.wait_ready(lambda: listens(port), START_LIMIT_S)
            if kill in (0, KILLS):
                with connected(endpoint, "p") as client:
                    if kill == KILLS:
                        stored = {row[0] for row in rows_of(client, "SELECT id FROM d.t")}
                        assert answered <= stored, sorted(answered - stored)[:5]
                        return
                    client.create_dataset("d")
                    schema = [bigquery.SchemaField("id", "INT64")]
                    client.create_table(bigquery.Table("p.d.t", schema))
            is_enough = threading.Event()
            arguments = (url, kill * 100_000, answered, is_enough)
            inserting = threading.Thread(target=insert, args=arguments)
            inserting.start()
            assert is_enough.wait(START_LIMIT_S)
            running.kill()
            inserting.join(START_LIMIT_S)
