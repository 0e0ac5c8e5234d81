from __future__ import annotations

from pathlib import Path

import pytest

from bench.load.texts import MIX
from bench.peers.__main__ import PAGE
from bench.peers.loads import BLOCK, Load, plan
from bench.peers.roster import CONTENDERS, Contender
from bench.peers.rounds import Findings, Measured, Started
from bench.peers.tables import (
    BEGIN,
    END,
    Medians,
    cost_rows,
    figures,
    headline,
    markdown,
    rate_rows,
    ratio_rows,
)
from bench.peers.tables import write_between_markers as write
from bench.peers.tree import label

pytestmark = pytest.mark.slow

LOAD = Load(32)
PENSTOCK, FASTAPI, LITSERVE = (
    next(one for one in CONTENDERS if one.key == key) for key in ("penstock", "fastapi", "litserve")
)


class Words:
    """Texts that need no tokenizer: `length number`, with lengths distributed like real ones."""

    def __init__(self) -> None:
        self._count = 0

    def mixed(self, count: int) -> list[str]:
        texts = []
        for share, low, _ in MIX:
            for _ in range(round(share * count)):
                self._count += 1
                texts.append(f"{low} {self._count}")
        return texts


def measured(
    key: str, rate: float, number: int = 0, failures: int = 0, sent: int = 100
) -> Measured:
    round_trip_ms = {"p50": 1000 / rate, "p95": 2000 / rate, "p99": 3000 / rate}
    cpu_ms = {"front": 1.0, "model": 9.0}
    return Measured(
        key,
        LOAD.name,
        number,
        sent,
        rate,
        round_trip_ms,
        {"503": failures} if failures else {},
        cpu_ms,
        0.1,
    )


def medians(*found: Measured, missing: str = "") -> Medians:
    contenders = (FASTAPI, LITSERVE, PENSTOCK)
    started = {one.key: Started(one.key, 1.0, 1_000_000) for one in contenders}
    if missing:
        started["litserve"] = Started("litserve", missing=missing)
    return Medians(contenders, [LOAD], Findings(started, list(found)))


def test_ratio_is_that_of_the_same_round() -> None:
    # A machine that is half as fast in the second round changes every median, but no ratio.
    found = [measured("fastapi", rate, number) for number, rate in enumerate((60, 30, 60))]
    found += [measured("penstock", rate, number) for number, rate in enumerate((240, 120, 240))]
    head, row = ratio_rows(medians(*found))
    assert row[1] == f"{FASTAPI.name}, 60"
    assert row[head.index("Penstock / best peer")] == "4.00"


def test_best_peer_answers_nearly_all() -> None:
    found = [
        measured("fastapi", 60.0),
        measured("litserve", 500.0, failures=50),
        measured("penstock", 240.0),
    ]
    result = medians(*found)
    assert result.best(LOAD.name, ["fastapi", "litserve"]) == "fastapi"
    assert "500 (2, 6) 50% failed" in rate_rows(result)[2]


def test_missing_peer_stands_with_its_reason() -> None:
    result = medians(
        measured("fastapi", 60.0),
        missing="litserve: can't create the environment: no wheel\nmore words",
    )
    row = next(row for row in cost_rows(result) if row[0] == LITSERVE.name)
    assert row[-1] == "left out: litserve: can't create the environment: no wheel"
    assert [LITSERVE.name, "-"] in rate_rows(result)


def test_bound_is_on_the_shipped_pipeline_only() -> None:
    found = {
        one.name: one
        for one in figures(medians(measured("fastapi", 60.0), measured("penstock", 170.0)))
    }
    figure = found["penstock over fastapi, 32 in flight"]
    assert (figure.bound, figure.limit, figure.is_met) == (">=", 3.0, False)
    assert found["penstock, 32 in flight, CPU per request"].value == 10.0
    assert found["penstock, 32 in flight, CPU per request, model"].value == 9.0


def test_every_table_is_whole_markdown() -> None:
    where = {"cpu": "a cpu", "cores": 2, "torch": "2", "date": "2026-01-01T00:00:00"}
    found = medians(measured("fastapi", 60.0))
    lines = markdown(
        headline(where, 1), (ratio_rows(found), rate_rows(found), cost_rows(found))
    ).splitlines()
    assert lines[0] == "a cpu, 2 cores, torch 2, 2026-01-01; medians of 1 round, interleaved."
    for number, line in enumerate(lines):
        if line.startswith("|---"):
            assert line.count("|") == lines[number - 1].count("|") == lines[number + 1].count("|")


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    write(page, "new")
    assert page.read_text(encoding="utf-8") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"


def test_page_without_markers_gets_them_at_its_end(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n", encoding="utf-8")
    write(page, "new")
    write(page, "newer")
    assert page.read_text(encoding="utf-8") == f"before\n\n{BEGIN}\nnewer\n{END}\n"


def test_page_of_performance_has_one_section_for_them() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert (page.count(BEGIN), page.count(END)) == (1, 1)


def test_texts_hold_the_mix_in_every_block_and_are_distinct() -> None:
    texts = Load(1).texts(Words(), seed=0)  # type: ignore[arg-type]
    assert len(set(texts)) == len(texts)
    for start in range(0, len(texts) - BLOCK, BLOCK):
        lengths = [int(text.split()[0]) for text in texts[start : start + BLOCK]]
        assert [lengths.count(low) for _, low, _ in MIX] == [12, 6, 2]


def test_repeats_are_of_texts_sent_before() -> None:
    texts = Load(32, repeats=0.4).texts(Words(), seed=0)  # type: ignore[arg-type]
    repeated = sum(text in texts[:place] for place, text in enumerate(texts[:1000]))
    assert 350 < repeated < 450


def test_plan_repeats_only_near_32_in_flight() -> None:
    names = [load.name for load in plan([1, 8, 128], [0.0, 0.4], 50.0)]
    assert names == [
        "1 in flight",
        "8 in flight",
        "128 in flight",
        "8 in flight, 40 % repeats",
        "50/s, open loop",
    ]
    assert [load.is_in(1) for load in plan([1, 8, 512], [0.0], 50.0)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/x/bin/python3.11", "-m", "workers.runtime.server", "--a"], "workers.runtime.server"),
        (["/x/python", "/y/server.py", "18000"], "server.py"),
        (["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()"], "spawned"),
        (["/x/bin/python", "/x/bin/uvicorn", "server:app"], "uvicorn"),
        (["ray::ServeReplica:default:Embedding"], "ray"),
        (["/usr/bin/redis-server 127.0.0.1:1"], "redis-server"),
        ([], "ended"),
    ],
)
def test_label_names_the_program(command: list[str], name: str) -> None:
    assert label(command) == name


def test_keys_are_distinct() -> None:
    keys = [one.key for one in CONTENDERS]
    assert len(set(keys)) == len(keys)


def test_every_peer_has_its_server_and_pins() -> None:
    home = Path("bench/peers")
    peers: list[Contender] = [one for one in CONTENDERS if one.group != "ours"]
    for one in peers:
        pins = (home / one.folder / "requirements.txt").read_text(encoding="utf-8").splitlines()
        assert "torch==2.13.0" in pins
        assert all("==" in pin for pin in pins)
