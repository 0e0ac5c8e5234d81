"""The alerts as rules for Prometheus: a separate file, and objects of two operators.

Ratios are recorded, so that a graph shows what an alert saw, and windows of days are read every
two minutes only. Alerts of Cloud Monitoring can't record, so theirs have the whole expression
(infra/monitoring/google.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from infra.monitoring.alerts import OF_FUNCTIONS, OFF_GOOGLE, RUNBOOK, Alert, alerts
from infra.monitoring.objectives import (
    FAST,
    OBJECTIVES,
    SCOPES,
    SLOW,
    Bounds,
    BurnRate,
    Objective,
    bad_events,
    error_ratio,
)

Form = Literal["file", "PrometheusRule", "Rules"]
NAME = "penstock"
RATIO, BAD = "penstock:slo_errors:ratio", "penstock:slo_bad:increase"
"""Recorded series, by `objective` and `scope`: of each `model`, or `all`. The window follows."""
_LEVELS = {"CRITICAL": "page", "WARNING": "ticket"}
_APIS = {
    "PrometheusRule": "monitoring.coreos.com/v1",
    "Rules": "monitoring.googleapis.com/v1",
}


def rules(bounds: Bounds, form: Form, runbook_url: str = RUNBOOK) -> dict[str, Any]:
    """The rules.

    Args:
        bounds: targets in numbers.
        form: a file for Prometheus' `rule_files`, an object of Prometheus Operator, or one of
            Google's Managed Prometheus.
        runbook_url: URL of docs/how-to/operations.md.
    """
    groups = {"groups": _groups(bounds, runbook_url)}
    if form == "file":
        return groups
    return {
        "apiVersion": _APIS[form],
        "kind": form,
        "metadata": {"name": NAME, "labels": {"app.kubernetes.io/name": NAME}},
        "spec": groups,
    }


def _groups(bounds: Bounds, runbook_url: str) -> list[dict[str, Any]]:
    of_objectives = [
        _burn_alert(objective, rates, alert, bounds)
        for objective in OBJECTIVES
        for key, rates in (("fast", FAST), ("slow", SLOW))
        for alert in alerts(bounds)
        if alert.key == f"{objective.name}-{key}"
    ]
    keys = {alert.key for alert in of_objectives}
    fast = [window for rate in FAST for window in (rate.long, rate.short)]
    slow = [window for rate in SLOW for window in (rate.long, rate.short) if window not in fast]
    others = [alert for alert in alerts(bounds) if alert.key not in keys]
    return [
        {"name": f"{NAME}-ratios-fast", "interval": "30s", "rules": _recorded(fast)},
        # Below the five minutes after which a series counts as gone.
        {"name": f"{NAME}-ratios-slow", "interval": "2m", "rules": _recorded(slow)},
        {
            "name": f"{NAME}-objectives",
            "rules": [_rule(alert, runbook_url) for alert in of_objectives],
        },
        {
            "name": f"{NAME}-alerts",
            "rules": [_rule(alert, runbook_url) for alert in (*others, *OFF_GOOGLE, *OF_FUNCTIONS)],
        },
    ]


def _recorded(windows: list[str]) -> list[dict[str, Any]]:
    long = {rate.long for rate in (*FAST, *SLOW)}
    return [
        {
            "record": f"{name}{window}",
            "expr": expr,
            "labels": {"objective": objective.name, "scope": scope},
        }
        for objective in OBJECTIVES
        for window in windows
        for scope in SCOPES
        for name, expr in (
            (RATIO, error_ratio(objective, window, scope)),
            (BAD, bad_events(objective, window, scope)),
        )
        if name == RATIO or window in long
    ]


def _burn_alert(
    objective: Objective, rates: tuple[BurnRate, ...], alert: Alert, bounds: Bounds
) -> Alert:
    """Returns the alert on recorded series."""
    chosen = f'{{objective="{objective.name}"}}'

    def burns(rate: BurnRate) -> str:
        limit = f"{rate.rate:g} * {bounds.budgets[objective.name]}"
        return (
            f"({RATIO}{rate.long}{chosen} > {limit} and {RATIO}{rate.short}{chosen} > {limit}"
            f" and {BAD}{rate.long}{chosen} >= {bounds.least_bad_events})"
        )

    query = " or ".join(burns(rate) for rate in rates)
    return Alert(alert.key, alert.title, alert.severity, query, alert.for_s, alert.every_s)


def _rule(alert: Alert, runbook_url: str) -> Mapping[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.query,
        "for": f"{alert.for_s}s",
        "labels": {"severity": _LEVELS[alert.severity]},
        "annotations": {
            "summary": f"{alert.title}{{{{ with $labels.model }}}} ({{{{ . }}}}){{{{ end }}}}",
            "runbook_url": f"{runbook_url}#{alert.anchor}",
        },
    }
