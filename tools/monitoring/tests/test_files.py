"""Alert and dashboard files, both in the repository and for users."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.cloud.monitoring_dashboard_v1 import Dashboard
from google.protobuf import json_format
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as grafana_models
from typer.testing import CliRunner

from infra.cli.main import app
from penstock_monitoring import objectives
from penstock_monitoring.files import RENDERED, render_files
from penstock_planning.deploy.prices import read_prices
from tests.limits import START_LIMIT_S
from tools.monitoring.tests.promql import google_dashboard, grafana


def test_repository_has_what_the_code_makes() -> None:
    files = {path.name: path.read_text(encoding="utf-8") for path in RENDERED.iterdir()}
    assert files == render_files(), "run: python -m penstock_monitoring"


def test_grafana_knows_every_field_of_its_dashboard() -> None:
    """Grafana's own models parse it, dropping unknown fields, and serialize it again."""
    dashboard = grafana()
    read = grafana_models.Dashboard.from_json(dashboard)
    again = json.loads(JSONEncoder().encode(read))
    assert missing(dashboard, again) == []
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def missing(given: Any, found: Any, path: str = "") -> list[str]:
    """Returns the paths in `given` that are missing from `found` or have a different value."""
    if isinstance(given, dict) and isinstance(found, dict):
        return [
            place
            for key, value in given.items()
            for place in missing(value, found.get(key), f"{path}.{key}")
        ]
    if isinstance(given, list) and isinstance(found, list) and len(given) == len(found):
        return [
            place
            for number, (expected, actual) in enumerate(zip(given, found, strict=True))
            for place in missing(expected, actual, f"{path}[{number}]")
        ]
    return [] if given == found else [path]


def test_cloud_monitoring_knows_every_field_of_its_dashboard() -> None:
    dashboard = {"displayName": "penstock", **google_dashboard()}
    read = json_format.ParseDict(dashboard, Dashboard.pb(Dashboard()))
    tiles = read.mosaic_layout.tiles
    assert len(tiles) == len(google_dashboard()["mosaicLayout"]["tiles"])
    assert all(tile.x_pos + tile.width <= read.mosaic_layout.columns for tile in tiles)


def test_both_dashboards_show_the_same_panels() -> None:
    ours = [panel["title"] for panel in grafana()["panels"] if panel["type"] != "row"]
    tiles = google_dashboard()["mosaicLayout"]["tiles"]
    assert [tile["widget"]["title"] for tile in tiles] == [*ours, "Oldest job"]


def test_price_is_the_list_price() -> None:
    listed = read_prices().prices["machine/g2-standard-8/on-demand"].usd["us-central1"]
    assert listed == objectives.DEFAULT_WORKER_HOUR_USD


def test_user_gets_files_for_prometheus_and_grafana(tmp_path: Path) -> None:
    words = ["monitoring", "--out", str(tmp_path), "--availability", "0.99"]
    done = CliRunner().invoke(app, [*words, "--runbook-url", "https://example.com/troubleshoot.md"])
    assert done.exit_code == 0, done.output
    assert sorted(done.output.split()) == sorted(
        str(path) for path in tmp_path.rglob("*") if path.is_file()
    )
    plain, operator, managed = (
        yaml.safe_load((tmp_path / name).read_text(encoding="utf-8"))
        for name in ("rules.yaml", "prometheus-rule.yaml", "managed-rules.yaml")
    )
    assert plain == operator["spec"] == managed["spec"]
    assert (operator["kind"], managed["kind"]) == ("PrometheusRule", "Rules")
    (rule,) = [
        rule
        for group in plain["groups"]
        for rule in group["rules"]
        if rule.get("alert") == "PenstockAvailabilityFast"
    ]
    assert "> 14.4 * 0.01 " in rule["expr"]
    assert rule["annotations"]["runbook_url"] == (
        "https://example.com/troubleshoot.md#availability-the-error-budget-burns-fast"
    )


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--availability", "0.9"], "availability"),
        (["--deadlines", "1"], "deadlines"),
        (["--availability", "nan"], "availability"),
        (["--least-bad-events", "0"], "least-bad-events"),
        (["--worker-hour-usd", "-1"], "worker-hour-usd"),
    ],
    ids=" ".join,
)
def test_wrong_number_is_refused(tmp_path: Path, words: list[str], field: str) -> None:
    done = CliRunner().invoke(app, ["monitoring", "--out", str(tmp_path), *words])
    assert done.exit_code in (1, 2)
    assert field in done.output
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_prometheus_takes_rules_and_configuration(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    CliRunner().invoke(app, ["monitoring", "--out", str(tmp_path)])
    for words in (
        ["rules", "--lint=all", "--lint-fatal", str(RENDERED / "prometheus-rules.yaml")],
        ["config", str(tmp_path / "prometheus.yaml")],
    ):
        done = subprocess.run(
            ["promtool", "check", *words],
            capture_output=True,
            text=True,
            timeout=START_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
