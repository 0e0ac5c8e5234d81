"""`penstock load` with a text model: the ledger counts every token in the rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock_load.ledger import read_ledger
from shared.settings import environment_with
from shared.usage.bigquery import open_client
from tests.faults.generation_catalog import generation_catalog
from tests.faults.world import APIS, World
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.generation import tiny

pytestmark = pytest.mark.slow(about_s=20)

MODEL = "tiny-text"
PRICE = {
    "per_million_tokens_usd": 0.1,
    "per_million_output_tokens_usd": 0.3,
    "per_million_cached_tokens_usd": 0.01,
}
TRACE = """at_s,input,size,group,items
0,,5,a,1
0.1,,9,b,2
0.2,,5,a,1
0.3,,30,c,1
0.4,,3,d,3
0.5,Which river turns the mill at night?,,e,1
3,Which river turns the mill at night?,,f,1
"""
"""The last request has its own seed, and a prompt that was read long before."""


def load(world: World, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the JSON output."""
    settings = world.settings
    environment = environment_with(
        {
            "PENSTOCK_PROJECT": settings.project,
            "PENSTOCK_BIGQUERY_ENDPOINT": settings.bigquery_endpoint,
        }
    )
    done = subprocess.run(
        [sys.executable, "-m", "infra.cli.main", "load", "--json", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("engine", ["auto", "llama.cpp"])
def test_ledger_and_rows_agree_to_the_token(tmp_path: Path, engine: str) -> None:
    folder, trace, ledger = tmp_path / "model", tmp_path / "trace.csv", tmp_path / "ledger.jsonl"
    folder.mkdir()
    tiny.write_folder(folder)
    if engine != "auto":
        pytest.importorskip("xllamacpp")
        from tests.workers.models.generation.gguf_file import write_gguf

        write_gguf(folder)
    trace.write_text(TRACE)
    served = (
        MODEL,
        generation_catalog(MODEL, folder, engine, price=PRICE, cache={"scope": "global"}),
    )
    with World(tmp_path, workers=1, served=served) as world:
        words = ["--url", world.url(APIS[0]), "--trace", str(trace), "--ledger", str(ledger)]
        status, sent = load(world, *words)
        assert (status, sent["outcomes"]) == (0, {"200": 7})
        status, found = load(world, "--check", str(ledger))
        assert (status, found["differences"], found["rows"]) == (0, [], 10)
        assert found["cost_usd"] > 0
        with open_client(world.settings.project, world.settings.bigquery_endpoint) as client:
            sql = (
                "SELECT SUM(input_tokens), SUM(output_tokens), SUM(cached_tokens), SUM(tokens)"
                " FROM penstock.usage_hourly WHERE day >= '2020-01-01'"
            )
            (line,) = client.query_and_wait(sql, wait_timeout=WAIT_LIMIT_S)
    read, written, cached, tokens = line.values()
    told = sum(one.tokens or 0 for one in read_ledger(ledger).lines)
    assert told == tokens == read + written
    assert written > 0
    assert 0 < cached < read
