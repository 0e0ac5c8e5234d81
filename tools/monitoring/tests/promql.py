"""All queries in alerts, rules, and dashboards, and the metrics that they use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser as parser
import yaml

RENDERED = Path("infra/monitoring/rendered")
_IN_TERRAFORM = {
    "${availability_budget}": "0.001",
    "${deadlines_budget}": "0.01",
    "${least_bad_events}": "10",
    "${worker_hour_usd}": "label_replace(vector(0.2), 'worker', 'm', '', '')",
}
_IN_GRAFANA = {"$availability": "0.999", "$deadlines": "0.99", "$worker_hour_usd": "0.2"}


@dataclass
class Asked:
    """The metrics in a query, each with its matchers, and the labels used to group and join."""

    metrics: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)


def asked_by(query: str) -> Asked:
    """Parses a query. Raises ValueError if the text is not valid PromQL."""
    parsed = Asked()
    _walk(parser.parse(query), parsed)
    return parsed


def _walk(node: Any, asked: Asked) -> None:
    match type(node).__name__:
        case "VectorSelector":
            pairs = [(matcher.name, matcher.value) for matcher in node.matchers.matchers]
            asked.metrics.setdefault(node.name, []).extend(pairs)
            asked.labels |= {name for name, _ in pairs}
        case "MatrixSelector":
            _walk(node.vector_selector, asked)
        case "AggregateExpr":
            asked.labels |= set(node.modifier.labels if node.modifier else ())
            _walk(node.expr, asked)
        case "BinaryExpr":
            if node.modifier:
                asked.labels |= set(node.modifier.matching.labels if node.modifier.matching else ())
            _walk(node.lhs, asked)
            _walk(node.rhs, asked)
        case "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
            _walk(node.expr, asked)
        case "Call":
            for argument in node.args:
                _walk(argument, asked)
        case "NumberLiteral" | "StringLiteral":
            pass
        case kind:
            raise AssertionError(f"{kind} is not supported here")


def queries() -> Iterator[tuple[str, str]]:
    """Yields every query's location and text, with numbers in place of variables."""
    alerts = json.loads(_fill("alerts.json.tftpl"))
    for key, alert in alerts.items():
        yield f"alert {key}", alert["query"]
    for group in rules()["groups"]:
        for rule in group["rules"]:
            yield f"rule {rule.get('alert', rule.get('record'))}", rule["expr"]
    for tile in json.loads(_fill("dashboard.json.tftpl"))["mosaicLayout"]["tiles"]:
        for data_set in tile["widget"]["xyChart"]["dataSets"]:
            where = f"google {tile['widget']['title']}"
            yield where, data_set["timeSeriesQuery"]["prometheusQuery"]
    for title, query, _ in grafana_queries():
        yield f"grafana {title}", query


def grafana_queries() -> Iterator[tuple[str, str, str]]:
    """Yields (panel, text, legend) for each Grafana query."""
    for panel in grafana()["panels"]:
        for target in panel.get("targets", []):
            query = _replaced(target["expr"], _IN_GRAFANA)
            yield panel["title"], query, target["legendFormat"]


def rules() -> Any:
    return yaml.safe_load((RENDERED / "prometheus-rules.yaml").read_text(encoding="utf-8"))


def grafana() -> Any:
    return json.loads((RENDERED / "grafana-dashboard.json").read_text(encoding="utf-8"))


def google_dashboard() -> Any:
    """Returns the Cloud Monitoring dashboard with Terraform's values filled in."""
    return json.loads(_fill("dashboard.json.tftpl"))


def _fill(name: str) -> str:
    text = _replaced((RENDERED / name).read_text(encoding="utf-8"), _IN_TERRAFORM)
    assert not re.search(r"(?<!\$)\$\{", text), "Terraform does not provide other variables"
    return text.replace("$${", "${")


def _replaced(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text
