"""The output that users see for a result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.cli.main import app
from penstock_planning.simulation.page import page
from penstock_planning.simulation.show import text
from penstock_planning.simulation.world import simulate
from tools.planning.tests.simulation.worlds import scenario


def test_text_has_the_figures() -> None:
    result = simulate(scenario(about="Mine", settle_s=600))
    lines = dict(
        line.strip().rsplit(maxsplit=1) for line in text(result).splitlines() if "  " in line
    )
    (model,) = result.summary.models
    assert lines["requests"] == str(model.arrived)
    assert float(lines["answer p95, s"]) == pytest.approx(model.p95_s, abs=0.01)
    assert float(lines["dollars a day"]) == pytest.approx(result.summary.dollars_per_day, abs=0.01)


def test_page_needs_nothing_else_and_shows_text_as_text() -> None:
    html = page(simulate(scenario(about="<script>alert(1)</script>")))
    assert "<script>alert(1)" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "<script src" not in html
    assert "<link" not in html
    assert "Replicas" in html


def test_page_of_a_run_without_answers() -> None:
    stopped = [{"kind": "stock_out", "at_s": 0, "for_s": 600}]
    result = simulate(
        scenario(
            load={"start_replicas": 0},
            entry={"replicas": {"min": 0, "max": 5}},
            events=stopped,
            cluster={"buffer": 0},
        )
    )
    assert result.summary.models[0].served == 0
    assert "Seconds until the answer" in page(result)


def test_command_writes_json_and_a_page(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    words = ["simulate", "sd-constant", "--set", "duration_s=60", "--set", "settle_s=0"]
    done = CliRunner().invoke(app, [*words, "--json", "--html", str(path)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["models"][0]["arrived"] > 1000
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_command_prints_the_result_if_the_page_can_not_be_written(tmp_path: Path) -> None:
    words = ["simulate", "sd-constant", "--set", "duration_s=60", "--set", "settle_s=0"]
    done = CliRunner().invoke(app, [*words, "--json", "--html", str(tmp_path / "no" / "page.html")])
    assert done.exit_code == 1
    assert "page.html: No such file or directory" in done.output
    assert '"models"' in done.output


def test_command_names_a_wrong_field() -> None:
    done = CliRunner().invoke(app, ["simulate", "sd-constant", "--set", "seed=many"])
    assert done.exit_code == 1
    assert "seed" in done.output
