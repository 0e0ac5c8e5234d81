"""Alerts, keyed by type of error. If promtool is installed, it runs the rules for Prometheus;

the simulation's evaluator runs the Cloud Monitoring alerts.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock_monitoring.alerts import alerts
from penstock_monitoring.files import rules
from penstock_monitoring.objectives import DEFAULT_LEAST_BAD_EVENTS, DEFAULT_TARGETS, bounds_of
from penstock_planning.simulation.promql import PromQuery
from penstock_planning.simulation.timeseries import Labels, TimeSeries
from tests.limits import START_LIMIT_S

BOUNDS = bounds_of(DEFAULT_TARGETS, DEFAULT_LEAST_BAD_EVENTS)
BURNING = ("availability-fast", "availability-slow", "deadlines-fast", "deadlines-slow")
HOUR, DAY = 60, 1440

Fired = set[tuple[str, str | None]]
"""Alerts by key, each with the name of its model. None: all models together."""


@dataclass(frozen=True)
class Counted:
    """A counter: the number of events per minute, and for how many minutes."""

    name: str
    labels: dict[str, str]
    parts: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Case:
    """Past events, and the alerts that fire."""

    about: str
    counted: Sequence[Counted]
    fired: Fired
    every_min: int = 1
    """Minutes between scrapes."""


def requests(
    status: str, *parts: tuple[int, float], model: str = "m", route: str = "/v1/embeddings"
) -> Counted:
    labels = {"route": route, "model": model, "status": status}
    return Counted("penstock_api_requests_total", labels, parts)


def items(end: str, *parts: tuple[int, float], model: str = "m") -> Counted:
    return Counted("penstock_slo_items_total", {"model": model, "end": end}, parts)


def both(key: str, model: str = "m") -> Fired:
    """Returns the alert for one model, and the alert for all models together."""
    return {(key, model), (key, None)}


CASES = [
    Case("half of the budget", [requests("200", (420, 1000)), requests("503", (420, 0.5))], set()),
    Case(
        "2 % for an hour",
        [requests("200", (60, 980)), requests("500", (60, 20))],
        both("availability-fast") | both("availability-slow"),
    ),
    Case(
        "an outage of 5 minutes that ended 10 minutes ago",
        [
            requests("200", (200, 100), (5, 0), (10, 100)),
            requests("503", (200, 0), (5, 100), (10, 0)),
        ],
        both("availability-fast") | both("availability-slow"),
    ),
    Case(
        "an outage of 5 minutes that ended 7 hours ago",
        [
            requests("200", (60, 100), (5, 0), (420, 100)),
            requests("503", (60, 0), (5, 100), (420, 0)),
        ],
        set(),
    ),
    Case(
        "0.8 % for 6 hours",
        [requests("200", (6 * HOUR, 992)), requests("503", (6 * HOUR, 8))],
        both("availability-fast") | both("availability-slow"),
    ),
    Case(
        "0.4 % for a day",
        [requests("200", (DAY, 996)), requests("503", (DAY, 4))],
        both("availability-slow"),
        every_min=5,
    ),
    Case(
        "0.15 % for three days",
        [requests("200", (3 * DAY, 998.5)), requests("503", (3 * DAY, 1.5))],
        both("availability-slow"),
        every_min=5,
    ),
    Case(
        "0.05 % for three days",
        [requests("200", (3 * DAY, 999.5)), requests("503", (3 * DAY, 0.5))],
        set(),
        every_min=5,
    ),
    Case("two errors among 20", [requests("200", (60, 0.3)), requests("500", (60, 0.04))], set()),
    Case(
        "a small service that is down",
        [requests("503", (60, 0.3))],
        both("availability-fast") | both("availability-slow"),
    ),
    Case(
        "a tenant over the limits of its plan",
        [requests("200", (60, 10)), requests("429", (60, 1000)), items("in_time", (60, 10))],
        set(),
    ),
    Case(
        "callers who are wrong, or hang up",
        [requests("200", (60, 10)), requests("400", (60, 500)), requests("499", (60, 500))],
        set(),
    ),
    Case(
        "deadlines of a millisecond",
        [requests("200", (60, 10)), requests("504", (60, 100)), items("in_time", (60, 10))],
        set(),
    ),
    Case(
        "probes that say not ready",
        [requests("200", (60, 1)), requests("503", (60, 50), model="", route="/readyz")],
        set(),
    ),
    Case(
        "keys that nobody can read",
        [requests("200", (60, 100)), requests("503", (60, 10), model="")],
        {("availability-fast", None), ("availability-slow", None)},
    ),
    Case(
        "too few workers: refused at once",
        [items("in_time", (60, 80)), items("refused", (60, 20))],
        both("deadlines-fast") | both("deadlines-slow"),
    ),
    Case(
        "too few workers: late",
        [requests("504", (60, 20)), items("in_time", (60, 80)), items("late", (60, 20))],
        both("deadlines-fast") | both("deadlines-slow"),
    ),
    Case(
        "one small model of two",
        [
            *(items("in_time", (60, 1000), model="large"), items("late", (60, 0), model="large")),
            *(items("in_time", (60, 5), model="small"), items("late", (60, 1), model="small")),
        ],
        {("deadlines-fast", "small"), ("deadlines-slow", "small")},
    ),
    Case("items a little late", [items("in_time", (60, 995)), items("late", (60, 5))], set()),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.about)
def test_alerts_of_cloud_monitoring(case: Case) -> None:
    series = TimeSeries()
    for counted in case.counted:
        for minute, value in samples(counted, case.every_min):
            series.append(counted.name, labels_of(counted), minute * 60.0, value)
    fired: Fired = set()
    for alert in alerts(BOUNDS):
        if alert.key in BURNING:
            vector = PromQuery(alert.query).value(series, minutes(case) * 60.0)
            assert isinstance(vector, dict)
            fired |= {(alert.key, dict(labels).get("model")) for labels in vector}
    assert fired == case.fired


def samples(counted: Counted, every_min: int) -> list[tuple[int, float]]:
    """Returns (minute, value) for each scrape. A counter starts at 0."""
    points, value, minute = [(0, 0.0)], 0.0, 0
    for length, per_min in counted.parts:
        for _ in range(length // every_min):
            minute, value = minute + every_min, value + per_min * every_min
            points.append((minute, value))
    return points


def labels_of(counted: Counted) -> Labels:
    return tuple(sorted(counted.labels.items()))


def minutes(case: Case) -> int:
    return sum(length for length, _ in case.counted[0].parts)


@pytest.mark.slow
def test_rules_of_prometheus(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    # Alerts are evaluated only every few minutes, so simulating several days takes seconds.
    seldom = {"groups": [group | {"interval": "4m"} for group in rules(BOUNDS, "file")["groups"]]}
    (tmp_path / "rules.yaml").write_text(json.dumps(seldom), encoding="utf-8")
    tests = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "4m",
        "tests": [as_promtool(case) for case in CASES if minutes(case) <= DAY],
    }
    # JSON is valid YAML, and faster to generate.
    (tmp_path / "tests.yaml").write_text(json.dumps(tests), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def matchers(counted: Counted) -> str:
    return ",".join(f"{name}={json.dumps(value)}" for name, value in counted.labels.items())


def as_promtool(case: Case) -> dict[str, object]:
    named = {alert.key: alert for alert in alerts(BOUNDS)}
    annotated = {
        rule["alert"]: rule
        for group in rules(BOUNDS, "file")["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }

    def expected(key: str, model: str | None) -> dict[str, object]:
        rule = annotated[named[key].name]
        scope = {"scope": "all"} if model is None else {"scope": "model", "model": model}
        summary = named[key].title + (f" ({model})" if model else "")
        return {
            "exp_labels": {**rule["labels"], "objective": key.partition("-")[0], **scope},
            "exp_annotations": {**rule["annotations"], "summary": summary},
        }

    return {
        "name": case.about,
        "interval": f"{case.every_min}m",
        "input_series": [
            {
                "series": f"{series.name}{{{matchers(series)}}}",
                "values": " ".join(f"{value:.6f}" for _, value in samples(series, case.every_min)),
            }
            for series in case.counted
        ],
        "alert_rule_test": [
            {
                "eval_time": f"{minutes(case) + 3}m",
                "alertname": named[key].name,
                "exp_alerts": [expected(key, model) for fired, model in case.fired if fired == key],
            }
            for key in BURNING
        ],
    }
