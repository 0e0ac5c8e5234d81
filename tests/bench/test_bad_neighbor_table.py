"""What the bench of bad neighbors makes of its measurements, and the command of what fails."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from bench import __main__ as command
from bench import report
from bench.bad_neighbor.bad import BadReport
from bench.bad_neighbor.quiet import Noticed
from bench.bad_neighbor.rounds import Beside, outcome_of, shown
from bench.report import Outcome


def beside(surface: str, *, refused: int = 0, is_of_all: bool = False) -> Beside:
    line = Beside(
        surface,
        is_of_all=is_of_all,
        alone=Noticed([10.0] * 100),
        beside=Noticed([25.0] * 100, Counter({"429 try later": refused})),
    )
    line.add(BadReport(40, 30, {200: 10, 429: 30}, {"429 full": 30}, batch_ms=7.0))
    return line


def test_rounds_add_up() -> None:
    line = beside("texts")
    line.add(BadReport(2, 0, {200: 2}, {}, batch_ms=9.0))
    assert (line.sent, line.refused, line.statuses) == (42, 30, {200: 12, 429: 30})
    assert line.ratio == 2.5


@pytest.mark.parametrize(
    ("surface", "limit_ms", "is_met"), [("uploads", 20.0, False), ("texts", 27.0, True)]
)
def test_only_what_is_computed_in_batches_may_wait_for_one(
    surface: str, limit_ms: float, is_met: bool
) -> None:
    line = beside(surface)
    assert line.limit_ms == limit_ms
    figures = {one.name: one for one in outcome_of([line]).figures}
    assert figures[f"{surface}: beside the bad one, p99"].is_met is is_met


def test_all_at_once_has_no_bound_on_time() -> None:
    figures = {one.name: one for one in outcome_of([beside("uploads", is_of_all=True)]).figures}
    assert figures["uploads, all at once: beside the bad one, p99"].is_met


def test_refusal_of_the_quiet_tenant_is_a_failure() -> None:
    assert not outcome_of([beside("texts")]).failure
    failed = outcome_of([beside("texts"), beside("images", refused=3)])
    assert failed.failure == "3 requests of the quiet tenant were refused"
    assert "429 try later" in failed.details["lines"][1]["refused"]


def test_table_shows_both_tenants() -> None:
    table = shown([beside("texts", refused=1)])
    (line,) = [one for one in table.splitlines() if one.strip().startswith("texts")]
    assert line.split() == ["texts", "10", "10", "25", "25", "2.50", "27", "1", "40", "30"]


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
        command.main(["--quick", "limits"])
    assert "no short form of limits" in capsys.readouterr().err
