"""Summaries of the bad-neighbor bench, and the exit code of bench commands that fail."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from bench import __main__ as command
from bench import report
from bench.bad_neighbor import cpu_load
from bench.bad_neighbor.bad import BadReport
from bench.bad_neighbor.comparison import Beside, outcome_of, percentile, shown
from bench.bad_neighbor.cpu_load import (
    CpuBurst,
    CpuDrive,
    CpuTime,
    burn,
    burning,
    cores_of,
    load_between,
)
from bench.bad_neighbor.quiet import MIN_SAMPLES, SURFACES, TOKENS, Noticed, Surface
from bench.bad_neighbor.rounds import ROUNDS, SECONDS
from bench.report import Outcome

SLOWER_CONTROL_MS = 11.0
BATCH_MS, STEP_MS = 7.0, 0.5


def noticed(took_ms: float, refused: int = 0) -> Noticed:
    return Noticed(100 + refused, [took_ms] * 100, Counter({"429 try later": refused}))


def beside(surface: str, beside_ms: float = 25.0, *, refused: int = 0) -> Beside:
    line = Beside(
        surface,
        alone=noticed(10.0),
        same_cpu=noticed(SLOWER_CONTROL_MS),
        beside=noticed(beside_ms, refused),
    )
    statuses, reasons = {200: 10, 429: 30}, {"429 full": 30}
    line.add(BadReport(40, 30, statuses, reasons, batch_ms=BATCH_MS, step_ms=STEP_MS))
    return line


def test_rounds_add_up() -> None:
    line = beside("texts")
    line.add(BadReport(2, 0, {200: 2}, {}, batch_ms=9.0, step_ms=0.1))
    assert (line.sent, line.refused, line.statuses) == (42, 30, {200: 12, 429: 30})
    assert (line.batch_ms, line.step_ms) == (9.0, 0.5)
    assert line.ratio == 2.5


@pytest.mark.parametrize(
    ("surface", "limit_ms"),
    [
        ("uploads", 2 * SLOWER_CONTROL_MS),
        ("texts", 2 * SLOWER_CONTROL_MS + 2 * BATCH_MS),
        ("batches", 2 * SLOWER_CONTROL_MS + 2 * BATCH_MS),
        ("webhooks", 2 * SLOWER_CONTROL_MS + 2 * BATCH_MS),
        ("generations", 2 * SLOWER_CONTROL_MS + (1 + TOKENS) * STEP_MS),
        ("streams", 2 * SLOWER_CONTROL_MS + (1 + TOKENS) * STEP_MS),
    ],
)
def test_bound_allows_twice_the_slower_control_and_waiting_for_the_noisy_tenant(
    surface: str, limit_ms: float
) -> None:
    assert beside(surface).limit_ms == limit_ms
    for beside_ms, is_met in ((limit_ms, True), (limit_ms + 1, False)):
        line = beside(surface, beside_ms)
        figures = {one.name: one for one in outcome_of([line]).figures}
        assert figures[f"{surface}: beside the bad one, p99"].is_met is is_met


@pytest.mark.parametrize(
    ("beside_ms", "met_by"),
    [(20.0, "2 x alone"), (22.0, "2 x same CPU"), (36.0, "stated bound"), (37.0, "MISSED")],
)
def test_table_says_what_of_the_bound_was_needed(beside_ms: float, met_by: str) -> None:
    line = beside("texts", beside_ms)
    assert line.verdict == met_by
    assert met_by in shown([line])


def test_refusal_of_the_quiet_tenant_is_a_failure() -> None:
    assert not outcome_of([beside("texts")]).failure
    line = beside("images", refused=3)
    line.alone = noticed(10.0, refused=2)
    failed = outcome_of([beside("texts"), line])
    assert failed.failure.startswith("5 requests of the quiet tenant were refused")
    refused = [shown_line["refused"] for shown_line in failed.details["lines"]]
    assert refused == [{}, {"429 try later": 5}]


def test_surface_without_responses_is_missed_and_still_shown() -> None:
    line = beside("texts")
    line.beside = Noticed()
    outcome = outcome_of([line])
    [limited] = [row for row in report.table({"bad": outcome}).splitlines() if "bad one" in row]
    assert "nan" in limited
    assert "MISSED" in limited


def test_request_of_the_quiet_tenant_that_is_not_counted_is_a_failure() -> None:
    line = beside("texts")
    line.beside.sent += 2
    assert outcome_of([line]).failure.endswith("2 were not counted")


def test_p99_of_few_requests_is_the_slowest() -> None:
    assert percentile(Noticed(3, [1.0, 2.0, 9.0]), 99) == 9.0
    assert percentile(Noticed(200, [1.0] * 198 + [8.0, 9.0]), 99) == 1.0


@pytest.mark.parametrize("surface", SURFACES, ids=[one.name for one in SURFACES])
def test_full_measurement_has_enough_requests_for_a_p99(surface: Surface) -> None:
    assert SECONDS / surface.every_s * ROUNDS >= MIN_SAMPLES


def test_table_shows_both_tenants() -> None:
    table = shown([beside("texts", refused=1)])
    (line,) = [one for one in table.splitlines() if one.strip().startswith("texts")]
    times = ["10", "10", "11", "25", "25", "2.50", "36"]
    assert line.split() == ["texts", "101", *times, "stated", "bound", "1", "40", "30"]


def test_load_is_what_each_process_took_beside_the_bad_tenant_and_not_without_it() -> None:
    zero = {"api": {1: CpuTime(5.0, 10), 2: CpuTime(1.0, 1)}, "functions": {3: CpuTime(1.0, 5)}}
    alone = CpuDrive(10.0, zero, zero | {"api": {1: CpuTime(6.0, 110), 2: CpuTime(1.0, 1)}})
    after = {"api": {1: CpuTime(9.0, 410), 2: CpuTime(1.0, 1), 4: CpuTime(2.5, 0)}}
    load = load_between(alone, CpuDrive(10.0, zero, zero | after))
    # 0.4 cores used alongside the bad tenant and 0.1 alone; 4 s in 400 bursts. The new process
    # never gave up its core.
    assert {part: [(round(one.cores, 9), one.burst_s) for one in load[part]] for part in load} == {
        "api": [(0.3, 0.01), (0.25, 0.1)]
    }
    assert cores_of(load) == pytest.approx(0.55)


class FakeTime:
    """One thread's clocks, on a machine that is otherwise idle."""

    def __init__(self) -> None:
        self.now_s = self.cpu_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        """Takes half a millisecond of CPU time."""
        self.now_s, self.cpu_s = self.now_s + 0.0005, self.cpu_s + 0.0005
        return self.cpu_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_burning_takes_its_part_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_load, "time", FakeTime())
    monkeypatch.setattr(cpu_load, "random", random.Random(1))
    took_s = burn(CpuBurst(cores=0.2, burst_s=0.05), 1000.0)
    assert took_s == pytest.approx(200.0, rel=0.1)


@pytest.mark.anyio
async def test_processes_burn_while_a_block_runs() -> None:
    load = {"api": [CpuBurst(0.1, 0.002), CpuBurst(0.1, 0.002)], "client": [CpuBurst(0.1, 0.002)]}
    async with burning(load, 0.3, ["client"]) as got:
        assert not got
    (cores,) = got
    assert 0.0 < cores < 1.0


@pytest.mark.parametrize(("failure", "status"), [("", 0), ("one was refused", 1)])
def test_failure_is_the_status_of_the_command_and_the_results_are_kept(
    failure: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = ModuleType("bench.failing")
    module.run = lambda: Outcome([], failure=failure)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bench.failing", module)
    monkeypatch.setitem(command.MODULES, "failing", "failing")
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(report, "RESULTS", results)
    assert command.main(["failing"]) == status
    assert failure in capsys.readouterr().out
    kept = msgspec.json.decode((results / "failing.json").read_bytes())
    assert kept["failure"] == failure


def test_short_form_of_what_has_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--quick", "soak"])
    assert "no short form of soak" in capsys.readouterr().err
